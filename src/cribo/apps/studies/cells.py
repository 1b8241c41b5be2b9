"""The cells of a study: a training for each row and seed, or the weights of a row that is not trained."""

import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import timm
import torch

from cribo.apps.studies.config import Budget, Checkpoint, StudyConfig, folder_names
from cribo.apps.studies.costs import IMAGES, evaluation_seconds, training_seconds
from cribo.apps.studies.scores import Score
from cribo.apps.studies.steps import StepScore
from cribo.base.errors import ConfigError, FolderError, MissingData, MissingPackage
from cribo.features.config import MEAN_COLOUR, BackboneSource
from cribo.features.encoder import open_network
from cribo.models.hub.download import hub_name
from cribo.models.hub.timm_weights import is_cached, timm_weights
from cribo.models.licences import timm_licence
from cribo.models.saving import save_backbone
from cribo.objectives.banks import RunBank
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.planning import seconds_per_step, with_epochs
from cribo.pretraining.session import Session

_MOMENTS = 2  # of an optimiser, per weight


@dataclass(frozen=True)
class Cell:
    """One training of a study, or the weights of a row.

    Attributes:
        rows: names of the rows that this cell belongs to: all those with this configuration.
        seed: the seed.
        name: name of the run folder.
        source: the configuration of the training, or the weights.
    """

    rows: tuple[str, ...]
    seed: int
    name: str
    source: PretrainConfig | Checkpoint


@dataclass(frozen=True)
class RowPlan:
    """Length and cost of one cell of a row.

    Attributes:
        epochs: number of epochs; None for a row that is not trained.
        steps: number of optimiser steps.
        seconds: estimated duration of the training on this machine; None if it was not timed.
        gpu_seconds: estimated GPU seconds of training and evaluations, from profiled steps; None if not profiled.
        disk: bytes of its checkpoints and weights.
        missing: what is missing to train or evaluate it; None for nothing.
    """

    epochs: int | None = None
    steps: int | None = None
    seconds: float | None = None
    gpu_seconds: float | None = None
    disk: int = 0
    missing: str | None = None


