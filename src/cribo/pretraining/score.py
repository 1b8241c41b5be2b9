"""Dense retrieval on labelled images before, during and after training."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import nn

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
    """The labelled images of a score: those whose patches are searched, and those that are labelled."""

    memory: LabelledImages
    queries: LabelledImages


def open_score_data(config: PretrainConfig) -> ScoreData | None:
    """The labelled images that the configuration names, None if it names none.

    Held-out scenes have numbers beyond those that are trained on.
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
    """Takes the score of what the objective exports, and writes it with the metrics.

    Labelled images that cannot be read end the run if it is the first score; later ones are left out.

    Args:
        data: labelled images.
        config: of the run.
        metrics: where the score is noted.

    Attributes:
        curve: (step, mIoU in 0-1) of every score taken, those before a resume included.
    """

    def __init__(self, data: ScoreData, config: PretrainConfig, metrics: Metrics) -> None:
        self.data = data
        self.config = config
        self.metrics = metrics
        self.curve: list[tuple[int, float]] = []

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take up the scores of the run that is resumed; its metrics have been read."""
        self.curve = [(int(row["step"]), row["dense_nn"]) for row in self.metrics.rows if "dense_nn" in row]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the untrained network, or what a resumed run was stopped before scoring."""
        if not self.curve or self._is_due(trainer, pl_module):
            self._take(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score every so many epochs."""
        if self._is_due(trainer, pl_module):
            self._take(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the trained network."""
        if not self.curve or self.curve[-1][0] != trainer.global_step:
            self._take(trainer, pl_module)

    def _is_due(self, trainer: L.Trainer, module: L.LightningModule) -> bool:
        """Whether an epoch that is to be scored ends at this step, and has no score yet.

        A run may have been stopped, and be resumed, between the last step of an epoch and its score.
        """
        assert isinstance(module, PretrainingModule)
        epochs, rest = divmod(trainer.global_step, module.schedules.steps_per_epoch)
        return (
            rest == 0
            and epochs % self.config.score.every_epochs == 0
            and trainer.global_step < trainer.max_steps
            and (not self.curve or self.curve[-1][0] != trainer.global_step)
        )

    def mean_colour(self, module: PretrainingModule) -> float | None:
        """MIoU of the baseline that knows the mean colour of a patch only; None if images have been lost."""
        patch_size = module.objective.exported().patch_size
        try:
            return self._score(mean_colour_encoder(patch_size), module.device)
        except (UnreadableImage, DataError) as error:
            log.error("no score of the mean colour, %s", error)
            return None

    def _take(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, PretrainingModule)
        backbone = module.objective.exported()
        untrained = trainer.global_step == 0 and self.config.backbone.pretrained is None
        failed: UnreadableImage | DataError | None = None
        try:
            with calibrated(backbone, self.data.memory, module.device, needed=untrained):
                miou: float | None = self._score(backbone_encoder(backbone), module.device)
        except (UnreadableImage, DataError) as error:
            miou, failed = None, error
        # All or none, so that all have the same curve.
        everywhere = trainer.strategy.reduce_boolean_decision(miou is not None)
        if not everywhere and not self.curve:  # nothing is lost yet
            raise failed or DataError("another process could not read the images of the score")
        if failed is not None:
            log.error("step %d: no score, %s; training goes on", trainer.global_step, failed)
        if miou is None or not everywhere:
            return
        self.curve.append((trainer.global_step, miou))
        self.metrics.add(trainer, module, {"dense_nn": miou})
        log.info("step %d: dense retrieval %.1f %% mIoU", trainer.global_step, 100 * miou)

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
    """For the while, give the batch norms of an untrained network the statistics of some images.

    Without them an untrained network is a poorer opponent than it has to be. The network is left as it was.
    """
    norms = [part for part in backbone.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if not needed or not norms:
        yield
        return
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    momenta, training = [norm.momentum for norm in norms], backbone.training
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain average over all that passes
        backbone.train()
        with torch.no_grad():
            for index in range(min(_CALIBRATION_IMAGES, len(images))):
                image = images.load(index)[None].to(device).float() / 255
                height, width = (side // backbone.patch_size * backbone.patch_size for side in image.shape[2:])
                backbone.encode(normalise(image[..., :height, :width], mean=backbone.mean, std=backbone.std))
        yield
    finally:
        backbone.load_state_dict(before)
        backbone.train(training)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
