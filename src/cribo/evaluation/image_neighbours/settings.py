"""Settings of image-level nearest neighbours. This module does not import torch."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from cribo.base.bounds import above, at_least, require_distinct_numbers
from cribo.base.errors import ConfigError
from cribo.evaluation.settings import UNDECIDED, Decided, Settings
from cribo.features.config import FeaturePrecision

NEIGHBOURS = (10, 20, 100, 200)
"""Commonly reported values of k."""

PUBLISHED = 20
"""Value of k recommended by DINO and reported in papers."""


@dataclass(frozen=True, kw_only=True)
class ImageNNSettings(Settings):
    """Settings of image-level nearest neighbours.

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
