"""Settings of video label propagation. This module does not import torch."""

from dataclasses import dataclass
from typing import ClassVar

from cribo.base.bounds import require_least, require_positive
from cribo.evaluation.settings import Settings
from cribo.features.config import FeaturePrecision, Interpolation


@dataclass(frozen=True, kw_only=True)
class VideoPropagationSettings(Settings):
    """Settings of video label propagation.

    Attributes:
        neighbours: k, number of most similar patches whose labels are averaged.
        radius: search radius in patches, in both directions.
        previous: number of previous frames to search, in addition to the first.
        temperature: temperature of the weights exp(cosine / temperature).
        side: shorter side of resized frames in pixels, rounded down to a multiple of the patch size; the longer side is
            rounded down to a multiple of 64 pixels, or of the patch size if it does not divide 64.
        interpolation: interpolation of resized frames.
        precision: precision of the stored features; float16 halves their size.

    Raises:
        InputError: a value is out of range.
    """

    name: ClassVar[str] = "video"

    neighbours: int = 5
    radius: int = 12
    previous: int = 7
    temperature: float = 0.1
    side: int = 480
    interpolation: Interpolation = "bilinear"
    precision: FeaturePrecision = "float32"

    def __post_init__(self) -> None:
        require_least(self, {"neighbours": 1, "radius": 1, "previous": 0, "side": 1})
        require_positive(self, "temperature")
