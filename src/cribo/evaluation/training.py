"""Common code of protocols that train: resumable folders, and the Lightning trainer."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from torch.utils.data import Dataset, Sampler, default_collate

from cribo.base.devices import resolve_workers
from cribo.base.errors import ConfigError, Stopped
from cribo.base.files import remove_parts
from cribo.base.job import Job, as_json, read_record, result_kind
from cribo.base.machine import end_with_launcher, is_first_process
from cribo.base.wording import command_line
from cribo.data.batches import Batches
from cribo.data.randomness import keyed_generator
from cribo.evaluation.config import TrainingRuntime
from cribo.evaluation.results import OUT, RESULTS, EvaluationResult, read_result
from cribo.training.checkpoints import Checkpoints, checkpoint_files, resume_point
from cribo.training.events import open_loggers
from cribo.training.folder import open_on_all_ranks
from cribo.training.interruption import Interruption
from cribo.training.lightning import interruptible, make_trainer, quiet_lightning, require_launched
from cribo.training.loggers import require_loggers, require_logins
from cribo.training.module import ResumableModule
from cribo.training.progress import StepProgress

log = logging.getLogger("cribo")

KIND = "trained evaluation"

_KEPT_CHECKPOINTS = 2
_ORDER = 0x6F7264  # key of the random order, distinct from other uses of the seed
_WORKER_DIED = "DataLoader worker (pid"


class KeyStream(Sampler[list[tuple[int, int]]]):
    """Batch sampler that yields keys (epoch, index) from the next step on, with one permutation per epoch.

    Batches may span two epochs; the position in the data depends on the step only.

    Args:
        count: number of samples.
        batch_size: total batch size over all ranks.
        steps: total number of training steps.
        seed: seed of the permutations.
        position: callback that returns the next step.
        rank: rank of this process, which gets its share of each batch.
        world_size: number of ranks.

    Raises:
        ConfigError: the batch size is not a multiple of the number of ranks.

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
        @lru_cache(maxsize=1)
        def order(epoch: int) -> list[int]:
            return torch.randperm(self.count, generator=keyed_generator(self.seed, _ORDER, epoch)).tolist()

        share = self.batch_size // self.world_size
        for step in range(self.position(), self.steps):
            first = step * self.batch_size + self.rank * share
            places = (divmod(place, self.count) for place in range(first, first + share))
            yield [(epoch, order(epoch)[number]) for epoch, number in places]


