"""What is watched while a run goes on: the table of metrics, unreadable images, and signs of trouble."""

import csv
import io
import logging
import math
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch

from cribo.data.loading import PairLoader
from cribo.data.pairs import ViewPairs
from cribo.errors import Stopped
from cribo.files import write_text
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.files import METRICS, SKIPPED
from cribo.pretraining.module import PretrainingModule
from cribo.training.events import going_on

log = logging.getLogger("cribo")

COLUMNS: tuple[str, ...] = (
    "step",
    "epoch",
    "seconds",
    "images_per_second",
    "loss",
    "loss_image",
    "loss_cross_view",
    "loss_cross_image",
    "bootstrapping_ratio",
    "objects_per_image",
    "steps_left_out",
    "lr",
    "weight_decay",
    "momentum",
    "teacher_temperature",
    "image_entropy_of_mean",
    "image_mean_entropy",
    "object_entropy_of_mean",
    "object_mean_entropy",
    "feature_std",
    "distinct_neighbours",
    "dense_nn",
)


class Rows(Sequence[dict[str, float]]):
    """Rows of numbers under `COLUMNS`, eight bytes each: a run of weeks has hundreds of thousands of rows.

    Example:
        >>> rows = Rows([{"step": 10.0, "loss": 7.5}])
        >>> rows.append({"step": 20.0})
        >>> list(rows)
        [{'step': 10.0, 'loss': 7.5}, {'step': 20.0}]
    """

    def __init__(self, rows: Iterable[dict[str, float]] = ()) -> None:
        self._numbers = array("d")
        for row in rows:
            self.append(row)

    def append(self, row: Mapping[str, float]) -> None:
        """Add a row; cells that it has none for, or that are not a number, stay empty."""
        self._numbers.extend(row.get(name, math.nan) for name in COLUMNS)

    def __len__(self) -> int:
        return len(self._numbers) // len(COLUMNS)

    def __getitem__(self, index: int) -> dict[str, float]:  # pyright: ignore[reportIncompatibleMethodOverride]
        start = len(COLUMNS) * range(len(self))[index]
        numbers = self._numbers[start : start + len(COLUMNS)]
        return {name: number for name, number in zip(COLUMNS, numbers, strict=True) if not math.isnan(number)}


class Metrics(L.Callback):
    """Reads the module's numbers every `every_steps`, hands them to the loggers, and keeps `metrics.csv`.

    The rows of a resumed run are kept up to the step it resumes from.

    Attributes:
        rows: all rows so far, as in the file.
        latest: the last row of training numbers.

    Args:
        folder: the run folder.
        every_steps: between two rows.
        batch_size: images of one step, over all devices.
    """

    def __init__(self, folder: Path, *, every_steps: int, batch_size: int) -> None:
        self.path = folder / METRICS
        self.every_steps = every_steps
        self.batch_size = batch_size
        self.rows = Rows()
        self.latest: dict[str, float] = {}
        self._torn = False
        self._seconds_before = 0.0
        self._started = self._marked = time.perf_counter()
        self._marked_step = 0

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before a resume included."""
        return self._seconds_before + time.perf_counter() - self._started

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take up the rows of the run that is resumed."""
        if self.path.is_file():
            self.rows = Rows(row for row in read_metrics(self.path) if row["step"] <= checkpoint["global_step"])
            self.latest = next((row for row in reversed(self.rows) if "loss" in row), {})
            self._seconds_before = max((row["seconds"] for row in self.rows), default=0.0)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock and the file."""
        if trainer.is_global_zero:
            self._write_all()
        self._started = self._marked = time.perf_counter()
        self._marked_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write a row when it is time."""
        step = trainer.global_step
        if step % self.every_steps and step != trainer.max_steps:
            return
        assert isinstance(pl_module, PretrainingModule)
        now = time.perf_counter()
        images = (step - self._marked_step) * self.batch_size
        self.latest = pl_module.read_metrics()
        self.latest["images_per_second"] = images / max(now - self._marked, 1e-9)
        self.add(trainer, pl_module, self.latest)
        self._marked, self._marked_step = time.perf_counter(), step

    def pause(self, seconds: float) -> None:
        """Leave time that was not spent on training out of the next images/s."""
        self._marked += seconds

    def add(self, trainer: L.Trainer, module: PretrainingModule, values: dict[str, float]) -> None:
        """Append one row and hand it to the loggers."""
        step = trainer.global_step
        row = {
            "step": float(step),
            "epoch": step / module.schedules.steps_per_epoch,
            "seconds": self.seconds,
            **values,
        }
        self.rows.append(row)
        with going_on("the logs"):
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)
        if not trainer.is_global_zero:
            return
        with going_on(self.path):
            self._write(row)

    def _write(self, row: dict[str, float]) -> None:
        torn, self._torn = self._torn, True
        if torn:  # rows are missing, and the last one there may be half of one
            self._write_all()
        else:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, COLUMNS).writerow(_formatted(row))
        self._torn = False

    def _write_all(self) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(_formatted(row) for row in self.rows)
        write_text(self.path, text.getvalue())


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a `metrics.csv`; empty cells are left out, and so is a line that was not written whole."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    rows = []
    for row in csv.DictReader(line for line in lines if line.endswith("\n")):
        with suppress(TypeError, ValueError):  # too many cells, or what is no number
            if None not in row.values():  # too few
                rows.append({name: float(value) for name, value in row.items() if value})
    return rows


