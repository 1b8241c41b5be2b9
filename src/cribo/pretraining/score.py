"""Dense retrieval on labelled images before, during and after training."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.swa_utils import update_bn

from cribo.data import DataError, LabelledImages, UnreadableImage, open_segmentation
from cribo.data.scenes import Scenes
from cribo.evaluation import DenseNNSettings, Machine, dense_nn
from cribo.models import Backbone, normalise
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.module import PretrainingModule
from cribo.pretraining.monitoring import Metrics
from cribo.retrieval import PatchEncoder, backbone_encoder, mean_colour_encoder

log = logging.getLogger("cribo")

_CALIBRATION_IMAGES = 64


@dataclass(frozen=True)
class ScoreData:
    """The labelled images of a score: memory (whose patches are searched) and queries."""

    memory: LabelledImages
    queries: LabelledImages


def open_score_data(config: PretrainConfig) -> ScoreData | None:
    """Open the labelled images of the configuration; None without a score.

    Held-out scenes are numbered after the training scenes.
    """
    root = config.data.root if config.score.root == "data" else config.score.root
    if root is None:
        return None
    if root == "scenes":
        scenes = config.data.scenes
        memory, queries = config.score.images
        return ScoreData(
            Scenes(memory, size=scenes.size, seed=scenes.seed, first=scenes.count),
            Scenes(queries, size=scenes.size, seed=scenes.seed, first=scenes.count + memory),
        )
    return ScoreData(
        open_segmentation("folder", root, "train", max_pixels=config.data.max_pixels),
        open_segmentation("folder", root, "val", max_pixels=config.data.max_pixels),
    )


class RetrievalScore(L.Callback):
    """Scores the exported backbone, and adds the score to the metrics.

    If labelled images cannot be read, the first score raises an error, and later scores are skipped.

    Args:
        data: labelled images.
        config: of the run.
        metrics: where the score is recorded.

    Attributes:
        curve: (step, mIoU in 0-1) of every score, including those before a resume.
    """

    def __init__(self, data: ScoreData, config: PretrainConfig, metrics: Metrics) -> None:
        self.data = data
        self.config = config
        self.metrics = metrics
        self.curve: list[tuple[int, float]] = []

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the scores of the resumed run."""
        rows = self.metrics.rows_until(checkpoint["global_step"])
        self.curve = [(int(row["step"]), row["dense_nn"]) for row in rows if "dense_nn" in row]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the untrained network, or an epoch that the resumed run completed without scoring."""
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
        """Mean IoU of the baseline with mean colours of patches as features; None if images cannot be read any more."""
        patch_size = module.objective.exported().patch_size
        try:
            return self._score(mean_colour_encoder(patch_size), module.device)
        except (UnreadableImage, DataError) as error:
            log.error("no score of the mean colour, %s", error)
            return None

    def _take(self, trainer: L.Trainer, module: PretrainingModule) -> None:
        """Score the network, unless it has been scored at this step."""
        step = trainer.global_step
        if self.curve and self.curve[-1][0] == step:
            return
        backbone = module.objective.exported()
        untrained = step == 0 and self.config.backbone.pretrained is None
        miou, failed = math.nan, None
        try:
            with calibrated(backbone, self.data.memory, module.device, needed=untrained):
                miou = self._score(backbone_encoder(backbone), module.device)
        except (UnreadableImage, DataError) as error:
            failed = error
        # All ranks or none, so that all have the same curve.
        if trainer.strategy.reduce_boolean_decision(failed is None):
            self.curve.append((step, miou))
            self.metrics.add(trainer, module, {"dense_nn": miou})
            log.info("step %d: dense retrieval %.1f %% mIoU", step, 100 * miou)
        elif not self.curve:  # no training is lost yet
            raise failed or DataError("another rank could not read the images of the score")
        elif failed is not None:
            log.error("step %d: no score, %s; training continues", step, failed)

    def _score(self, encoder: PatchEncoder, device: torch.device) -> float:
        score = self.config.score
        settings = DenseNNSettings(
            ratios=(score.memory_ratio,),
            draws=1,
            neighbours=score.neighbours,
            size=score.size,
            seed=0,  # the same memory for every seed of the run, so that their scores can be compared
        )
        machine = Machine(devices=(str(device),))
        return dense_nn(encoder, self.data.memory, self.data.queries, settings, machine=machine).scores[0].miou


@contextmanager
def calibrated(
    backbone: Backbone, images: LabelledImages, device: torch.device | str, *, needed: bool
) -> Iterator[None]:
    """Set the batch norm statistics of an untrained network from some images, within this context.

    Without them, an untrained network would be a weaker baseline.
    """

    def normalised(index: int) -> Float[Tensor, "1 3 h w"]:
        image = images.load(index)[None].to(device).float() / 255
        height, width = (side // backbone.patch_size * backbone.patch_size for side in image.shape[2:])
        return normalise(image[..., :height, :width], mean=backbone.mean, std=backbone.std)

    before = {name: value.clone() for name, value in backbone.named_buffers()} if needed else {}
    if needed:
        update_bn(map(normalised, range(min(_CALIBRATION_IMAGES, len(images)))), backbone)
    try:
        yield
    finally:
        backbone.load_state_dict(before, strict=False)
