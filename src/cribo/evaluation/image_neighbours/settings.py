"""Settings of image-level nearest neighbours. This module does not import torch."""

from dataclasses import dataclass
from typing import ClassVar, Self

from cribo.base.bounds import require_least, require_positive
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

    neighbours: Decided[tuple[int, ...]] = UNDECIDED
    temperature: float = 0.07
    resize: int = 256
    crop: int = 224
    precision: FeaturePrecision = "float32"

    def __post_init__(self) -> None:
        if self.is_decided("neighbours"):
            object.__setattr__(self, "neighbours", tuple(sorted(self.neighbours)))
            if not self.neighbours or min(self.neighbours) < 1:
                raise ConfigError(f"neighbours must be one or more numbers >= 1, got {list(self.neighbours)}")
            if len(set(self.neighbours)) < len(self.neighbours):
                raise ConfigError(f"neighbours must be distinct, got {', '.join(map(str, self.neighbours))}")
        require_positive(self, "temperature")
        require_least(self, {"crop": 1})
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
