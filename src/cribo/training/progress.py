"""Progress of a training: steps, ETA and numbers."""

import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cribo.console import Phases, duration

_LINE_SECONDS = 30.0  # between two lines where there is no terminal
_FIRST_LINE_SECONDS = 5.0  # until the first line


class StepProgress(L.Callback):
    """A progress bar on a terminal; elsewhere (a log file, a scheduler) a line every half minute.

    Args:
        console: where to.
        label: name of the training, before the bar.
        every_steps: steps between two readings of the numbers behind the bar.
    """

    def __init__(self, console: Console, label: str = "", *, every_steps: int = 1) -> None:
        self.console = console
        self.label = label
        self.every_steps = every_steps
        self._numbers = ""
        self._bar: Progress | None = None
        self._score: Phases | None = None
        self._started = self._printed = 0.0
        self._first_step = 0

    def title(self, module: L.LightningModule) -> str:
        """The text before the bar."""
        return self.label

    def numbers(self, trainer: L.Trainer) -> str:
        """The text behind the bar: by default, what the module logs with `prog_bar=True`."""
        return " · ".join(f"{name} {float(value):.4g}" for name, value in trainer.progress_bar_metrics.items())

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the bar."""
        self._started = time.perf_counter()
        self._printed = self._started - _LINE_SECONDS + min(_FIRST_LINE_SECONDS, _LINE_SECONDS)
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
        title = self.title(pl_module)
        self._task = self._bar.add_task(title, total=trainer.max_steps, completed=trainer.global_step, numbers="")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance."""
        step, now = trainer.global_step, time.perf_counter()
        if self._bar is not None:
            if step % self.every_steps == 0:
                self._numbers = self.numbers(trainer)
            self._bar.update(self._task, completed=step, description=self.title(pl_module), numbers=self._numbers)
        elif trainer.is_global_zero and now - self._printed >= _LINE_SECONDS:
            self._printed = now
            left = (trainer.max_steps - step) * (now - self._started) / max(step - self._first_step, 1)
            self.console.print(
                f"{self.title(pl_module)} step {step}/{trainer.max_steps} ETA {duration(left)} {self.numbers(trainer)}",
                highlight=False,
                soft_wrap=True,
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove the bar."""
        self._stop()

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show the progress of a validation outside the training."""
        if trainer.state.fn == TrainerFn.VALIDATING and trainer.is_global_zero:
            if self._score is None:
                self._score = Phases(self.console)
                self._score.__enter__()
            self._score(f"{self.title(pl_module)}: score", batch_idx + 1, int(sum(trainer.num_val_batches)))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove the progress of a validation."""
        if self._score is not None:
            self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore the terminal."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._score is not None:
            self._score.__exit__(None, None, None)
            self._score = None
        sys.stdout.flush()
