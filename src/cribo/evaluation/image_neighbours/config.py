"""What image-level nearest neighbours can be asked for, typed: the command line and Python share it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from cribo.arguments import ConfigError
from cribo.evaluation.data import require_limit
from cribo.evaluation.image_neighbours.settings import NEIGHBOURS, ImageNNSettings, check_neighbours
from cribo.evaluation.runtime import EvaluationRuntime
from cribo.retrieval.choices import FeaturePrecision
from cribo.retrieval.source import BackboneSource

if TYPE_CHECKING:
    from cribo.data.classification import ClassificationSplits


@dataclass
class ImageDataConfig:
    """Images of one class each.

    Attributes:
        name: imagenet (ImageNet-1k: train/<class>/*, and val/<class>/* or val/* with LOC_val_solution.csv or val.txt),
            or folder for train/<class>/* and val/<class>/*, or, without a split, <class>/*: each image is then
            classified by all the others.
        root: the folder that the set was unpacked to.
        train: folder of the images whose classes are known, below the root. [train]
        val: folder of the images to classify. [val, for a folder also validation, valid, test]
        partial: accept an ImageNet of which images are missing. Its figures cannot be compared with published ones.
        limit: use so many images of each split only, of each class in turn, to try things out.
    """

    name: Literal["imagenet", "folder"]
    root: str | None = None
    train: str | None = None
    val: str | None = None
    partial: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        require_limit(self.limit)


@dataclass
class ImageNNConfig:
    """Image-level nearest neighbours.

    Attributes:
        backbone: whose global tokens.
        data: images of one class each.
        neighbours: k, how many nearest training images vote, a row of results each; published figures are of 20.
            [10,20,100,200, those that there are training images for]
        temperature: a neighbour's vote is exp(cosine / temperature): with a lower one, near ones count more.
        resize: pixels of an image's shorter side.
        crop: pixels of the square that is cut from its centre; a multiple of the patch size.
        precision: of the kept features: float16 takes half the room.
        runtime: where and how it is computed. Every device encodes, and all share the search.
    """

    backbone: BackboneSource
    data: ImageDataConfig
    neighbours: tuple[int, ...] | None = None
    temperature: float = 0.07
    resize: int = 256
    crop: int = 224
    precision: FeaturePrecision = "float32"
    runtime: EvaluationRuntime = field(default_factory=lambda: EvaluationRuntime(batch_size=64))


def open_image_splits(config: ImageDataConfig) -> "ClassificationSplits":
    """Open the images whose classes are known, and those to classify.

    Raises:
        ConfigError: no root.
        DataError: a folder of another layout, missing images.
    """
    if config.root is None:
        raise ConfigError(f"data.root must be given: the folder of {config.name}")
    from cribo.data.classification import open_classification  # here: a configuration must not wait for torch

    splits = open_classification(config.name, config.root, train=config.train, val=config.val, partial=config.partial)
    if config.limit is None:
        return splits
    val = None if splits.val is None else splits.val.limited(config.limit)
    return splits._replace(train=splits.train.limited(config.limit), val=val)


def image_nn_settings(config: ImageNNConfig, splits: "ClassificationSplits") -> ImageNNSettings:
    """What a configuration means for these images.

    Raises:
        ConfigError: numbers out of range, or more neighbours than there are training images.
    """
    leave_one_out = splits.val is None
    neighbours = config.neighbours
    if neighbours is None:
        there = len(splits.train) - leave_one_out
        neighbours = tuple(k for k in NEIGHBOURS if k <= there) or (there,)
    settings = ImageNNSettings(neighbours, config.temperature, config.resize, config.crop, config.precision)
    check_neighbours(settings.neighbours, len(splits.train), leave_one_out=leave_one_out)
    return settings