def fit(
    module: ResumableModule,
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
    collate: Callable[[list[Any]], Any] = default_collate,
    callbacks: Sequence[Callback] = (),
) -> L.Trainer:
    """Train and validate a module, resuming from the last checkpoint in the folder if there is one.

    Args:
        module: trained in place with Lightning's automatic optimisation; has the weights of the last step afterwards.
            All its random numbers must be keyed, so that resumed and uninterrupted training are identical. Values
            logged with `prog_bar=True` are shown in the progress bar.
        train: training samples, indexed by (epoch, index).
        validation: samples to score, in batches of one; each rank gets its share, without repetition.
        batch_size: total batch size over all devices.
        steps: number of optimiser steps.
        seed: seed of the order of the data.
        folder: folder of the checkpoints and TensorBoard logs.
        label: label of the progress bar.
        runtime: devices, precision and logging.
        console: console for the progress bar.
        collate: collates a list of samples.
        callbacks: further callbacks.

    Returns:
        The trainer, after validation.

    Raises:
        ConfigError: devices do not exist, cannot share a batch evenly, or outnumber the validation samples; or a
            logger cannot be opened.
        Interrupted: SIGTERM or SIGUSR1 was received; a checkpoint was written. (Ctrl-C raises KeyboardInterrupt.)
        NonFiniteLoss: weights are not finite.
        Stopped: a data loader worker was killed.
        DataError: a sample cannot be read.
    """
    checkpoint = resume_point(folder) if is_first_process() else next(iter(checkpoint_files(folder)), None)
    if checkpoint is not None:
        log.info("%s: resuming from %s", label, checkpoint)
    checkpoints = Checkpoints(
        folder, every_steps=runtime.checkpoint_every, keep=_KEPT_CHECKPOINTS, resume_from=checkpoint
    )
    progress = StepProgress(console, label, every_steps=min(runtime.log_every, 10))
    advice = "resume with the same command and --resume"
    interruption = Interruption(lambda trainer: checkpoints.on_train_end(trainer, module), advice=advice)
    with quiet_lightning(), open_loggers(runtime.logger, folder, settings=_settings_of(folder)) as loggers:
        trainer = _trainer(runtime, folder, [progress, *callbacks, checkpoints, interruption], steps, loggers)
        loading = {"workers": resolve_workers(runtime.workers), "pin_memory": runtime.on_gpu}
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
            # Lightning skips validation on a rank without samples, and the other ranks would hang.
            raise ConfigError(
                f"each of the {processes} devices needs at least one image to score, got {count}: use fewer "
                "--runtime.devices, or raise data.limit"
            )
        share = [[index] for index in range(rank, count, processes)]
        scored = Batches(validation, collate, batch_sampler=share, **loading)
        try:
            with interruptible(trainer):
                trainer.fit(module, batches, scored if runtime.evaluate_every else None, ckpt_path=checkpoint)
                trainer.validate(module, scored, verbose=False)
        except RuntimeError as error:
            if _WORKER_DIED not in str(error):
                raise
            raise Stopped(
                f"a data loader worker was killed ({error}): if the machine ran out of memory, lower "
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
    """Create or reopen the folder of an evaluation that trains, and lock it on rank 0 for all ranks.

    Args:
        out: output folder; a numbered folder `evaluations/<name>` if None.
        name: name of the numbered folder.
        settings: all settings that the result depends on.
        overwrite: replace an existing evaluation.
        resume: resume the evaluation in `out`, or without `out` the last of this name; or start it if there is none.
        runtime: devices and number of machines.
        inputs: input files and folders, which must not be inside `out`.

    Raises:
        FolderError: the folder exists and neither flag is set, is in use, or has other settings.
        ConfigError: devices do not exist; `overwrite` is set with `resume`, or without `out`; not logged in to the
            service of a logger.
        MissingPackage: the package of a logger is not installed.
    """
    end_with_launcher()
    require_launched(runtime.devices, runtime.num_nodes)
    require_loggers(runtime.logger)

    def open_folder(held: ExitStack) -> Path:
        require_logins(runtime.logger)
        job = Job(out or OUT / name, KIND, numbered=out is None, resume=resume, overwrite=overwrite, inputs=inputs)
        held.enter_context(job.open(settings, again=lambda path: command_line("--out", path, "--resume")))
        remove_parts(job.path)
        jobs.append(job)
        return job.path

    jobs: list[Job] = []  # on rank 0
    with open_on_all_ranks(_trainer(runtime, None, [], 1), open_folder) as folder:
        yield folder
        for job in jobs:
            job.finish()


def is_evaluation_of(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether a folder has an unfinished evaluation with these settings, which can be resumed."""
    try:
        record = read_record(folder, KIND)
    except (OSError, ValueError):
        return False
    return record.identity == as_json(settings) and not (folder / RESULTS).exists()


def _settings_of(folder: Path) -> Mapping[str, Any]:
    """Return the settings of the evaluation that a training in this folder, or in the one above, is part of."""
    found = next((parent for parent in (folder, folder.parent) if result_kind(parent) == KIND), None)
    return {} if found is None else read_record(found, KIND).identity or {}


def finished_result(out: Path | None, *, resume: bool) -> EvaluationResult | None:
    """Return the result of an evaluation to resume if it is already finished, else None."""
    if not resume or out is None or not (out / RESULTS).is_file():
        return None
    if is_first_process():
        log.info("%s is already finished: nothing to resume", out)
    return read_result(out)


def _trainer(
    runtime: TrainingRuntime,
    folder: Path | None,
    callbacks: Sequence[Callback],
    steps: int,
    loggers: Sequence[Logger] = (),
) -> L.Trainer:
    """Return a trainer that stops after `steps`."""
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
        loggers=loggers,
        devices=devices,
        num_nodes=runtime.num_nodes,
        strategy=DDPStrategy(broadcast_buffers=False) if is_shared else "auto",
        precision=runtime.precision,
        val_check_interval=every,
        check_val_every_n_epoch=None if every else 1,
        num_sanity_val_steps=0,
        log_every_n_steps=runtime.log_every,
    )
