"""Settings of semantic correspondence. This module does not import torch."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from cribo.base.bounds import above, at_most, require_distinct_numbers
from cribo.evaluation.settings import UNDECIDED, Decided, Settings, Side
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

    alphas: tuple[Annotated[float, above(0) & at_most(1)], ...] = (0.1,)
    size: Decided[tuple[Side, Side]] = UNDECIDED
    interpolation: Interpolation = "bilinear"
    precision: FeaturePrecision = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_distinct_numbers("alphas", self.alphas, "0.05,0.1")
