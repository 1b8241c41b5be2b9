"""Checkpoints: written whole or not at all, the last few kept, checked before use, never of a run gone wrong."""

import errno
import io
import logging
import os
import pickle
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO

from cribo.errors import Stopped
from cribo.files import Damaged, FolderError, check_archive, remove_parts, sync, write_whole
from cribo.training.module import ResumableModule

log = logging.getLogger("cribo")

CHECKPOINTS = "checkpoints"
"""The folder of a run that holds them."""

# Of what a checkpoint holds; to be raised when an older version could not go on from it.
CHECKPOINT_FORMAT = 3
_FORMAT = "cribo_format"
# Without these a run cannot go on.
_CONTENT = ("state_dict", "optimizer_states", "loops", "callbacks", "global_step", "cribo")
_NO_ROOM = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}  # Windows knows no quotas
_NAME = re.compile(r"step=(\d+)\.ckpt")

_T = TypeVar("_T")


class UnusableCheckpoint(ValueError):
    """A checkpoint that no run can go on from; nothing of it was taken up."""


# ------------------------------------------------------------------------------------------------ reading


def checkpoint_files(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, the latest step first; they may be damaged."""
    found = [path for path in (folder / CHECKPOINTS).glob("step=*.ckpt") if _NAME.fullmatch(path.name)]
    return sorted((path for path in found if path.is_file()), key=_step, reverse=True)


def last_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the latest step that is good; None if the run has written none yet. Reads it whole.

    Raises:
        FolderError: there are checkpoints, and none is good.
    """
    return _last_good(folder)[0]


def resume_point(folder: Path) -> Path | None:
    """`last_checkpoint` for a run that goes on: what a killed run has left is cleared away first.

    A later checkpoint that is not good is put aside under another name, with a warning: it is no part of the run
    that goes on without it. For the first process, which holds the run's lock; others learn of its decision once
    they are connected (`Checkpoints.setup`).

    Raises:
        FolderError: there are checkpoints, and none is good; nothing was renamed.
    """
    for written_to in (folder, folder / CHECKPOINTS):
        remove_parts(written_to)
    good, refused = _last_good(folder)
    for path, reason in refused:
        aside = path.with_name(f"{path.name}.refused")
        try:
            path.replace(aside)
        except OSError as error:
            log.warning("%s cannot be renamed: %s", path, error.strerror)
            aside = path
        log.warning("%s cannot be used: %s. The run goes on from %s; the file is kept as %s", path, reason, good, aside)
    return good


def check_checkpoint(path: Path) -> None:
    """Read a checkpoint whole, without its tensors' taking up memory.

    Raises:
        UnusableCheckpoint: it cannot be read, is not what was written, is of another format, or holds something
            else than a run's state in tensors, numbers, text, lists and dictionaries. The message does not name it.
    """
    try:
        check_archive(path)
    except Damaged as error:
        raise UnusableCheckpoint(str(error)) from error
    except OSError as error:
        raise UnusableCheckpoint(f"it cannot be read: {error.strerror}") from error
    _load(path, mmap=True)  # tensors are mapped and not touched


def _load(path: Path, *, mmap: bool) -> dict[str, Any]:
    try:
        # Weights only: whatever else the file names, it is not imported, let alone called.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f" but {named[1]}" if named else ""
        raise UnusableCheckpoint(
            f"it holds more than tensors, numbers, text, lists and dictionaries{what}, so no run of cribo wrote it; "
            "nothing of it was executed"
        ) from error
    except Exception as error:  # what torch raises for what is no file of its own is not documented
        raise UnusableCheckpoint(f"PyTorch cannot read it: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise UnusableCheckpoint(f"it holds a {type(content).__name__} and no state of a run")
    missing = [name for name in _CONTENT if name not in content]
    if missing:
        raise UnusableCheckpoint(f"it holds no {', '.join(missing)}, so it is no state of a run")
    if (found := content.get(_FORMAT, 2)) != CHECKPOINT_FORMAT:
        raise UnusableCheckpoint(
            f"its format is {found}, and this version of cribo reads format {CHECKPOINT_FORMAT}: resume it with the "
            "version that wrote it"
        )
    return content


def _last_good(folder: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    refused: list[tuple[Path, str]] = []
    for path in checkpoint_files(folder):
        try:
            check_checkpoint(path)
        except UnusableCheckpoint as error:
            refused.append((path, str(error)))
        else:
            return path, refused
    if refused:
        tried = "; ".join(f"{path.name}: {reason}" for path, reason in refused)
        raise FolderError(
            f"no checkpoint in {folder / CHECKPOINTS} can be used ({tried}). Put a copy of one in its place, or move "
            "them away: then --resume starts this run from its beginning"
        )
    return None, []


def _step(path: Path) -> int:
    return int(path.stem.partition("=")[2])


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_disk_full(error: BaseException) -> bool:
    """Whether an error says that there is no room: no space, or a quota."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen.errno in _NO_ROOM
        # torch's writer hides the cause behind its own message.
        if isinstance(seen, RuntimeError) and any(
            sign in str(seen) for sign in ("file write failed", "unexpected pos", "No space left")
        ):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


# ------------------------------------------------------------------------------------------------ writing


class WholeFileCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, checked on the disk, and only then moved into place.

    Attributes:
        path: of the checkpoint that all processes have agreed on; what Lightning asks for is read otherwise.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._failures: list[Exception] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint whole or not at all.

        Raises:
            OSError: there is no room, or the disk fails.
            UnusableCheckpoint: the checkpoint holds what could not be loaded again.
        """
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, lambda part: _write(checkpoint, part))
        except Exception as error:
            if self._failures is None:
                raise
            self._failures.append(error)

    @contextmanager
    def failures_kept(self) -> Iterator[list[Exception]]:
        """Put failures to save into a list: only the first process writes, and the others wait for it to go on."""
        self._failures = failures = []
        try:
            yield failures
        finally:
            self._failures = None

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint in all processes, or in none; never anything but weights and plain values.

        Raises:
            UnusableCheckpoint: a process cannot use it.
        """
        path = self.path or Path(path)
        content, failed = {}, None
        try:
            check_checkpoint(path)
            content = _load(path, mmap=False)
        except UnusableCheckpoint as error:
            failed = f"{path} on {socket.gethostname()} cannot be used: {error}"
        if failure := _failure_of_any(failed):
            raise UnusableCheckpoint(failure)
        return content


def _write(checkpoint: dict[str, Any], part: Path) -> None:
    with part.open("wb") as file:  # given the path, torch hides the system's error behind its own
        torch.save(checkpoint | {_FORMAT: CHECKPOINT_FORMAT}, file)
    sync(part)
    _forget_cached(part)
    try:
        check_archive(part)
    except Damaged as error:
        raise OSError(errno.EIO, f"what was read back is not what was written: {error}") from error
    _load(part, mmap=True)


def _forget_cached(path: Path) -> None:
    """Have the next reading of a file come from the disk, where the system can be told so."""
    if not hasattr(os, "posix_fadvise"):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


# ------------------------------------------------------------------------------------------------ in a run


@dataclass(frozen=True)
class _Failure:
    """What the other processes have to know of a failure to save: whether it may be over soon, and why it failed."""

    may_pass: bool
    reason: str


class Checkpoints(L.Callback):
    """Saves every so many steps and at the end; a save that fails is reported and tried again soon.

    Lightning's own callback, under manual optimisation, saves weights from before the step it is called after,
    and forgets an older file whether or not the newer one could be written.

    Args:
        folder: the run folder.
        every_steps: between two checkpoints.
        keep: how many of the last stay on disk.
        resume_from: the checkpoint that this process would go on from; None where it would begin.
    """

    def __init__(self, folder: Path, *, every_steps: int, keep: int, resume_from: Path | None = None) -> None:
        self.folder = folder
        self.every_steps = every_steps
        self.keep = keep
        self.resume_from = resume_from
        self.saved_step: int | None = None
        self._wait = 0
        self._retry_step: int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Have all processes go on from the first one's checkpoint.

        Raises:
            FolderError: it is not there for all of them.
        """
        path = _agreed_checkpoint(self.folder, self.resume_from)
        _io(trainer).path = path
        self.saved_step = None if path is None else _step(path)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse what could be saved and then not be loaded.

        Raises:
            ValueError: a callback's state is more than tensors, numbers, text, lists and dictionaries.
        """
        callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        for callback in callbacks:
            file = io.BytesIO()
            try:
                torch.save(callback.state_dict(), file)
                file.seek(0)
                torch.load(file, weights_only=True)
            except (pickle.PickleError, AttributeError, TypeError) as error:  # pickle raises each of them
                raise ValueError(
                    f"the state_dict of the callback {type(callback).__name__} holds more than tensors, numbers, "
                    "text, lists and dictionaries, so no checkpoint of it could be loaded again: keep it to these"
                ) from error

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when it is time, or time to try again."""
        if not self.is_due(trainer.global_step):
            return
        failure = self._save(trainer)
        if failure is not None and trainer.global_step < trainer.max_steps:  # at the end it is tried again at once
            self._try_later(trainer, failure)

    def is_due(self, step: int) -> bool:
        """Whether one is saved after this many steps."""
        return step % self.every_steps == 0 or step == self._retry_step

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save where the run ended, so that it can be looked at or continued."""
        if self.saved_step == trainer.global_step:
            return
        failure = self._save(trainer)
        if failure is not None:
            self._report(trainer, failure, "the run ends without one of its last step")

    def _save(self, trainer: L.Trainer) -> _Failure | None:
        """Save in all processes, or learn in all of them why it failed this time."""
        module = trainer.lightning_module
        assert isinstance(module, ResumableModule)
        module.check_weights()
        path = self._path(trainer)
        with _io(trainer).failures_kept() as failures:
            trainer.save_checkpoint(path)
        # Only the first process has written; the others learn from it how it went.
        failure = _of_all(_describe(failures[0]) if failures else None)[0]
        if failure is not None and not failure.may_pass:
            raise failures[0] if failures else Stopped(f"the first process could not save {path}: {failure.reason}")
        if failure is None:
            self.saved_step, self._retry_step, self._wait = trainer.global_step, None, 0
            if trainer.is_global_zero:
                self._remove_old(trainer.global_step)
        return failure

    def _try_later(self, trainer: L.Trainer, failure: _Failure) -> None:
        # Soon, for room may be made at any time, and then more rarely, for a save that fails takes its time as well.
        self._wait = min(2 * self._wait or 1, self.every_steps)
        step = trainer.global_step
        regular = (step // self.every_steps + 1) * self.every_steps
        self._retry_step = min(step + self._wait, regular, trainer.max_steps)
        self._report(
            trainer,
            failure,
            f"training goes on and saves again at step {self._retry_step}: make room, or mend what failed, until then",
        )

    def _report(self, trainer: L.Trainer, failure: _Failure, what_next: str) -> None:
        if trainer.is_global_zero:
            log.error(
                "could not save %s: %s. The checkpoint before is intact; %s",
                self._path(trainer),
                failure.reason,
                what_next,
            )

    def _path(self, trainer: L.Trainer) -> Path:
        return self.folder / CHECKPOINTS / f"step={trainer.global_step:08d}.ckpt"

    def _remove_old(self, step: int) -> None:
        # Later ones are none of this run's own: it was resumed from before them.
        for old in [path for path in checkpoint_files(self.folder) if _step(path) <= step][self.keep :]:
            try:
                old.unlink(missing_ok=True)
            except OSError as error:
                log.warning("could not remove %s, which is no longer needed: %s", old, error.strerror)


def _describe(error: Exception) -> _Failure:
    """What a failure to save means; torch hides the system's error behind its own."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return _Failure(True, "the disk is full" if is_disk_full(seen) else seen.strerror or _first_line(seen))
        seen = seen.__cause__ or seen.__context__
    return _Failure(is_disk_full(error), _first_line(error))


def _agreed_checkpoint(folder: Path, own: Path | None) -> Path | None:
    """The first process's checkpoint, by the name that it has here.

    Raises:
        FolderError: another process would begin, or does not see the same file.
    """
    name, size = _of_all((None, None) if own is None else (own.name, _size(own)))[0]
    mine = None if name is None else folder / CHECKPOINTS / name
    unlike = (own is None) != (mine is None) or (mine is not None and _size(mine) != size)
    hosts = sorted({host for host in _of_all(socket.gethostname() if unlike else None) if host})
    if hosts:
        what = f"the checkpoint {name}" if name is not None else "no checkpoint"
        raise FolderError(
            f"the first process sees {what} in {folder}, processes on {', '.join(hosts)} do not see the same: put the "
            "run folder where all hosts reach it under this name, such as a network file system, or copy it to each"
        )
    return mine


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _io(trainer: L.Trainer) -> WholeFileCheckpointIO:
    found = trainer.strategy.checkpoint_io
    assert isinstance(found, WholeFileCheckpointIO)
    return found


def _failure_of_any(own: str | None) -> str | None:
    """What failed on a process, the first one's first, so that all can refuse together; None if nothing did."""
    return next((failure for failure in _of_all(own) if failure), None)


def _of_all(value: _T) -> list[_T]:
    """The values of all processes, the first one's first; of this one where it is alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
