"""Settings, schedules and data of object detection. This module does not import torch."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from cribo.base.bounds import above, at_least
from cribo.base.errors import ConfigError
from cribo.base.packages import require_packages
from cribo.data.config import spread
from cribo.evaluation.config import UNDECIDED, Decided, Schedule, Settings, TrainingRuntime
from cribo.evaluation.data import LabelledData, Splits, about_splits
from cribo.features.config import MEAN_COLOUR, BackboneSource

METRICS = ("ap", "ap50", "ap75")

ADVICE = "choose a vision transformer with a [CLS] token and no registers, such as vit_small_patch16_224"
"""Advice for networks that are not supported by YOLOS."""

# The paper's schedule is that of YOLOS-S (command in YOLOS's README), with the batch size of CrIBo (appendix "Object
# detection with YOLO-S": 32 instead of 8). The short schedule trains a small network on a CPU in minutes, with small
# images, small batches for more steps, and a higher learning rate.
SCHEDULES: dict[Schedule, dict[str, Any]] = {
    "paper": {"epochs": 150, "batch_size": 32, "learning_rate": 2.5e-5, "size": 800, "tokens": 100},
    "short": {"epochs": 40, "batch_size": 8, "learning_rate": 2e-4, "size": 256, "tokens": 100},
}
# For all schedules; the defaults of YOLOS's `main.py`.
FINAL_LEARNING_RATE = 1e-7
WEIGHT_DECAY = 1e-4
CLIP = 0.1  # maximum norm of the gradients


@dataclass
class DetectionData(LabelledData):
    """Images with boxes, in files of COCO's format.

    Attributes:
        root: folder of the data set, in COCO's own layout (annotations/instances_train2017.json, train2017), with
            instances_train.json and images/train, or with train/_annotations.coco.json next to the images; the same
            for val (or valid).
        train_annotations: JSON file of the training annotations, at any path.
        train_images: folder of the training images. [that of the layout, or of the JSON file]
        val_annotations: JSON file of the validation annotations, at any path.
        val_images: folder of the validation images. [that of the layout, or of the JSON file]
        limit: maximum number of images per split, evenly spaced, for a quick trial.
    """

    layout: ClassVar[str] = "instances_<split>.json with images/<split>, or another layout of COCO's format"

    root: str | None = None
    train_annotations: str | None = None
    train_images: str | None = None
    val_annotations: str | None = None
    val_images: str | None = None
    limit: Annotated[int, at_least(1)] | None = None

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """Whether a folder has annotations in one of the layouts."""
        from cribo.data.labelled.detection import has_annotations

        return has_annotations(folder)

    def open(self) -> Splits:
        """Open both splits.

        Raises:
            DataError: see `open_detection`.
        """
        from cribo.data.labelled.detection import open_detection

        places = {name: value for name, value in dataclasses.asdict(self).items() if name not in ("root", "limit")}
        found = open_detection(self.root, **places)
        train, val = found.train, found.val
        if self.limit is not None:
            train, val = (images.subset(spread(len(images), self.limit)) for images in (train, val))
        boxes = {"train_boxes": train.num_boxes, "val_boxes": val.num_boxes}
        about = about_splits(self, str(found.root), train, "train", val, "val", name=found.name, **boxes)
        title = found.name if found.name != "folder" else found.root.absolute().name
        return Splits(train, val, title, about)


@dataclass(frozen=True, kw_only=True)
class DetectionSettings(Settings):
    """Object detection with YOLOS.

    Attributes:
        schedule: paper (YOLOS-S on COCO, days on a GPU) or short (small images, for a small machine). It sets the
            defaults of the next five options, see [brackets].
        epochs: number of epochs. [150, short: 40]
        batch_size: number of images per step, over all devices. [32, short: 8]
        learning_rate: initial learning rate of a cosine schedule. If the loss stagnates or diverges, multiply or
            divide it by three. [2.5e-5, short: 2e-4]
        size: shorter side of validation images in pixels; in training, it varies from 0.6 to 1 times this size. Small
            objects require large images; the cost of attention grows with the fourth power. [800, short: 256]
        tokens: number of detection tokens, the maximum number of objects per image. [100]
        checkpointing: recompute activations in the backward pass; a third more computation, much less memory.
        seed: seed of the new weights, the order of the images and their augmentation.
    """

    name: ClassVar[str] = "detection"
    title: ClassVar[str] = "Object detection"
    metrics: ClassVar[tuple[str, ...]] = METRICS
    varies: ClassVar[str] = "learning_rate"
    class_metric: ClassVar[str] = "AP"
    data_type: ClassVar[type[Any]] = DetectionData
    runtime_type: ClassVar[type[Any]] = TrainingRuntime
    pictures: ClassVar[str] = "images for which the boxes are drawn"
    less_memory: ClassVar[str] = (
        "use --checkpointing, --runtime.precision bf16-mixed, more --devices, or a smaller --size"
    )
    description: ClassVar[str] = """\
Object detection with YOLOS: the backbone with detection tokens is finetuned on images with boxes (COCO's format), and
the boxes predicted for the validation images are scored (AP, AP50, AP75).

  cribo evaluate detection --backbone runs/mine --data COCO --runtime.precision bf16-mixed
  cribo evaluate detection --backbone runs/mine --data MINE --schedule short
  cribo evaluate detection --backbone checkpoint.pth --data.train_annotations t.json --data.train_images t/ \\
                           --data.val_annotations v.json --data.val_images v/

The backbone must be a vision transformer with a [CLS] token. The paper's schedule takes days on a GPU for COCO; to
resume after an interruption, use --out FOLDER --resume. For a quick trial: --schedule short --limit 20 --epochs 2
Requires the extra detection (README.md, Install).
"""

    schedule: Schedule = "paper"
    epochs: Decided[Annotated[int, at_least(1)]] = UNDECIDED
    batch_size: Decided[Annotated[int, at_least(1)]] = UNDECIDED
    learning_rate: Decided[Annotated[float, above(0)]] = UNDECIDED
    size: Decided[Annotated[int, at_least(1)]] = UNDECIDED
    tokens: Decided[Annotated[int, at_least(1)]] = UNDECIDED
    checkpointing: bool = False
    seed: int = 0

    def scheduled(self) -> Self:
        """Return a copy with all settings set, with the defaults of the schedule."""
        return self.decided(SCHEDULES[self.schedule])

    def check_packages(self) -> None:
        """Check that transformers is installed."""
        require_packages("detection", "transformers", extra="detection")

    def check_backbone(self, source: BackboneSource) -> None:
        """Raise ConfigError for backbones that cannot be finetuned as a detector."""
        if source.source == MEAN_COLOUR:
            raise ConfigError(f"{MEAN_COLOUR} is not a network and cannot be finetuned as a detector: {ADVICE}")
        if source.layers != 1:
            raise ConfigError(
                f"layers must be 1 for detection, got {source.layers}: detection tokens pass through all blocks"
            )
