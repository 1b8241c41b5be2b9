"""One progress bar for the whole run: ETA, images/s, the losses and the bootstrapping ratio."""

import sys
import time
from typing import Any

import lightning as L
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cribo.console import duration
from cribo.pretraining.module import PretrainingModule
from cribo.pretraining.monitoring import Metrics

_LINE_SECONDS = 30.0  # between two lines where there is no terminal to draw a bar on


class RunProgress(L.Callback):
    """A bar on a terminal; elsewhere (a log file, a scheduler) a line now and then.

    Args:
        metrics: whose latest row is shown.
        console: where to.
    """

    def __init__(self, metrics: Metrics, console: Console) -> None:
        self.metrics = metrics
        self.console = console
        self._bar: Progress | None = None
        self._started = self._printed = 0.0
        self._first_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show where the run stands."""
        self._started = self._printed = time.perf_counter()
        self._first_step = trainer.global_step
        if not (trainer.is_global_zero and self.console.is_terminal):
            return
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
        )
        self._bar.start()
        self._task = self._bar.add_task("epoch 1", total=trainer.max_steps, completed=trainer.global_step, numbers="")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move on."""
        assert isinstance(pl_module, PretrainingModule)
        epochs = pl_module.config.optim.epochs
        epoch = f"epoch {min(pl_module.epoch + 1, epochs)}/{epochs}"
        numbers = describe(self.metrics.latest)
        if self._bar is not None:
            self._bar.update(self._task, completed=trainer.global_step, description=epoch, numbers=numbers)
        elif trainer.is_global_zero and time.perf_counter() - self._printed >= _LINE_SECONDS:
            self._printed = time.perf_counter()
            done = trainer.global_step - self._first_step
            left = (trainer.max_steps - trainer.global_step) * (self._printed - self._started) / max(done, 1)
            self.console.print(
                f"{epoch} step {trainer.global_step}/{trainer.max_steps} ETA {duration(left)} {numbers}",
                highlight=False,
                soft_wrap=True,
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the terminal as it was."""
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave the terminal as it was."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            sys.stdout.flush()


def describe(row: dict[str, float]) -> str:
    """The numbers of a row that somebody watching wants to see; losses that are off or not yet on are left out."""
    if not row:
        return ""
    numbers = [f"{row['images_per_second']:.0f} img/s"]
    for name, label in (("image", "image"), ("cross_view", "cross-view"), ("cross_image", "cross-image")):
        if row.get(f"loss_{name}"):
            numbers.append(f"{label} {row[f'loss_{name}']:.2f}")
    if row.get("objects_per_image"):
        numbers.append(f"bootstrapped {row['bootstrapping_ratio']:.0%}")
    return " · ".join(numbers)
