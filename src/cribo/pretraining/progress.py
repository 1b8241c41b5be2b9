"""Progress of a run: epoch, images/s, losses and metrics of the objective."""

from collections.abc import Mapping
from typing import Any

import lightning as L
from rich.console import Console

from cribo.pretraining.monitoring import Metrics
from cribo.training.progress import StepProgress


def run_progress(metrics: Metrics, console: Console) -> StepProgress:
    """Return the progress display of a run: the epoch, and the latest row of `metrics`."""

    def numbers(trainer: L.Trainer) -> str:
        module: Any = trainer.lightning_module
        epochs = module.config.optim.epochs
        epoch = f"epoch {min(module.epoch + 1, epochs)}/{epochs}"
        shown = progress_text(metrics.latest, module.objective.columns.progress)
        return f"{epoch} · {shown}" if shown else epoch

    return StepProgress(console, "training", numbers)


def progress_text(row: Mapping[str, float], formats: Mapping[str, str]) -> str:
    """Format a row of metrics for the progress line; losses that are 0 (off) are omitted.

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
