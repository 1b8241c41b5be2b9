"""The cells of a study: one training for each row and seed."""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cribo.apps.studies.config import Budget, StudyConfig, folder_names
from cribo.apps.studies.scores import Score, check_score
from cribo.base.errors import ConfigError, FolderError
from cribo.objectives.banks import RunBank
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.planning import seconds_per_step, with_epochs
from cribo.pretraining.session import Session

_MOMENTS = 2  # of an optimiser, per weight


@dataclass(frozen=True)
class Cell:
    """One training of a study.

    Attributes:
        rows: names of the rows that this training belongs to: all those with this configuration.
        seed: the seed.
        name: name of the run folder.
        config: the configuration.
    """

    rows: tuple[str, ...]
    seed: int
    name: str
    config: PretrainConfig


@dataclass(frozen=True)
class RowPlan:
    """Length and cost of one training of a row.

    Attributes:
        epochs: number of epochs.
        steps: number of optimiser steps.
        seconds: estimated duration of the training on this machine; None if it was not timed.
        disk: bytes of its checkpoints and weights.
    """

    epochs: int
    steps: int
    seconds: float | None
    disk: int


def plan_rows(
    study: StudyConfig, scores: Sequence[Score], epochs: Mapping[str, int], *, timed: bool
) -> dict[str, RowPlan]:
    """Check that each row can be trained and scored, and find the length of its trainings.

    Args:
        study: the study.
        scores: its evaluations.
        epochs: numbers of epochs that were planned before, by row.
        timed: whether to time some steps of each row for an estimate.

    Raises:
        ConfigError: a row cannot be trained or scored; the message names it.
    """
    return {row: _plan(study, row, scores, epochs.get(row), timed=timed) for row in study.changes_of_rows}


def _plan(study: StudyConfig, row: str, scores: Sequence[Score], epochs: int | None, *, timed: bool) -> RowPlan:
    config = study.configuration(row, study.seeds[0])
    runtime = config.runtime
    try:
        if str(runtime.devices) != "1" or runtime.num_nodes != 1:
            raise ConfigError(
                f"a study trains each cell on one device, got runtime.devices {runtime.devices} and num_nodes "
                f"{runtime.num_nodes}: set both to 1, and spread the cells with --part"
            )
        session = Session(config)
        session.dataset[0, 0]  # the objective may need what the images lack, such as labels
        for score in scores:
            check_score(score, session.module.objective.exported())
        disk = _disk_bytes(session)
        per_step = seconds_per_step(session) if timed else None
        if epochs is None:
            epochs = _epochs(study.budget, session)
    except ValueError as error:
        raise ConfigError(f"row {row!r}: {error}") from error
    steps = epochs * session.module.schedules.steps_per_epoch
    return RowPlan(epochs, steps, None if per_step is None else per_step * steps, disk)


def _epochs(budget: Budget, session: Session) -> int:
    """Convert the budget to a number of epochs."""
    if budget.epochs is not None:
        return budget.epochs
    images, steps = len(session.source), session.module.schedules.steps_per_epoch
    if budget.images is not None:
        allowed = budget.images / images
    elif budget.steps is not None:
        allowed = budget.steps / steps
    elif budget.cpu_seconds is not None:
        if session.workers or session.probe.strategy.root_device.type != "cpu":
            raise ConfigError(
                f"budget.cpu_seconds counts this process only, got data.workers {session.workers} and the device "
                f"{session.probe.strategy.root_device}: set data.workers to 0 and runtime.accelerator to cpu"
            )
        session.module = session.make_module()
        allowed = budget.cpu_seconds / (seconds_per_step(session, time.process_time) * steps)
    else:
        return session.config.optim.epochs
    if allowed < 1:
        raise ConfigError(f"the budget allows {allowed:.2f} epochs, but at least one is required: raise it")
    return round(allowed)


def _disk_bytes(session: Session) -> int:
    """Return the size of the checkpoints that a run keeps, of the one being written, and of its weights."""
    module, objective = session.module, session.module.objective
    weights = sum(value.nbytes for value in module.state_dict().values() if isinstance(value, torch.Tensor))
    trained = sum(each.nbytes for each in module.parameters() if each.requires_grad)
    exported = objective.exported()
    rows = sum(2 * bank.num_images * bank.num_objects for bank in vars(objective).values() if isinstance(bank, RunBank))
    banks = rows * exported.embed_dim * next(exported.parameters()).element_size()
    checkpoint = weights + _MOMENTS * trained + banks
    return (session.config.runtime.keep_checkpoints + 1) * checkpoint + sum(
        each.nbytes for each in exported.parameters()
    )


def make_cells(study: StudyConfig, epochs: Mapping[str, int]) -> list[Cell]:
    """Return the cells in the order of training: all rows with the first seed, then with the second, and so on.

    Rows with the same configuration share a cell.

    Args:
        study: the study.
        epochs: number of epochs of each row.
    """
    rows: list[tuple[list[str], PretrainConfig]] = []
    for row, length in epochs.items():
        config = with_epochs(study.configuration(row, study.seeds[0]), length)
        for names, other in rows:
            if other == config:
                names.append(row)
                break
        else:
            rows.append(([row], config))
    folders = folder_names([names[0] for names, _ in rows])
    return [
        Cell(tuple(names), seed, f"{folders[names[0]]}-seed{seed}", replace(config, seed=seed))
        for seed in study.seeds
        for names, config in rows
    ]


def require_space(folder: Path, needed: int) -> None:
    """Raise an error if the disk of a folder has less space than needed.

    Raises:
        FolderError: as above.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if (free := shutil.disk_usage(existing).free) < needed:
        raise FolderError(
            f"the cells need {needed / 2**30:.1f} GiB, but {existing} has {free / 2**30:.1f} GiB left: choose another "
            "--out, or set changes: {runtime.keep_checkpoints: 1}"
        )
