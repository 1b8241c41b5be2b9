"""Training progress: steps, ETA and metrics."""

from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console

from cribo.base.console import Phases

_FIRST_LINE_SECONDS = 5.0


def logged_numbers(trainer: L.Trainer) -> str:
    """Format the values that the module logs with `prog_bar=True`; synchronises with the device."""
    return " · ".join(f"{name} {float(value):.4g}" for name, value in trainer.progress_bar_metrics.items())


class StepProgress(L.Callback):
    """Progress display of a training, or of a validation outside one.

    Args:
        console: console of the display.
        label: name of the training.
        numbers: function that returns the text after the steps.
        every_steps: steps between calls of `numbers`.
    """

    def __init__(
        self,
        console: Console,
        label: str,
        numbers: Callable[[L.Trainer], str] = logged_numbers,
        *,
        every_steps: int = 1,
    ) -> None:
        self.console = console
        self.label = label
        self.numbers = numbers
        self.every_steps = every_steps
        self._shown = ""
        self._phases: Phases | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the first step."""
        self._show(trainer, self.label, trainer.global_step, int(trainer.max_steps))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the display."""
        if trainer.global_step % self.every_steps == 0:
            self._shown = self.numbers(trainer)
        self._show(trainer, self.label, trainer.global_step, int(trainer.max_steps))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the terminal."""
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
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._shown = ""
            self._show(trainer, f"{self.label}: score", batch_idx + 1, int(sum(trainer.num_val_batches)))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the terminal."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore the terminal."""
        self._stop()

    def _show(self, trainer: L.Trainer, what: str, done: int, total: int) -> None:
        if not trainer.is_global_zero:
            return
        if self._phases is None:
            self._phases = Phases(self.console, first_line=_FIRST_LINE_SECONDS).__enter__()
        self._phases(what, done, total, self._shown)

    def _stop(self) -> None:
        if self._phases is not None:
            self._phases.__exit__(None, None, None)
            self._phases = None
