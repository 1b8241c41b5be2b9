"""Save, verify and restore checkpoints, atomically and consistently on all ranks."""

import errno
import io
import logging
import os
import pickle
import re
import socket
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO

from cribo.base.errors import Damaged, FolderError, InputError, Stopped, UnusableCheckpoint
from cribo.base.files import check_archive, remove_parts, write_whole
from cribo.training.module import ResumableModule

log = logging.getLogger("cribo")

CHECKPOINTS = "checkpoints"
"""Name of the sub-folder of a run folder."""

# Version of the content of checkpoints; incremented when older versions of cribo cannot resume from them.
CHECKPOINT_FORMAT = 3
_FORMAT = "cribo_format"
_REQUIRED = ("state_dict", "optimizer_states", "loops", "callbacks", "global_step", "cribo")
_NAME = re.compile(r"step=(\d+)\.ckpt")

_T = TypeVar("_T")


# ------------------------------------------------------------------------------------------------ reading


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the checkpoints of a run folder, latest step first; they may be damaged."""
    found = [path for path in (folder / CHECKPOINTS).glob("step=*.ckpt") if _NAME.fullmatch(path.name)]
    return sorted((path for path in found if path.is_file()), key=_step, reverse=True)


def resume_point(folder: Path) -> Path | None:
    """Return the latest valid checkpoint; None if the run has not written any.

    Removes partial files of killed runs, and renames later, invalid checkpoints with a warning. Call it on rank 0 only,
    which holds the run's lock; the latest of `checkpoint_files` is then the same on all ranks.

    Raises:
        FolderError: there are checkpoints, but none is valid; nothing was renamed.
    """
    for written_to in (folder, folder / CHECKPOINTS):
        remove_parts(written_to)
    refused: dict[Path, str] = {}
    for path in checkpoint_files(folder):
        try:
            check_checkpoint(path)
        except UnusableCheckpoint as error:
            refused[path] = str(error)
            continue
        for damaged, reason in refused.items():
            aside = damaged.replace(damaged.with_name(f"{damaged.name}.refused"))
            log.warning("%s cannot be used: %s. Resuming from %s; renamed the file to %s", damaged, reason, path, aside)
        return path
    if refused:
        tried = "; ".join(f"{path.name}: {reason}" for path, reason in refused.items())
        raise FolderError(
            f"no checkpoint in {folder / CHECKPOINTS} can be used ({tried}). Restore one from a copy, or move "
            "all of them to another folder, so that --resume starts the run from the beginning"
        )
    return None


def check_checkpoint(path: Path) -> None:
    """Read and verify a whole checkpoint without holding its tensors in memory.

    Raises:
        UnusableCheckpoint: the file cannot be read, is damaged, has another format, or contains other types than
            tensors, numbers, strings, lists and dictionaries. The message does not name the file.
    """
    try:
        check_archive(path)
    except Damaged as error:
        raise UnusableCheckpoint(str(error)) from error
    except OSError as error:
        raise UnusableCheckpoint(f"it cannot be read: {error.strerror}") from error
    _load(path, mmap=True)


def _load(path: Path, *, mmap: bool) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = named[1] if named else "other objects"
        raise UnusableCheckpoint(
            f"it contains {what}, not only tensors, numbers, strings, lists and dictionaries, so it was not written by "
            "cribo; none of its code was run"
        ) from error
    except Exception as error:  # torch.load's errors on other files are not documented
        raise UnusableCheckpoint(f"PyTorch cannot read it: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise UnusableCheckpoint(f"it contains a {type(content).__name__}, not a run's state")
    missing = [name for name in _REQUIRED if name not in content]
    if missing:
        raise UnusableCheckpoint(f"it has no {', '.join(missing)}, so it is not a run's state")
    if (found := content.get(_FORMAT, 2)) != CHECKPOINT_FORMAT:
        raise UnusableCheckpoint(
            f"it has format {found}, but this version of cribo reads format {CHECKPOINT_FORMAT}: resume with the "
            "version that wrote it"
        )
    return content


def _step(path: Path) -> int:
    return int(path.stem.partition("=")[2])


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ------------------------------------------------------------------------------------------- reading, writing


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint plugin with atomic writes that are verified on disk.

    Attributes:
        path: checkpoint agreed on by all ranks, loaded instead of the one passed by Lightning.
        failure: error of the last save; None if it succeeded. It is not raised, because only rank 0 writes while the
            other ranks wait.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self.failure: Exception | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint completely or not at all."""
        path, self.failure = Path(path), None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, lambda part: _write(checkpoint, part))
        except Exception as error:
            self.failure = error

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint of weights and plain values, on all ranks or none.

        Raises:
            UnusableCheckpoint: a rank cannot use it.
        """
        path = self.path or Path(path)
        content, failure = {}, None
        try:
            check_checkpoint(path)
            content = _load(path, mmap=False)
        except UnusableCheckpoint as error:
            failure = f"{path} on {socket.gethostname()} cannot be used: {error}"
        for failed in _all_ranks(failure):
            if failed:
                raise UnusableCheckpoint(failed)
        return content


def _write(checkpoint: dict[str, Any], part: Path) -> None:
    with part.open("wb") as file:  # with a path, torch would replace the system's error by its own
        torch.save(checkpoint | {_FORMAT: CHECKPOINT_FORMAT}, file)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # so that it is verified on disk, not in the page cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        check_archive(part)
    except Damaged as error:
        raise OSError(errno.EIO, f"the file differs from what was written: {error}") from error
    _load(part, mmap=True)


# ------------------------------------------------------------------------------------------------ in a run


class Checkpoints(L.Callback):
    """Callback that saves every `every_steps` steps and at the end, and retries failed saves.

    Unlike Lightning's `ModelCheckpoint`, which under manual optimisation saves weights from before the step, and
    removes the older file even if the newer one could not be written.

    Args:
        folder: the run folder.
        every_steps: steps between checkpoints.
        keep: number of the latest checkpoints to keep.
        resume_from: checkpoint found by this rank; None to start from the beginning.
    """

    def __init__(self, folder: Path, *, every_steps: int, keep: int, resume_from: Path | None = None) -> None:
        self.folder = folder
        self.every_steps = every_steps
        self.keep = keep
        self.resume_from = resume_from
        self.saved_step: int | None = None
        self._due = 0
        self._retry_after = 1

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Resume all ranks from the checkpoint of rank 0.

        Raises:
            FolderError: some ranks do not find this checkpoint.
        """
        seen = _all_ranks((socket.gethostname(), self.resume_from and self.resume_from.name))
        name = seen[0][1]
        unlike = sorted({host for host, other in seen if (other is None) != (name is None)})
        if unlike:
            raise FolderError(
                f"rank 0 sees {f'the checkpoint {name}' if name else 'no checkpoint'} in {self.folder}, ranks on "
                f"{', '.join(unlike)} do not: use a run folder on a shared file system, or "
                "copy it to each host"
            )
        path = None if name is None else self.folder / CHECKPOINTS / name
        _io(trainer).path = path
        self.saved_step = None if path is None else _step(path)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that the state of each callback can be restored.

        Raises:
            ValueError: a callback's state contains other types than tensors, numbers, strings, lists and dictionaries.
        """
        self._due = self._next_regular(trainer.global_step)
        callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        for callback in callbacks:
            file = io.BytesIO()
            try:
                torch.save(callback.state_dict(), file)
                file.seek(0)
                torch.load(file, weights_only=True)
            except (pickle.PickleError, AttributeError, TypeError) as error:  # pickle raises each of them
                raise InputError(
                    f"the state_dict of the callback {type(callback).__name__} contains other types than tensors, "
                    "numbers, strings, lists and dictionaries, so checkpoints could not be loaded: use only these"
                ) from error

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save every `every_steps`; after a failure, retry after 1, 2, 4, ... steps."""
        step, regular = trainer.global_step, self._next_regular(trainer.global_step)
        if step < self._due:
            return
        failure = self._save(trainer)
        if failure is None:
            self._due, self._retry_after = regular, 1
        elif step < trainer.max_steps:  # otherwise `on_train_end` retries immediately
            self._due = min(step + self._retry_after, regular, trainer.max_steps)
            self._retry_after *= 2
            self._report(
                trainer, failure, f"training continues and retries at step {self._due}: free space or fix the cause"
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the last step."""
        if self.saved_step != trainer.global_step and (failure := self._save(trainer)) is not None:
            self._report(trainer, failure, "the run ends without a checkpoint of its last step")

    def _next_regular(self, step: int) -> int:
        return (step // self.every_steps + 1) * self.every_steps

    def _save(self, trainer: L.Trainer) -> str | None:
        """Save on all ranks; return the reason of a failure that may be temporary."""
        module, path, checkpoint_io = trainer.lightning_module, self._path(trainer), _io(trainer)
        assert isinstance(module, ResumableModule)
        module.check_weights()
        trainer.save_checkpoint(path)
        error = checkpoint_io.failure
        system_error = _system_error(error)
        reason = error and _first_line(error) if system_error is None else system_error.strerror or str(system_error)
        reason, may_succeed_later = _all_ranks((reason, system_error is not None))[0]
        if reason is None:
            self.saved_step = trainer.global_step
            if trainer.is_global_zero:
                self._remove_old()
        elif not may_succeed_later:
            raise error or Stopped(f"rank 0 could not save {path}: {reason}")
        return reason

    def _report(self, trainer: L.Trainer, reason: str, consequence: str) -> None:
        if trainer.is_global_zero:
            path = self._path(trainer)
            log.error("could not save %s: %s. The previous checkpoint is intact; %s", path, reason, consequence)

    def _path(self, trainer: L.Trainer) -> Path:
        return self.folder / CHECKPOINTS / f"step={trainer.global_step:08d}.ckpt"

    def _remove_old(self) -> None:
        assert self.saved_step is not None
        # Files of later steps are from before this run was resumed from an earlier one.
        for old in [path for path in checkpoint_files(self.folder) if _step(path) <= self.saved_step][self.keep :]:
            try:
                old.unlink(missing_ok=True)
            except OSError as error:
                log.warning("could not remove %s, which is no longer needed: %s", old, error.strerror)


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the system error that caused an error, such as torch's own."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _io(trainer: L.Trainer) -> AtomicCheckpointIO:
    found = trainer.strategy.checkpoint_io
    assert isinstance(found, AtomicCheckpointIO)
    return found


def _all_ranks(value: _T) -> list[_T]:
    """Return the values of all ranks, in order."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
