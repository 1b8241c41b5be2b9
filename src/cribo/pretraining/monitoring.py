"""Records of a run: the table of metrics, unreadable images, and warnings."""

import csv
import io
import logging
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch

from cribo.base.errors import TooManyUnreadable
from cribo.base.files import read_text, write_text
from cribo.data.loading import BatchLoader
from cribo.data.samples import Batch
from cribo.pretraining.files import METRICS, SKIPPED
from cribo.pretraining.module import PretrainingModule
from cribo.training.events import log_write_errors

log = logging.getLogger("cribo")

Row = dict[str, float]
"""Numbers of one step, by column name."""

_FIRST = ("step", "epoch", "seconds", "images_per_second", "loss")
"""Columns of every run; the objective's columns follow in order of appearance."""

_SECONDS_BETWEEN_WARNINGS = 60.0  # about retried reads
_ROWS_BEFORE_WARNING = 5  # a problem must persist: a single row may be an outlier


class Metrics(L.Callback):
    """Callback that reads the module's metrics every `every_steps`, logs them, and writes `metrics.csv`.

    A resumed run keeps the rows up to the step it resumes from. Images/s exclude the time between epochs, such as
    scoring.

    Args:
        folder: the run folder.
        every_steps: steps between rows.
        batch_size: images per step, over all devices.

    Attributes:
        latest: the last row of training metrics.
    """

    def __init__(self, folder: Path, *, every_steps: int, batch_size: int) -> None:
        self.path = folder / METRICS
        self.every_steps = every_steps
        self.batch_size = batch_size
        self.latest: Row = {}
        self._columns = list(_FIRST)
        self._written = 0  # rows in the file
        self._unwritten: list[Row] = []  # several after a failed write
        self._resumed_at = -1  # step
        self._seconds_before = 0.0
        self._started = self._marked = self._paused = time.perf_counter()
        self._marked_step = 0

    @property
    def rows(self) -> list[Row]:
        """Rows so far, read from the file."""
        return [*self._rows_in_file(), *self._unwritten]

    @property
    def seconds(self) -> float:
        """Seconds of training so far, including before a resume."""
        return self._seconds_before + time.perf_counter() - self._started

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the clock and the latest row of the resumed run."""
        self._resumed_at = checkpoint["global_step"]
        for row in self.rows_until(self._resumed_at):
            self.latest = row if "loss" in row else self.latest
            self._seconds_before = max(self._seconds_before, row["seconds"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock and the file."""
        if trainer.is_global_zero:
            self._write_all(self.rows_until(self._resumed_at))
        self._started = self._marked = self._paused = time.perf_counter()
        self._marked_step = trainer.global_step

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Exclude the time since the last epoch, or since the start."""
        self._marked += time.perf_counter() - self._paused

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self._paused = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write a row every `every_steps`.

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

    def add(self, trainer: L.Trainer, module: PretrainingModule, values: Row) -> Row:
        """Append one row, pass it to the loggers, and return it."""
        step = trainer.global_step
        row = {"epoch": step / module.schedules.steps_per_epoch, "seconds": self.seconds, **values}
        numbers = {name: value for name, value in row.items() if not math.isnan(value)}
        with log_write_errors("the logs"):
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=step)
        if trainer.is_global_zero:
            self._unwritten.append({"step": float(step), **numbers})
            with log_write_errors(self.path):
                self._write()
        return {"step": float(step), **row}

    def _write(self) -> None:
        if len(self._unwritten) > 1 or not self._unwritten[0].keys() <= set(self._columns):
            # The last write failed, possibly within a row, or there is a new column.
            self._write_all([*self._rows_in_file()[: self._written], *self._unwritten])
        else:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                self._writer(file).writerows(map(_formatted, self._unwritten))
            self._written += 1
        self._unwritten = []

    def _write_all(self, rows: list[Row]) -> None:
        self._columns = list(dict.fromkeys((*_FIRST, *(name for row in rows for name in row))))
        text = io.StringIO()
        writer = self._writer(text)
        writer.writeheader()
        writer.writerows(map(_formatted, rows))
        write_text(self.path, text.getvalue())
        self._written = len(rows)

    def _writer(self, file: Any) -> "csv.DictWriter[str]":
        return csv.DictWriter(file, self._columns)

    def _rows_in_file(self) -> list[Row]:
        return read_metrics(self.path) if self.path.is_file() else []

    def rows_until(self, step: int) -> list[Row]:
        """Return the rows up to a step; a run resumed there repeats the later ones."""
        return [row for row in self.rows if row["step"] <= step]


def read_metrics(path: Path) -> list[Row]:
    """Read the rows of a `metrics.csv`, without empty cells and incomplete lines."""
    lines = read_text(path, errors="replace").splitlines(keepends=True)
    rows = []
    for row in csv.DictReader(line for line in lines if line.endswith("\n")):
        with suppress(TypeError, ValueError):  # too many cells, or a cell that is not a number
            if None not in row.values():  # too few
                rows.append({name: float(value) for name, value in row.items() if value})
    return rows


def _formatted(row: Row) -> dict[str, str]:
    # Exact, so that a resumed run reads the values that it logged.
    return {name: repr(float(value)).removesuffix(".0") for name, value in row.items()}


class LoadingFaults(L.Callback):
    """Callback that lists skipped images in `skipped.csv`, and counts worker restarts and retried reads.

    Stops the run if too many images are unreadable. Ranks exchange their counts every `every_steps`, so that they stop
    together.

    Args:
        folder: the run folder.
        num_images: number of images in the collection.
        max_share: share of images that may be unreadable.
        every_steps: steps between exchanges.

    Attributes:
        loader: loader of this rank; must be set before training.
        reasons: reason for skipping each image, by name.
        restarts: number of worker restarts on all ranks, including before a resume.
        retried: number of retried reads on all ranks, including before a resume.
    """

    loader: BatchLoader

    def __init__(self, folder: Path, *, num_images: int, max_share: float, every_steps: int) -> None:
        self.path = folder / SKIPPED
        self.num_images = num_images
        self.max_share = max_share
        self.every_steps = every_steps
        self.reasons: dict[str, str] = {}
        self.restarts = self.retried = 0
        self._before = (0, 0)  # restarts and retried reads before the resume
        self._own_retried = 0
        self._own_reasons: dict[str, str] = {}  # since the last exchange
        self._warned_at = -math.inf

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"restarts": self.restarts, "retried": self.retried}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counts."""
        self._before = self.restarts, self.retried = state_dict["restarts"], state_dict["retried"]

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the list of skipped images."""
        if self.path.is_file():
            with self.path.open(newline="", encoding="utf-8") as file:
                self.reasons = {row["image"]: row["reason"] for row in csv.DictReader(file)}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Record the faults of a batch.

        Raises:
            TooManyUnreadable: the share of unreadable images is above the limit.
        """
        self._own_retried += batch.retried
        self._own_reasons |= {entry.name: entry.reason for entry in batch.unreadable}
        found: list[Any] = [(self.loader.restarts, self._own_retried, self._own_reasons)]
        if trainer.world_size > 1:
            if trainer.global_step % self.every_steps and trainer.global_step != trainer.max_steps:
                return
            own, found = found[0], [None] * trainer.world_size
            torch.distributed.all_gather_object(found, own)
        self._own_reasons = {}
        retried = self.retried
        self.restarts = self._before[0] + sum(restarts for restarts, _, _ in found)
        self.retried = self._before[1] + sum(count for _, count, _ in found)
        new = {name: reason for *_, reasons in found for name, reason in reasons.items() if name not in self.reasons}
        self.reasons |= new
        if trainer.is_global_zero:
            self._report(new, retried=self.retried > retried)
        if new and len(self.reasons) > self.max_share * self.num_images:
            raise TooManyUnreadable(
                f"{len(self.reasons)} of {self.num_images} images cannot be read, more than "
                f"data.max_unreadable {self.max_share:g} allows; they are listed in {self.path}. Repair or remove "
                "them, or raise data.max_unreadable"
            )

    def _report(self, new: dict[str, str], *, retried: bool) -> None:
        if retried and time.monotonic() - self._warned_at >= _SECONDS_BETWEEN_WARNINGS:
            self._warned_at = time.monotonic()
            log.warning("%d reads have been retried so far: storage is slow or failing", self.retried)
        for name, reason in new.items():
            log.warning("skipped %s: %s", name, reason)
        if new:
            text = io.StringIO()
            csv.writer(text).writerows([("image", "reason"), *sorted(self.reasons.items())])
            with log_write_errors(self.path):
                write_text(self.path, text.getvalue())


class Watch(L.Callback):
    """Callback that logs the objective's advice on persistent problems, once until the problem disappears.

    Args:
        metrics: callback with the row to check.

    Attributes:
        warnings: (step, text) of all warnings.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.warnings: list[tuple[int, str]] = []
        self._seen: dict[str, int] = {}  # consecutive rows with each problem

    def state_dict(self) -> dict[str, Any]:
        """Return the warnings so far, which a resumed run does not repeat."""
        return {"warnings": list(self.warnings), "seen": self._seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the warnings."""
        self.warnings = [(step, text) for step, text in state_dict["warnings"]]
        self._seen = state_dict["seen"]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check the new row."""
        if trainer.global_step % self.metrics.every_steps:
            return
        assert isinstance(pl_module, PretrainingModule)
        troubles = pl_module.objective.advice(self.metrics.latest)
        self._seen = {name: self._seen.get(name, 0) + 1 for name in troubles}
        for name, advice in troubles.items():
            if self._seen[name] == _ROWS_BEFORE_WARNING:
                self.warnings.append((trainer.global_step, advice))
                log.warning("step %d: %s", trainer.global_step, advice)