@dataclass(frozen=True)
class Planner:
    """Checks that rows can be trained and evaluated, and finds the length and the cost of their cells.

    Attributes:
        study: the study.
        scores: its evaluations.
        epochs: numbers of epochs that were planned before, by row.
        timed: whether to estimate costs: by timing some steps of each row, or for networks that were profiled on a
            GPU, and without the data, by these profiles.
    """

    study: StudyConfig
    scores: Sequence[Score | StepScore]
    epochs: Mapping[str, int] = field(default_factory=dict)
    timed: bool = False

    def plan(self, rows: Collection[str]) -> dict[str, RowPlan]:
        """Return the plan of each of these rows; what is missing is no error.

        Raises:
            ConfigError: a row cannot be trained or scored; the message names it.
        """
        checkpoints, offline = self.study.checkpoints, False
        plans = {}
        for row in rows:
            try:
                if row in checkpoints:
                    plans[row] = self._of_weights(checkpoints[row], offline=offline)
                else:
                    plans[row] = self._of_training(row)
            except ConnectionError as error:
                offline = True  # trying again for each row takes minutes
                what = f"{_described(checkpoints[row])}: " if row in checkpoints else ""
                plans[row] = RowPlan(missing=f"{what}{error}")
            except ValueError as error:
                raise ConfigError(f"row {row!r}: {error}") from error
        return plans

    def _of_weights(self, weights: Checkpoint, *, offline: bool) -> RowPlan:
        """Plan a row that is not trained."""
        if weights.source is None:
            return RowPlan(missing=str(weights) or "the weights are not public")
        seconds = self._evaluation_seconds(_architecture(weights)) if self.timed else None
        plan = RowPlan(gpu_seconds=seconds)
        if is_local(weights.source):
            if not Path(weights.source).expanduser().exists():
                return replace(plan, missing=str(weights))
        elif self.timed:  # a plan downloads nothing
            return plan
        elif offline and (hub_name(weights.source) is not None or not is_cached(weights.source)):
            return replace(plan, missing=_described(weights))
        network, _ = open_network(BackboneSource(weights.source, **weights.options))
        for score in self.scores:
            score.check(network, weights.source, weights.options)
        return plan

    def _of_training(self, row: str) -> RowPlan:
        config = self.study.configuration(row, self.study.seeds[0])
        runtime = config.runtime
        if self.study.trains and (str(runtime.devices) != "1" or runtime.num_nodes != 1):
            raise ConfigError(
                f"a study trains each cell on one device, got runtime.devices {runtime.devices} and num_nodes "
                f"{runtime.num_nodes}: set both to 1, and spread the cells with --part"
            )
        if not self.study.trains:
            return self._of_steps(config)
        try:
            session = Session(config)
            session.dataset[0, 0]  # the objective may need what the images lack, such as labels
        except (MissingData, MissingPackage) as error:
            return self._without_data(config, str(error))
        network = session.module.objective.exported()
        with TemporaryDirectory() as folder:
            save_backbone(network, folder)
            for score in self.scores:
                score.check(network, folder, {})
        disk, seconds = _disk_bytes(session), None
        epochs = self.epochs.get(row) or _epochs(self.study.budget, session)
        steps = epochs * (len(session.source) // config.optim.batch_size)
        gpu_seconds = self._gpu_seconds(config, steps) if self.timed else None
        if self.timed and (gpu_seconds is None or session.probe.strategy.root_device.type != "cpu"):
            seconds = steps * seconds_per_step(session)
        return RowPlan(epochs, steps, seconds, gpu_seconds, disk)

    def _of_steps(self, config: PretrainConfig) -> RowPlan:
        """Plan a row whose steps are timed instead of a training."""
        try:
            Session(replace(config, runtime=replace(config.runtime, devices=1, num_nodes=1)))
        except (MissingData, MissingPackage) as error:
            return RowPlan(missing=str(error))
        steps = sum(
            score.settings.steps + score.settings.warmup for score in self.scores if isinstance(score, StepScore)
        )
        return RowPlan(steps=steps, gpu_seconds=training_seconds(config, steps) if self.timed else None)

    def _without_data(self, config: PretrainConfig, missing: str) -> RowPlan:
        """Plan a training whose data are missing, if their size is known."""
        images, budget = IMAGES.get(config.data.root), self.study.budget
        if images is None or budget not in (Budget(), Budget(epochs=budget.epochs)):
            return RowPlan(missing=missing)
        epochs = budget.epochs or config.optim.epochs
        steps = epochs * (images // config.optim.batch_size)
        return RowPlan(epochs, steps, gpu_seconds=self._gpu_seconds(config, steps), missing=missing)

    def _gpu_seconds(self, config: PretrainConfig, steps: int) -> float | None:
        """Return the GPU seconds of a training and of its evaluations; None if they are not known."""
        training = training_seconds(config, steps)
        return None if training is None else training + (self._evaluation_seconds(config.backbone.name) or 0.0)

    def _evaluation_seconds(self, network: str | None) -> float | None:
        """Return the GPU seconds of the evaluations of a network whose cost is known; None if that of none is."""
        if network is None:
            return None
        scores = [score for score in self.scores if isinstance(score, Score)]
        known = [seconds for score in scores if (seconds := evaluation_seconds(score, network)) is not None]
        return sum(known) if known else None


def is_local(source: str) -> bool:
    """Whether weights are a file or folder, instead of a name of timm or of the Hugging Face hub."""
    if hub_name(source) is not None or source == MEAN_COLOUR:
        return False
    path = Path(source).expanduser()
    return path.exists() or len(path.parts) > 1 or path.suffix in (".ckpt", ".pt", ".pth", ".safetensors")


def _architecture(weights: Checkpoint) -> str | None:
    """Return the timm name of the architecture of weights, as far as it is known without them."""
    stated = weights.options.get("architecture")
    name = (weights.source or "").partition(".")[0]
    return stated or (name if timm.is_model(name) else None)


def _described(weights: Checkpoint) -> str:
    """Return source and licence of weights, for names of timm from its registry."""
    source = weights.source
    if source is None or is_local(source) or hub_name(source) is not None:
        return str(weights)
    config = timm_weights(source)
    licence = timm_licence(source, config.license).name or "not recorded"
    return str(replace(weights, origin=f"https://huggingface.co/{config.hf_hub_id}", licence=licence))


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


def make_cells(study: StudyConfig, epochs: Mapping[str, int], weights: Collection[str] = ()) -> list[Cell]:
    """Return the cells in the order of the table: all rows with the first seed, then trainings with the second.

    Rows with the same configuration share a cell. Weights have one cell, with the first seed.

    Args:
        study: the study.
        epochs: number of epochs of each row to train.
        weights: names of the rows to evaluate whose weights exist.
    """
    sources: list[tuple[list[str], PretrainConfig | Checkpoint]] = []
    for row in study.names:
        if row in weights:
            sources.append(([row], study.checkpoints[row]))
        elif row in epochs:
            config = study.configuration(row, study.seeds[0])
            config = with_epochs(config, epochs[row]) if study.trains else config
            for names, other in sources:
                if other == config:
                    names.append(row)
                    break
            else:
                sources.append(([row], config))
    folders = folder_names([names[0] for names, _ in sources])
    return [
        Cell(
            tuple(names),
            seed,
            f"{folders[names[0]]}-seed{seed}" if isinstance(source, PretrainConfig) else folders[names[0]],
            replace(source, seed=seed) if isinstance(source, PretrainConfig) else source,
        )
        for seed in study.seeds
        for names, source in sources
        if isinstance(source, PretrainConfig) or seed == study.seeds[0]
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
