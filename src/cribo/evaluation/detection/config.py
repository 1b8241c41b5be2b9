"""What finetuning a detector can be asked for, typed: the command line and Python share it."""

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cribo.arguments import ConfigError
from cribo.evaluation.data import require_limit, spread
from cribo.evaluation.detection.recipe import ADVICE, RECIPES, Recipe
from cribo.evaluation.runtime import Schedule, TrainingRuntime
from cribo.retrieval.source import MEAN_COLOUR, BackboneSource

if TYPE_CHECKING:
    from cribo.data.detection import DetectionSplits


@dataclass
class DetectionData:
    """Images with boxes, as files of COCO's format have them.

    Attributes:
        root: the folder of the set. Found below it are COCO's own layout (annotations/instances_train2017.json,
            train2017), instances_train.json with images/train, and train/_annotations.coco.json beside the images;
            and the same with val (or valid).
        train_annotations: the JSON file of the training images, wherever it is.
        train_images: their folder; where the layout has them, or beside the file, when not given.
        val_annotations: the JSON file of the images to score on.
        val_images: their folder.
        limit: use so many images of each split only, evenly spread, to try things out.
    """

    root: str | None = None
    train_annotations: str | None = None
    train_images: str | None = None
    val_annotations: str | None = None
    val_images: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        require_limit(self.limit)

    def open(self) -> "DetectionSplits":
        """Open both splits.

        Raises:
            what `open_detection` raises.
        """
        from cribo.data.detection import open_detection

        places = {name: value for name, value in dataclasses.asdict(self).items() if name not in ("root", "limit")}
        splits = open_detection(self.root, **places)
        if self.limit is None:
            return splits
        parts = {
            name: images.subset(spread(len(images), self.limit))
            for name, images in (("train", splits.train), ("val", splits.val))
        }
        return dataclasses.replace(splits, **parts)


@dataclass
class DetectionConfig:
    """Object detection with YOLOS.

    Attributes:
        backbone: that is finetuned: a vision transformer with a [CLS] token and no registers.
        data: images with boxes.
        schedule: paper (YOLOS-S on COCO, days of a GPU) or short (small images, for a small machine). It decides
            whatever of the following is not given, in [brackets].
        epochs: over the training images. [150, short: 40]
        batch_size: images of a step, over all devices. [32, short: 8]
        learning_rate: at the beginning; it falls along half a cosine. If training does not get going, or diverges,
            try three times as much, or a third. [2.5e-5, short: 2e-4]
        size: pixels of an image's shorter side when it is scored; in training, sides from 0.6 of it are drawn. Small
            objects need large images; the cost grows with its fourth power where attention prevails. [800, short: 256]
        tokens: how many objects can be found in an image. [100]
        checkpointing: compute the blocks once more in the backward pass: a third more work, much less memory.
        seed: of what is new in the network, of the order of the images and of their augmentation.
        runtime: where and how it is computed.
    """

    backbone: BackboneSource
    data: DetectionData = field(default_factory=DetectionData)
    schedule: Schedule = "paper"
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    size: int | None = None
    tokens: int | None = None
    checkpointing: bool = False
    seed: int = 0
    runtime: TrainingRuntime = field(default_factory=TrainingRuntime)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "size", "tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise ConfigError(f"learning_rate must be > 0, got {self.learning_rate}")
        if self.backbone.source == MEAN_COLOUR:
            raise ConfigError(f"{MEAN_COLOUR} is no network that a detector could begin with: {ADVICE}")
        if self.backbone.layers != 1:
            raise ConfigError(
                f"layers must be 1 for detection, got {self.backbone.layers}: detection tokens go through all blocks"
            )

    @property
    def recipe(self) -> Recipe:
        """That of the schedule, with what was given."""
        given = {name: getattr(self, name) for name in ("epochs", "batch_size", "learning_rate", "size", "tokens")}
        return dataclasses.replace(
            RECIPES[self.schedule], **{name: value for name, value in given.items() if value is not None}
        )
