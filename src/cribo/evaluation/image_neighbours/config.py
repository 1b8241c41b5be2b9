"""Settings of image-level nearest neighbours. This module does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from cribo.base.bounds import above, at_least, require_distinct_numbers
from cribo.base.errors import ConfigError
from cribo.evaluation.config import UNDECIDED, Decided, Settings
from cribo.evaluation.data import ImageData
from cribo.features.config import BackboneSource, FeaturePrecision

NEIGHBOURS = (10, 20, 100, 200)
"""Commonly reported values of k."""

PUBLISHED = 20
"""Value of k recommended by DINO and reported in papers."""


@dataclass(frozen=True, kw_only=True)
class ImageNNSettings(Settings):
    """Image-level nearest-neighbour classification, as in DINO's `eval_knn.py`.

    Attributes:
        neighbours: k, number of nearest training images that vote, one row of results each; published scores use
            k = 20. [10,20,100,200, limited by the number of training images]
        temperature: temperature of the votes exp(cosine / temperature); lower values favour near neighbours.
        resize: shorter side of resized images in pixels.
        crop: side of the centre crop in pixels; a multiple of the patch size.
        precision: precision of the stored features; float16 halves their size.

    Raises:
        ConfigError: a value out of range.
    """

    name: ClassVar[str] = "image-nn"
    title: ClassVar[str] = "Image nearest-neighbour classification"
    metrics: ClassVar[tuple[str, ...]] = ("top1", "top5")
    varies: ClassVar[str] = "neighbours"
    class_metric: ClassVar[str] = "accuracy"
    data_type: ClassVar[type[Any]] = ImageData
    runtime_defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 64}
    pictures: ClassVar[str] = "images for which the nearest ones are drawn"
    quick_limit: ClassVar[int] = 240
    description: ClassVar[str] = """\
Image-level nearest neighbours: each image is classified by a vote of the training images with the most similar global
tokens, as in DINO, and the predictions are scored (top-1, top-5). Nothing is trained.

  cribo evaluate image-nn --backbone runs/imagenet --data ILSVRC2012
  cribo evaluate image-nn --backbone vit_small_patch16_224.dino --data MINE
  cribo evaluate image-nn --backbone mean-colour --data MINE

A folder contains train/<class>/* and val/<class>/*, or, without splits, <class>/*, where each image is classified by
all others. For related images (frames of one film, crops of one photograph), provide splits that keep them together;
otherwise images are classified by their relatives, and the score is too high.

Features are cached on disk and reused when an interrupted evaluation is repeated, and by further evaluations of the
same backbone and images. For a quick trial: --limit 200
"""

    neighbours: Decided[tuple[Annotated[int, at_least(1)], ...]] = UNDECIDED
    temperature: Annotated[float, above(0)] = 0.07
    resize: Annotated[int, at_least(1)] = 256
    crop: Annotated[int, at_least(1)] = 224
    precision: FeaturePrecision = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_decided("neighbours"):
            object.__setattr__(self, "neighbours", tuple(sorted(self.neighbours)))
            require_distinct_numbers("neighbours", self.neighbours, "10,20")
        if self.resize < self.crop:
            raise ConfigError(f"resize must be >= crop, got resize {self.resize} and crop {self.crop}")

    def for_data(self, images: int, *, leave_one_out: bool) -> Self:
        """Return a copy with `neighbours` set for a number of training images.

        Raises:
            ConfigError: more neighbours than training images.
        """
        most = images - leave_one_out
        settings = self.decided({"neighbours": tuple(k for k in NEIGHBOURS if k <= most) or (most,)})
        if settings.neighbours[-1] > most:
            others = "other " if leave_one_out else ""
            raise ConfigError(
                f"neighbours must be at most the number of {others}training images, {most}, got "
                f"{settings.neighbours[-1]}: use fewer, such as --neighbours {min(5, most)}"
            )
        return settings

    def check_backbone(self, source: BackboneSource) -> None:
        """Raise ConfigError for features of several layers."""
        if source.layers != 1:
            raise ConfigError(
                f"layers must be 1, since the global token is that of the last block, got {source.layers}"
            )
