"""Common to protocols that train: a folder that can be resumed, and Lightning's trainer."""

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
from torch.utils.data import Dataset, Sampler

from cribo.arguments import ConfigError
from cribo.data.randomness import keyed_generator
from cribo.devices import resolve_workers
from cribo.errors import Stopped
from cribo.evaluation.loading import Batches
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
    """A module trained by Lightning's automatic optimisation.

    All random numbers must be keyed, so that a resumed training equals an uninterrupted one. Values logged with
    `prog_bar=True` are shown beside the progress bar.
    """


class KeyStream(Sampler[list[tuple[int, int]]]):
    """The keys (epoch, index) of each batch from the next step on: one permutation of the data after the other.

    Batches may cross the ends of epochs, and the place in the data depends on the step alone.

    Args:
        count: number of samples.
        batch_size: over all processes.
        steps: of the whole training.
        seed: of the permutations.
        position: returns the next step.
        rank, world_size: of this process, which gets its share of each batch.

    Raises:
        ConfigError: the batch size is not a multiple of the processes.

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
    callbacks: Sequence[Callback] = (),
) -> L.Trainer:
    """Train a module and score it, from the last checkpoint in the folder if there is one.

    Args:
        module: ends with the weights of the last step.
        train: samples by (epoch, index).
        validation: samples by index, scored one by one; each process gets its share, without repetition.
        batch_size: samples of a step, over all devices.
        steps: optimiser steps.
        seed: of the order of the data.
        folder: for checkpoints and TensorBoard's log.
        label: of the progress bar.
        runtime: where and how.
        console: shows progress.
        collate: makes a batch of samples; torch's default if None.
        callbacks: further callbacks.

    Returns:
        The trainer, after its validation.

    Raises:
        ConfigError: devices that do not exist, cannot share a batch, or have nothing to score.
        Interrupted: SIGTERM or SIGUSR1 was received; a checkpoint was written. (Ctrl-C is a KeyboardInterrupt.)
        NonFiniteLoss: weights are not finite.
        Stopped: a process that reads images was killed.
        errors of reading a sample.
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
        loading = {"num_workers": resolve_workers(runtime.workers), "pin_memory": runtime.on_gpu}
        rank, processes = trainer.global_rank, trainer.world_size
        keys = KeyStream(
            len(cast(Any, train)),
            batch_size,
            steps,
            seed=seed,
            position=lambda: trainer.global_step,
            rank=rank,
            world_size=processes,
        )
        batches = Batches(train, collate, batch_sampler=keys, **loading)
        if (count := len(cast(Any, validation))) < processes:
            # Lightning would leave a process without samples out of the validation, and the others would hang.
            raise ConfigError(
                f"each of the {processes} devices must have something to score, got {count}: use fewer "
                "--runtime.devices, or raise data.limit"
            )
        share = [[index] for index in range(rank, count, processes)]
        scored = Batches(validation, collate, batch_sampler=share, **loading)
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
    """Claim and lock the folder of an evaluation that trains on rank 0, for all ranks.

    Args:
        out: the folder; `evaluations/<name>`, numbered, if None.
        name: of a numbered folder.
        settings: everything that the result depends on.
        overwrite: replace an existing evaluation.
        resume: continue an existing evaluation, or start one.
        runtime: of the processes.
        inputs: files and folders that are read, which must not be in `out`.

    Raises:
        FolderError: it exists and neither is set, is in use, or has an evaluation of other settings.
        ConfigError: devices that do not exist, or both are set.
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
        except ConfigError:  # before any work: remove the folder, once the lock is released
            if is_first_process() and {path.name for path in folder.iterdir()} <= {MARKER, SETTINGS, RUN_LOCK}:
                for file in (MARKER, SETTINGS):
                    (folder / file).unlink(missing_ok=True)
                last.callback(_remove_if_empty, folder)
            raise


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # rmdir removes only empty folders
        folder.rmdir()


def is_evaluation_of(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether a folder has an unfinished evaluation of these settings, which `resume` continues."""
    try:
        begun = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return begun == json.loads(json.dumps(settings)) and not (folder / RESULTS).exists()


def finished_result(out: Path | None, *, resume: bool) -> EvaluationResult | None:
    """Return the result of an evaluation to resume that is already finished, else None."""
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
    """Check that the settings of an evaluation to resume have not changed."""
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


def _trainer(runtime: TrainingRuntime, folder: Path | None, callbacks: Sequence[Callback], steps: int) -> L.Trainer:
    """Return a trainer that stops after `steps`, and logs to `folder` if there is one."""
    every, devices = runtime.evaluate_every or None, runtime.devices
    if runtime.num_nodes > 1 or devices != "auto":
        is_shared = runtime.num_nodes > 1 or int(devices) > 1
    else:
        is_shared = runtime.on_gpu and torch.cuda.device_count() > 1
    return make_trainer(
        folder,
        callbacks,
        steps,
        accelerator=runtime.accelerator,
        threads=runtime.threads,
        devices=devices,
        num_nodes=runtime.num_nodes,
        strategy=DDPStrategy(broadcast_buffers=False) if is_shared else "auto",
        precision=runtime.precision,
        val_check_interval=every,
        check_val_every_n_epoch=None if every else 1,
        num_sanity_val_steps=0,
        log_every_n_steps=runtime.log_every,
    )