def _formatted(row: dict[str, float]) -> dict[str, str]:
    return {name: f"{value:.8g}" for name, value in row.items()}


class TooManyUnreadable(Stopped):
    """More images than allowed could not be read."""

    everywhere = True


class LoadingFaults(L.Callback):
    """Lists every image that had to be skipped in `skipped.csv`, counts what else went wrong with reading.

    Stops a run whose data is broken. Several processes tell each other every so many steps, so that they stop
    together.

    Args:
        folder: the run folder.
        num_images: of the collection.
        max_share: of it that may be unreadable.
        every_steps: between two exchanges.

    Attributes:
        loader: of this process; to be set before training.
        reasons: of every skipped image, by name.
        restarts: of workers, in all processes, before a resume included.
        retried: reads that were tried again, likewise.
    """

    loader: PairLoader

    def __init__(self, folder: Path, *, num_images: int, max_share: float, every_steps: int) -> None:
        self.path = folder / SKIPPED
        self.num_images = num_images
        self.max_share = max_share
        self.every_steps = every_steps
        self.reasons: dict[str, str] = {}
        self.restarts = self.retried = 0
        self._untold = _Told()
        self._counted = (0, 0)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"restarts": self.restarts, "retried": self.retried}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the counts of the run that is resumed."""
        self.restarts, self.retried = state_dict["restarts"], state_dict["retried"]

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take up the list of the run that is resumed."""
        if self.path.is_file():
            with self.path.open(newline="", encoding="utf-8") as file:
                self.reasons = {row["image"]: row["reason"] for row in csv.DictReader(file)}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: ViewPairs, batch_idx: int
    ) -> None:
        """Note what the batch reports.

        Raises:
            TooManyUnreadable: the share of unreadable images is above the limit.
        """
        counted = self.loader.restarts, self.loader.retried
        self._untold.restarts += counted[0] - self._counted[0]
        self._untold.retried += counted[1] - self._counted[1]
        self._counted = counted
        self._untold.reasons |= {entry.name: entry.reason for entry in batch.unreadable}
        told: list[Any] = [self._untold]
        if trainer.world_size > 1:
            if trainer.global_step % self.every_steps and trainer.global_step != trainer.max_steps:
                return
            told = [None] * trainer.world_size
            torch.distributed.all_gather_object(told, self._untold)
        self._untold = _Told()
        self._tell(trainer, told)

    def _tell(self, trainer: L.Trainer, told: "list[_Told]") -> None:
        self.restarts += sum(part.restarts for part in told)
        self.retried += sum(part.retried for part in told)
        every = {name: reason for part in told for name, reason in part.reasons.items()}
        new = {name: reason for name, reason in every.items() if name not in self.reasons}
        if not new:
            return
        self.reasons.update(new)
        if trainer.is_global_zero:
            for name, reason in new.items():
                log.warning("skipped %s: %s", name, reason)
            text = io.StringIO()
            writer = csv.writer(text)
            writer.writerow(("image", "reason"))
            writer.writerows(sorted(self.reasons.items()))
            with going_on(self.path):
                write_text(self.path, text.getvalue())
        if len(self.reasons) > self.max_share * self.num_images:
            raise TooManyUnreadable(
                f"{len(self.reasons)} of {self.num_images} images cannot be read, more than "
                f"data.max_unreadable {self.max_share:g} allows; they are listed in {self.path}. Mend or remove "
                "them, or raise data.max_unreadable"
            )


