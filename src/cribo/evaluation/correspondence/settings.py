"""Settings of semantic correspondence. This module does not import torch."""

from dataclasses import dataclass
from typing import ClassVar

from cribo.base.errors import InputError
from cribo.evaluation.settings import UNDECIDED, Decided, Settings
from cribo.features.config import FeaturePrecision, Interpolation


@dataclass(frozen=True, kw_only=True)
class CorrespondenceSettings(Settings):
    """Settings of semantic correspondence.

    Attributes:
        alphas: maximum distance of a correct point, relative to the longer side of the object's box; one row each.
        size: height,width of all images, or a single number for squares. [768, or the multiple of the patch size below]
        interpolation: interpolation of resized images.
        precision: precision of the stored features; float16 halves their size.

    Raises:
        InputError: a value is out of range.
    """

    name: ClassVar[str] = "correspondence"

    alphas: tuple[float, ...] = (0.1,)
    size: Decided[tuple[int, int]] = UNDECIDED
    interpolation: Interpolation = "bilinear"
    precision: FeaturePrecision = "float32"

    def __post_init__(self) -> None:
        if (
            not self.alphas
            or not all(0 < alpha <= 1 for alpha in self.alphas)
            or len({*self.alphas}) < len(self.alphas)
        ):
            raise InputError(f"alphas must be distinct numbers > 0 and <= 1, such as 0.05,0.1, got {self.alphas}")
