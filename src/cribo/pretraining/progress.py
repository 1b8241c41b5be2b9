"""One progress bar for the whole run: ETA, images/s, the losses and the bootstrapping ratio."""

import lightning as L
from rich.console import Console

from cribo.pretraining.module import PretrainingModule
from cribo.pretraining.monitoring import Metrics
from cribo.training.progress import StepProgress


class RunProgress(StepProgress):
    """Where a run stands.

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
        """Of the latest row."""
        return progress_text(self.metrics.latest)


def progress_text(row: dict[str, float]) -> str:
    """The numbers of a row that somebody watching wants to see; losses that are off or not yet on are left out."""
    if not row:
        return ""
    numbers = [f"{row['images_per_second']:.0f} img/s"]
    for name, label in (("image", "image"), ("cross_view", "cross-view"), ("cross_image", "cross-image")):
        if row.get(f"loss_{name}"):
            numbers.append(f"{label} {row[f'loss_{name}']:.2f}")
    if "bootstrapping_ratio" in row:
        numbers.append(f"bootstrapped {row['bootstrapping_ratio']:.0%}")
    return " · ".join(numbers)