@dataclass
class _Told:
    """What one process has to tell the others."""

    restarts: int = 0
    retried: int = 0
    reasons: dict[str, str] = field(default_factory=dict)


class Watch(L.Callback):
    """Warns when training goes wrong, each kind of trouble once until it is over, with advice.

    Args:
        metrics: whose latest row is looked at.
        config: of the run.

    Attributes:
        warnings: (step, text) of all that was said.
    """

    def __init__(self, metrics: Metrics, config: PretrainConfig) -> None:
        self.metrics = metrics
        self.config = config
        self.warnings: list[tuple[int, str]] = []
        self._seen: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: a resumed run remembers what was said."""
        return {"warnings": list(self.warnings), "seen": dict(self._seen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what the resumed run said."""
        self.warnings = [(step, text) for step, text in state_dict["warnings"]]
        self._seen = dict(state_dict["seen"])

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at a new row."""
        if trainer.global_step % self.metrics.every_steps:
            return
        assert isinstance(pl_module, PretrainingModule)
        troubles = signs_of_trouble(
            self.metrics.latest,
            cross_image=self.config.losses.cross_image and pl_module.epoch > self.config.losses.cross_image_from_epoch,
            needs_objects=self.config.needs_objects,
            prototypes=self.config.head.prototypes,
        )
        for name in self._seen.keys() - troubles.keys():
            del self._seen[name]
        for name, advice in troubles.items():
            self._seen[name] = self._seen.get(name, 0) + 1
            if self._seen[name] == _ROWS_BEFORE_WARNING:
                self.warnings.append((trainer.global_step, advice))
                log.warning("step %d: %s", trainer.global_step, advice)


# A sign must last: a single row may be a fluke.
_ROWS_BEFORE_WARNING = 5


def signs_of_trouble(
    row: dict[str, float], *, cross_image: bool, needs_objects: bool, prototypes: int
) -> dict[str, str]:
    """Name and advice of each sign of collapse or idleness in a row of metrics.

    Args:
        row: one row of training numbers.
        cross_image: whether L_ci^o should be at work by now.
        needs_objects: whether any loss works on objects.
        prototypes: L.
    """
    troubles = {}
    few = 1.5 / math.log(prototypes)  # entropy of about four prototypes, as a share of ln L
    for level in ("image", "object"):
        if row.get(f"{level}_entropy_of_mean", 1.0) < few:
            troubles[f"{level} prototypes"] = (
                f"collapse: the teacher puts nearly all {level}s on a handful of prototypes. Raise optim.momentum, "
                "lower optim.lr, or try losses.centring sinkhorn"
            )
        elif row.get(f"{level}_mean_entropy", 0.0) > 0.99:
            troubles[f"{level} uniform"] = (
                f"the teacher's {level} distributions are uniform, so the loss teaches nothing. Lower "
                "losses.teacher_temperature, raise optim.lr, or try losses.centring sinkhorn"
            )
    if row.get("feature_std", 1.0) < 0.05:
        troubles["features"] = (
            f"collapse: all patches have nearly the same feature (spread {row['feature_std']:.3f} of 1). Lower "
            "optim.lr or lengthen optim.warmup_epochs; a frozen last layer (optim.freeze_last_layers_epochs) helps too"
        )
    if row.get("distinct_neighbours", 1.0) < 0.02:
        troubles["neighbours"] = (
            f"collapse: all objects have the same few neighbours ({row['distinct_neighbours']:.1%} distinct). "
            "Use a larger objects.bank_images, or start losses.cross_image_from_epoch later"
        )
    if needs_objects and row.get("objects_per_image", 1.0) == 0:
        troubles["no objects"] = (
            "no cluster has tokens in both views, so there is no object to learn from. Raise the lower end of "
            "views.area, lower objects.num_objects, or lower objects.position_weight"
        )
    elif cross_image and row.get("bootstrapping_ratio", 1.0) == 0:
        troubles["no bootstrapping"] = (
            "no match is cycle-consistent: the bootstrapping ratio stays at 0. Lower objects.num_objects or "
            "objects.group_size, enlarge objects.bank_images, or train longer before judging"
        )
    return troubles
