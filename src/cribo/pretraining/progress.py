"""Progress of a run: epoch, images/s, losses and the objective's own numbers."""

from collections.abc import Mapping
from typing import Any

import lightning as L
from rich.console import Console

from cribo.pretraining.module import PretrainingModule
from cribo.pretraining.monitoring import Metrics
from cribo.training.progress import StepProgress


class RunProgress(StepProgress):
    """The progress bar of a run.

    Args:
        metrics: whose latest row is shown.
        console: where to.
    """

    def __init__(self, metrics: Metrics, console: Console) -> None:
        super().__init__(console)
        self.metrics = metrics

    def title(self, module: L.LightningModule) -> str:
        """The epoch."""
        assert isinstance(module, PretrainingModule)
        epochs = module.config.optim.epochs
        return f"epoch {min(module.epoch + 1, epochs)}/{epochs}"

    def numbers(self, trainer: L.Trainer) -> str:
        """Those of the latest row."""
        module: Any = trainer.lightning_module
        return progress_text(self.metrics.latest, module.objective.columns.progress)


def progress_text(row: Mapping[str, float], formats: Mapping[str, str]) -> str:
    """The numbers of a row to show while training; losses that are 0, so not in use, are left out.

    Example:
        >>> progress_text({"images_per_second": 240.0, "loss_cross_view": 2.7, "ratio": 0.1}, {"ratio": "{:.0%} used"})
        '240 img/s · cross-view 2.70 · 10% used'
    """
    if not row:
        return ""
    numbers = [f"{row['images_per_second']:.0f} img/s"] if "images_per_second" in row else []
    losses = {name.removeprefix("loss_"): value for name, value in row.items() if name.startswith("loss_")}
    numbers += [f"{name.replace('_', '-')} {value:.2f}" for name, value in losses.items() if value]
    return " · ".join(numbers + [text.format(row[name]) for name, text in formats.items() if name in row])
