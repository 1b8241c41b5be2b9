"""Dense retrieval score on labelled images before, during and after training."""

import copy
import logging
import math
from pathlib import Path
from typing import Any

import lightning as L
import torch

from cribo.base.errors import DataError, InputError, UnreadableImage
from cribo.base.wording import counted
from cribo.data import ImageFiles, ImageSource, open_segmentation
from cribo.data.config import spread
from cribo.data.scenes import held_out_scenes
from cribo.data.sources.images import PackedNames
from cribo.evaluation import DenseNN, Splits
from cribo.evaluation.runner import calibrate_batch_norms, measure
from cribo.features.encoder import mean_colour_backbone
from cribo.models import Backbone
from cribo.models.backbone import RGB
from cribo.objectives.base import objective_class
from cribo.pretraining.agreement import INDICATOR_IMAGES, neighbour_agreement, view_points
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.module import PretrainingModule
from cribo.pretraining.monitoring import Metrics

log = logging.getLogger("cribo")

_IMAGES_PER_HELD_OUT = 10


def open_score_data(config: PretrainConfig) -> Splits | None:
    """Open the labelled images of the score: train is the memory, val are the queries.

    Returns None if no score is configured, or if it is that of the synthetic scenes and the images are not RGB.
    """
    root = config.data.root if config.score.root == "data" else config.score.root
    if root is None or (root == "scenes" and config.data.reading.in_chans != RGB):
        return None
    if root == "scenes":
        train, val = held_out_scenes(*config.score.images)
    else:
        train, val = (
            open_segmentation("folder", root, split, reading=config.data.reading) for split in ("train", "val")
        )
    return Splits(train, val, "score", {})


def score_data_name(config: PretrainConfig) -> str:
    """Return the name of the labelled images of the score, for tables, figures and the log."""
    root = config.data.root if config.score.root == "data" else config.score.root
    return "held-out synthetic scenes" if root == "scenes" else f"val of {Path(str(root)).resolve().name}"


def judges_without_labels(config: PretrainConfig) -> bool:
    """Whether neighbour agreement on the user's own images is measured."""
    reads_clips = objective_class(config.objective.name).clip_frames > 0
    return (
        config.score.held_out > 0
        and config.data.root != "scenes"
        and config.score.root in (None, "scenes")
        and not reads_clips
    )


def split_held_out(images: ImageSource, config: PretrainConfig) -> tuple[ImageSource, ImageSource | None]:
    """Split image files into those to train on and those held out (`score.held_out`), which are evenly spaced."""
    count = min(config.score.held_out, len(images) // _IMAGES_PER_HELD_OUT, len(images) - config.optim.batch_size)
    if not judges_without_labels(config) or not isinstance(images, ImageFiles) or count < 2:
        return images, None
    chosen = spread(len(images), count)
    parts = []
    for indices in (sorted(set(range(len(images))).difference(chosen)), chosen):
        part = copy.copy(images)
        part.names = PackedNames(images.names[index] for index in indices)
        parts.append(part)
    return parts[0], parts[1]


class AgreementScore(L.Callback):
    """Callback that measures neighbour agreement on images without labels before and after training.

    Args:
        images: the images.
        config: configuration of the run.
        metrics: callback that records the score.
        held_out: whether the images are not trained on.

    Attributes:
        name: of the images, for tables and the log.
        curve: (step, agreement in 0-1) of each measurement, including those before a resume.
    """

    def __init__(self, images: ImageSource, config: PretrainConfig, metrics: Metrics, *, held_out: bool) -> None:
        self.images = images
        self.recipe = config.views
        self.metrics = metrics
        number = counted(min(len(images), INDICATOR_IMAGES), "image")
        kind = f"held-out {number.partition(' ')[2]}" if held_out else number.partition(" ")[2]
        place = Path(config.data.root).name or config.data.root
        self.name = f"{number.partition(' ')[0]} {kind} of {place}" + ("" if held_out else ", which were trained on")
        self.curve: list[tuple[int, float]] = []

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the measurements of the resumed run."""
        rows = self.metrics.rows_until(checkpoint["global_step"])
        self.curve = [(int(row["step"]), row["agreement"]) for row in rows if "agreement" in row]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure the initial network."""
        if not self.curve:
            self._measure(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure the trained network."""
        if self.curve and self.curve[-1][0] != trainer.global_step:
            self._measure(trainer, pl_module)

    def summary(self, step: int) -> dict[str, Any]:
        """Return the measurements for the summary of a run that ended at `step`; empty without any."""
        if not self.curve:
            return {}
        after = self.curve[-1][1] if self.curve[-1][0] == step else None
        return {"agreement": {"data": self.name, "before": self.curve[0][1], "after": after}}

    def _measure(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, PretrainingModule)
        try:
            agreement = neighbour_agreement(view_points(module.objective.exported(), self.images, self.recipe))
        except (DataError, InputError) as error:
            log.warning("could not measure neighbour agreement on %s: %s", self.name, error)
            return
        self.curve.append((trainer.global_step, agreement))
        self.metrics.add(trainer, module, {"agreement": agreement})
        log.info("step %d: neighbour agreement on %s %.0f %%", trainer.global_step, self.name, 100 * agreement)


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
            return self._score(mean_colour_backbone(in_chans=self.config.data.reading.in_chans), module.device)
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
            log.info("step %d: dense retrieval on %s %.1f %% mIoU", step, score_data_name(self.config), 100 * miou)
        elif not self.curve:  # no training is lost yet
            raise failed or DataError("another rank could not read the labelled images")
        elif failed is not None:
            log.error("step %d: could not compute the score: %s; training continues", step, failed)

    def _score(self, backbone: Backbone, device: torch.device) -> float:
        score = self.config.score
        # A seed independent of the run's, so that scores of runs can be compared.
        protocol = DenseNN(ratios=(score.memory_ratio,), neighbours=score.neighbours, size=score.size, seed=0)
        return measure(protocol, backbone, self.data, device=device).rows[0]["miou"]
