"""What the evaluations that train share: a folder that can be gone on with, and Lightning's trainer in it."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from torch.utils.data import DataLoader, Dataset, Sampler

from cribo.arguments import ConfigError
from cribo.data import UnreadableImage
from cribo.data.randomness import keyed_generator
from cribo.devices import resolve_workers
from cribo.errors import Stopped
from cribo.evaluation.results import OUT, RESULTS, EvaluationResult, flat, read_result, setting_value
from cribo.evaluation.runtime import TrainingRuntime
from cribo.files import FolderError, remove_parts, write_json
from cribo.folders import MARKER, ResultFolder
from cribo.processes import end_with_launcher, is_first_process
from cribo.training.checkpoints import Checkpoints, checkpoint_files, resume_point
from cribo.training.folder import RUN_LOCK, claim, open_on_all_ranks
from cribo.training.interruption import Interruption
from cribo.training.lightning import interruptible, make_trainer, quiet_lightning, require_launched
from cribo.training.module import ResumableModule
from cribo.training.progress import StepProgress

log = logging.getLogger("cribo")

SETTINGS = "evaluation.json"
"""The file of the settings of an evaluation that trains, by which a resumption is compared."""

_KEPT_CHECKPOINTS = 2
_ORDER = 0x6F7264  # keeps the draws of the order apart from others of the same seed
_WORKER_DIED = "DataLoader worker (pid"


class TrainedModule(ResumableModule):
    """What an evaluation trains, by Lightning's automatic optimisation.

    All its random numbers are keyed, none come from global generators: a resumed training is then the same as one
    that was not stopped. What `self.log` is given with `prog_bar=True` is shown beside the progress bar.
    """


class KeyStream(Sampler[list[tuple[int, int]]]):
    """The keys (epoch, index) of each batch from a step on: one permutation of the data after the other.

    Batches go over the ends of epochs, so that a set may be smaller than a batch. The place in the data is a function
    of the step alone.

    Args:
        count: of the data.
        batch_size: over all processes.
        steps: of the whole training.
        seed: of the orders.
        position: tells the step that comes next.
        rank, world_size: which part of each batch this process gets.

    Raises:
        ConfigError: a batch that the processes cannot share evenly.

    Example:
        >>> keys = KeyStream(3, 2, 3, seed=0, position=lambda: 0)
        >>> [[epoch for epoch, _ in batch] for batch in keys], sorted(index for batch in keys for _, index in batch)
        ([[0, 0], [0, 1], [1, 1]], [0, 0, 1, 1, 2, 2])
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        steps: int,
        *,
        seed: int,
        position: Callable[[], int],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size % world_size:
            raise ConfigError(f"batch_size must be a multiple of the {world_size} devices, got {batch_size}")
        self.count, self.batch_size, self.steps, self.seed = count, batch_size, steps, seed
        self.position, self.rank, self.world_size = position, rank, world_size

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order, known = [], -1
        share = self.batch_size // self.world_size
        for step in range(self.position(), self.steps):
            keys = []
            first = step * self.batch_size + self.rank * share
            for place in range(first, first + share):
                epoch, number = divmod(place, self.count)
                if epoch != known:
                    generator = keyed_generator(self.seed, _ORDER, epoch)
                    order, known = torch.randperm(self.count, generator=generator).tolist(), epoch
                keys.append((epoch, order[number]))
            yield keys


