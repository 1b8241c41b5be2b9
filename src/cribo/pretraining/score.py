"""Dense retrieval score on labelled images before, during and after training."""

import logging
import math
from typing import Any

import lightning as L
import torch

from cribo.data import DataError, UnreadableImage, open_segmentation
from cribo.data.scenes import held_out_scenes
from cribo.evaluation import DenseNN, Splits
from cribo.evaluation.runner import calibrate_batch_norms, measure
from cribo.models import Backbone
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.module import PretrainingModule
from cribo.pretraining.monitoring import Metrics
from cribo.retrieval.encoders import mean_colour_backbone

log = logging.getLogger("cribo")


def open_score_data(config: PretrainConfig) -> Splits | None:
    """Open the labelled images of the score: train is the memory, val are the queries.

    Returns None if no score is configured.
    """
    root = config.data.root if config.score.root == "data" else config.score.root
    if root is None:
        return None
    if root == "scenes":
        train, val = held_out_scenes(*config.score.images)
    else:
        train, val = (
            open_segmentation("folder", root, split, reading=config.data.reading) for split in ("train", "val")
        )
    return Splits(train, val, "score", {})


class RetrievalScore(L.Callback):
    """Callback that scores the exported backbone, and adds the score to the metrics.

    If labelled images cannot be read, the first score raises an error; later scores are skipped.

    Args:
        data: labelled images.
        config: configuration of the run.
        metrics: callback that records the score.

    Attributes:
        curve: (step, mIoU in 0-1) of every score, including those before a resume.
    """

    def __init__(self, data: Splits, config: PretrainConfig, metrics: Metrics) -> None:
        self.data = data
        self.config = config
        self.metrics = metrics
        self.curve: list[tuple[int, float]] = []

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the scores of the resumed run."""
        rows = self.metrics.rows_until(checkpoint["global_step"])
        self.curve = [(int(row["step"]), row["dense_nn"]) for row in rows if "dense_nn" in row]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the initial network, or, in a resumed run, the last epoch if its score is missing."""
        assert isinstance(pl_module, PretrainingModule)
        epochs, rest = divmod(trainer.global_step, pl_module.schedules.steps_per_epoch)
        is_due = rest == 0 and epochs % self.config.score.every_epochs == 0 and trainer.global_step < trainer.max_steps
        if is_due or not self.curve:
            self._take(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score every `every_epochs`."""
        self.on_train_start(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the trained network."""
        assert isinstance(pl_module, PretrainingModule)
        self._take(trainer, pl_module)

    def mean_colour(self, module: PretrainingModule) -> float | None:
        """Return the mean IoU of the baseline `mean-colour`; None for unsupported image sizes or unreadable images."""
        try:
            return self._score(mean_colour_backbone(), module.device)
        except (UnreadableImage, ValueError) as error:
            log.error("could not compute the score of the mean colour: %s", error)
            return None

    def _take(self, trainer: L.Trainer, module: PretrainingModule) -> None:
        """Score the network, unless this step has a score."""
        step = trainer.global_step
        if self.curve and self.curve[-1][0] == step:
            return
        backbone = module.objective.exported()
        untrained = step == 0 and self.config.backbone.pretrained is None
        before = {name: value.clone() for name, value in backbone.named_buffers()} if untrained else {}
        miou, failed = math.nan, None
        try:
            if untrained:
                calibrate_batch_norms(backbone, self.data.train)
            miou = self._score(backbone, module.device)
        except (UnreadableImage, DataError) as error:
            failed = error
        finally:
            backbone.load_state_dict(before, strict=False)
        # On all ranks or none, so that all have the same curve.
        if trainer.strategy.reduce_boolean_decision(failed is None):
            self.curve.append((step, miou))
            self.metrics.add(trainer, module, {"dense_nn": miou})
            log.info("step %d: dense retrieval %.1f %% mIoU", step, 100 * miou)
        elif not self.curve:  # no training is lost yet
            raise failed or DataError("another rank could not read the labelled images")
        elif failed is not None:
            log.error("step %d: could not compute the score: %s; training continues", step, failed)

    def _score(self, backbone: Backbone, device: torch.device) -> float:
        score = self.config.score
        # A seed independent of the run's, so that scores of runs can be compared.
        protocol = DenseNN(ratios=(score.memory_ratio,), neighbours=score.neighbours, size=score.size, seed=0)
        return measure(protocol, backbone, self.data, device=device).rows[0]["miou"]
