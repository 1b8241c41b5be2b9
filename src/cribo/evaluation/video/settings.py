"""Settings of video label propagation. This module does not import torch."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from cribo.base.bounds import above, at_least
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

    neighbours: Annotated[int, at_least(1)] = 5
    radius: Annotated[int, at_least(1)] = 12
    previous: Annotated[int, at_least(0)] = 7
    temperature: Annotated[float, above(0)] = 0.1
    side: Annotated[int, at_least(1)] = 480
    interpolation: Interpolation = "bilinear"
    precision: FeaturePrecision = "float32"