def fit(
    module: TrainedModule,
    *,
    train: Dataset[Any],
    validation: Dataset[Any],
    batch_size: int,
    steps: int,
    seed: int,
    folder: Path,
    label: str,
    runtime: TrainingRuntime,
    console: Console,
    collate: Callable[[list[Any]], Any] | None = None,
    validation_batch_size: int = 1,
    validation_collate: Callable[[list[Any]], Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> L.Trainer:
    """Train a module and score it, from the last checkpoint in the folder if there is one.

    Args:
        module: what is trained; its weights afterwards are those of the last step.
        train: samples by (epoch, index).
        validation: samples by index; each process is given its share, none twice.
        batch_size: samples of a step, over all devices.
        steps: optimiser steps.
        seed: of the order of the data.
        folder: for checkpoints and TensorBoard's log.
        label: what the progress bar is called.
        runtime: where and how.
        console: shows progress.
        collate: makes a batch of samples; torch's default when None.
        validation_batch_size: samples of the validation at once, on each device.
        validation_collate: makes a batch of them; torch's default when None.
        callbacks: further ones.

    Returns:
        the trainer, after its validation.

    Raises:
        ConfigError: devices that are not there, that cannot share a batch, or have nothing to score.
        Interrupted: SIGTERM or SIGUSR1 came; a checkpoint was written. (Ctrl-C is a KeyboardInterrupt.)
        NonFiniteLoss: weights are not finite.
        Stopped: a process that reads images was killed.
        what reading a sample raises.
    """
    checkpoint = resume_point(folder) if is_first_process() else next(iter(checkpoint_files(folder)), None)
    if checkpoint is not None:
        log.info("%s: going on from %s", label, checkpoint)
    checkpoints = Checkpoints(
        folder, every_steps=runtime.checkpoint_every, keep=_KEPT_CHECKPOINTS, resume_from=checkpoint
    )
    progress = StepProgress(console, label, every_steps=min(runtime.log_every, 10))
    advice = "go on with the same command and --resume"
    interruption = Interruption(lambda trainer: checkpoints.on_train_end(trainer, module), advice=advice)
    with quiet_lightning():
        trainer = _trainer(runtime, folder, [progress, *callbacks, checkpoints, interruption], steps)
        batches = _Batches(
            train,
            KeyStream(
                len(cast(Any, train)),
                batch_size,
                steps,
                seed=seed,
                position=lambda: trainer.global_step,
                rank=trainer.global_rank,
                world_size=trainer.world_size,
            ),
            collate,
            runtime,
        )
        scored = _Batches(
            validation, _Share(len(cast(Any, validation)), validation_batch_size, trainer), validation_collate, runtime
        )
        try:
            with interruptible(trainer, advice=advice):
                trainer.fit(module, batches, scored if runtime.evaluate_every else None, ckpt_path=checkpoint)
                trainer.validate(module, scored, verbose=False)
        except RuntimeError as error:
            if _WORKER_DIED not in str(error):
                raise
            raise Stopped(
                f"a process that reads images has ended ({error}): if the machine ran out of memory, lower "
                f"--runtime.workers; {advice}"
            ) from error
    return trainer


@contextmanager
def evaluation_folder(
    out: Path | None,
    name: str,
    settings: dict[str, Any],
    *,
    overwrite: bool,
    resume: bool,
    runtime: TrainingRuntime,
    inputs: Sequence[str | os.PathLike[str] | None] = (),
) -> Iterator[Path]:
    """The folder of an evaluation that trains: claimed and locked by its first process, the same for all.

    Args:
        out: the folder; `evaluations/<name>`, numbered, when None.
        name: of a folder that nobody has named.
        settings: what the evaluation's figures depend on, as JSON has it.
        overwrite: replace an evaluation that stands in `out`.
        resume: go on with it; with none there, begin one.
        runtime: tells which processes there are.
        inputs: files and folders that are read, which must not be in `out`.

    Raises:
        FolderError: it exists and neither is set, is in use, or holds an evaluation of other settings.
        ConfigError: devices that are not there, or both are set.
    """
    if resume and (overwrite or out is None):
        raise ConfigError("--resume does not go with --overwrite" if overwrite else "--resume needs --out, the folder")
    end_with_launcher()
    require_launched(runtime.devices, runtime.num_nodes)
    settings = json.loads(json.dumps(settings))
    with (
        ExitStack() as last,
        open_on_all_ranks(
            _trainer(runtime, None, [], 1),
            lambda held: _open(held, out, name, settings, inputs, overwrite=overwrite, resume=resume),
        ) as folder,
    ):
        try:
            yield folder
        except ConfigError:  # refused before any work: leave the place as it was, once the lock is released
            if is_first_process() and {path.name for path in folder.iterdir()} <= {MARKER, SETTINGS, RUN_LOCK}:
                for name in (MARKER, SETTINGS):
                    (folder / name).unlink(missing_ok=True)
                last.callback(_remove_if_empty, folder)
            raise


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # rmdir removes what is empty only
        folder.rmdir()


def finished_result(out: Path | None, *, resume: bool) -> EvaluationResult | None:
    """The result of an evaluation that is to be gone on with and is finished; None if there is work left."""
    if not resume or out is None or not (out / RESULTS).is_file():
        return None
    if is_first_process():
        log.info("%s is already finished: nothing to resume", out)
    return read_result(out)


def _open(
    held: ExitStack,
    out: Path | None,
    name: str,
    settings: dict[str, Any],
    inputs: Sequence[str | os.PathLike[str] | None],
    *,
    overwrite: bool,
    resume: bool,
) -> Path:
    folder = claim(
        held,
        ResultFolder(
            out or OUT / name,
            "trained evaluation",
            numbered=out is None,
            overwrite=overwrite,
            resume=resume,
            known_by=SETTINGS,
            inputs=inputs,
            advice="choose another --out, go on with it by --resume, or replace it with --overwrite",
        ),
    )
    if (folder / SETTINGS).is_file():
        _require_same(folder, settings)
        remove_parts(folder)
    else:
        write_json(folder / SETTINGS, settings)
    return folder


def _require_same(folder: Path, settings: dict[str, Any]) -> None:
    """Refuse to go on with an evaluation under settings that would make it another."""
    try:
        before = dict(flat(json.loads((folder / SETTINGS).read_text(encoding="utf-8"))))
    except ValueError as error:
        raise FolderError(f"{folder / SETTINGS} is damaged ({error}): begin again with --overwrite") from error
    now = dict(flat(settings))
    for setting in dict.fromkeys((*before, *now)):
        if before.get(setting) != now.get(setting):
            raise FolderError(
                f"{folder} was begun with {setting} {setting_value(before.get(setting))}, not "
                f"{setting_value(now.get(setting))}: leave it as it was, or choose another --out"
            )


# ----------------------------------------------------------------------------------------------- Lightning


def _trainer(runtime: TrainingRuntime, folder: Path | None, callbacks: Sequence[Callback], steps: int) -> L.Trainer:
    """A trainer that stops after `steps`; it logs to `folder`, if there is one."""
    every = runtime.evaluate_every or None
    return make_trainer(
        folder,
        callbacks,
        steps,
        accelerator=runtime.accelerator,
        threads=runtime.threads,
        devices=runtime.devices,
        num_nodes=runtime.num_nodes,
        strategy=DDPStrategy(broadcast_buffers=False) if _is_shared(runtime) else "auto",
        precision=runtime.precision,
        val_check_interval=every,
        check_val_every_n_epoch=None if every else 1,
        num_sanity_val_steps=0,
        log_every_n_steps=runtime.log_every,
    )


def _is_shared(runtime: TrainingRuntime) -> bool:
    """Whether several processes train together."""
    if runtime.num_nodes > 1 or runtime.devices != "auto":
        return runtime.num_nodes > 1 or int(runtime.devices) > 1
    return runtime.on_gpu and torch.cuda.device_count() > 1


class _Share(Sampler[list[int]]):
    """The indices of a validation that fall to one process, in batches.

    Raises:
        ConfigError: fewer samples than processes. Lightning leaves one without any out of the validation, and the
            others wait for it at the sums.
    """

    def __init__(self, count: int, batch_size: int, trainer: L.Trainer) -> None:
        if count < trainer.world_size:
            raise ConfigError(
                f"each of the {trainer.world_size} devices must have something to score, got {count}: use fewer "
                "--runtime.devices, or raise data.limit"
            )
        self.indices = range(trainer.global_rank, count, trainer.world_size)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield list(self.indices[start : start + self.batch_size])


class _Batches:
    """Batches from worker processes; what reading a sample raises there is raised here, as it was."""

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: KeyStream | _Share,
        collate: Callable[[list[Any]], Any] | None,
        runtime: TrainingRuntime,
    ) -> None:
        workers = resolve_workers(runtime.workers)
        self._loader: DataLoader[Any] = DataLoader(
            _Told(dataset),
            batch_sampler=sampler,
            num_workers=workers,
            collate_fn=_Collate(collate or torch.utils.data.default_collate),
            pin_memory=runtime.on_gpu,
            persistent_workers=False,
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if isinstance(batch, Exception):
                raise batch
            yield batch


class _Told(Dataset[Any]):
    """A data set whose errors are samples: torch would make others of them on their way to the first process."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._dataset[key]
        except (ValueError, OSError, UnreadableImage) as error:
            return error


class _Collate:
    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        return next((sample for sample in samples if isinstance(sample, Exception)), None) or self._collate(samples)
