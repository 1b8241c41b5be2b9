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

from cribo.data.loading import BatchLoader
from cribo.data.samples import Batch
from cribo.errors import Stopped
from cribo.files import write_text
from cribo.pretraining.files import METRICS, SKIPPED
from cribo.pretraining.module import PretrainingModule
from cribo.training.events import going_on

log = logging.getLogger("cribo")

_SAY_SECONDS = 60.0  # between two lines about reads that are tried again
_FIRST = ("step", "epoch", "seconds", "images_per_second", "loss")
"""Columns that every run has; those of the objective follow as they come."""


class Rows(Sequence[dict[str, float]]):
    """Rows of numbers by name, eight bytes each: a run of weeks has hundreds of thousands of rows.

    Attributes:
        columns: all names so far.

    Example:
        >>> rows = Rows([{"step": 10.0, "loss": 7.5}])
        >>> rows.append({"step": 20.0, "ratio": 0.5})
        >>> list(rows)
        [{'step': 10.0, 'loss': 7.5}, {'step': 20.0, 'ratio': 0.5}]
    """

    def __init__(self, rows: Iterable[Mapping[str, float]] = ()) -> None:
        self._columns: dict[str, array[float]] = {name: array("d") for name in _FIRST}
        self._length = 0
        for row in rows:
            self.append(row)

    @property
    def columns(self) -> list[str]:
        """All names so far, in the order in which they came."""
        return list(self._columns)

    def append(self, row: Mapping[str, float]) -> None:
        """Add a row; cells that it has none for, or that are not a number, stay empty."""
        for name in row:
            if name not in self._columns:
                self._columns[name] = array("d", [math.nan] * self._length)
        for name, numbers in self._columns.items():
            numbers.append(row.get(name, math.nan))
        self._length += 1

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, float]:  # pyright: ignore[reportIncompatibleMethodOverride]
        place = range(self._length)[index]
        row = {name: numbers[place] for name, numbers in self._columns.items()}
        return {name: number for name, number in row.items() if not math.isnan(number)}


class Metrics(L.Callback):
    """Reads the module's numbers every `every_steps`, hands them to the loggers, and keeps `metrics.csv`.

    The rows of a resumed run are kept up to the step it resumes from. Images/s leave out what is done between epochs,
    such as the score.

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
        self._in_file: list[str] | None = None  # the columns; None where the file has to be written anew
        self._seconds_before = 0.0
        self._started = self._marked = self._paused = time.perf_counter()
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
        self._started = self._marked = self._paused = time.perf_counter()
        self._marked_step = trainer.global_step

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave out the time since the last epoch, or since the start."""
        self._marked += time.perf_counter() - self._paused

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self._paused = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write a row when it is time.

        Raises:
            NonFiniteLoss: a loss since the last row was infinite or not a number.
        """
        step = trainer.global_step
        if step % self.every_steps and step != trainer.max_steps:
            return
        assert isinstance(pl_module, PretrainingModule)
        now = time.perf_counter()
        images = (step - self._marked_step) * self.batch_size
        latest = {"images_per_second": images / max(now - self._marked, 1e-9), **pl_module.read_metrics()}
        self.latest = self.add(trainer, pl_module, latest)
        self._marked, self._marked_step = time.perf_counter(), step

    def add(self, trainer: L.Trainer, module: PretrainingModule, values: dict[str, float]) -> dict[str, float]:
        """Append one row, hand it to the loggers, and return it."""
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
        if trainer.is_global_zero:
            with going_on(self.path):
                self._write(row)
        return row

    def _write(self, row: dict[str, float]) -> None:
        columns, self._in_file = self._in_file, None
        if columns is None or columns != self.rows.columns:  # a new name, or the last try may have left half a row
            self._write_all()
        else:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, columns).writerow(_formatted(row))
        self._in_file = self.rows.columns

    def _write_all(self) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.rows.columns)
        writer.writeheader()
        writer.writerows(_formatted(row) for row in self.rows)
        write_text(self.path, text.getvalue())
        self._in_file = self.rows.columns


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

    loader: BatchLoader

    def __init__(self, folder: Path, *, num_images: int, max_share: float, every_steps: int) -> None:
        self.path = folder / SKIPPED
        self.num_images = num_images
        self.max_share = max_share
        self.every_steps = every_steps
        self.reasons: dict[str, str] = {}
        self.restarts = self.retried = 0
        self._untold = _Told()
        self._restarts_told = 0
        self._said_at = -math.inf

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
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Note what the batch reports.

        Raises:
            TooManyUnreadable: the share of unreadable images is above the limit.
        """
        self._untold.restarts += self.loader.restarts - self._restarts_told
        self._restarts_told = self.loader.restarts
        self._untold.retried += batch.retried
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
        retried = sum(part.retried for part in told)
        self.retried += retried
        if retried and trainer.is_global_zero and time.monotonic() - self._said_at >= _SAY_SECONDS:
            self._said_at = time.monotonic()
            log.warning("reading has been tried again, %d times so far: storage is slow or fails", self.retried)
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
    """Warns when training goes wrong, each kind of trouble once until it is over, with the objective's advice.

    Args:
        metrics: whose latest row is looked at.

    Attributes:
        warnings: (step, text) of all that was said.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
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
        troubles = pl_module.objective.advice(self.metrics.latest)
        for name in self._seen.keys() - troubles.keys():
            del self._seen[name]
        for name, advice in troubles.items():
            self._seen[name] = self._seen.get(name, 0) + 1
            if self._seen[name] == _ROWS_BEFORE_WARNING:
                self.warnings.append((trainer.global_step, advice))
                log.warning("step %d: %s", trainer.global_step, advice)


# A sign must last: a single row may be a fluke.
_ROWS_BEFORE_WARNING = 5
