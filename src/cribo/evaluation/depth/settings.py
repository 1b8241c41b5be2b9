"""Settings of depth prediction. This module does not import torch."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from cribo.base.bounds import above, at_least, require_distinct
from cribo.evaluation.settings import Settings, Side
from cribo.features.config import FeaturePrecision, Interpolation, Vote

METHODS = ("neighbours", "linear")


@dataclass(frozen=True, kw_only=True)
class DepthSettings(Settings):
    """Settings of depth prediction.

    Attributes:
        methods: neighbours (the weighted mean depth of the nearest patches, as in Balazevic et al. 2023) or linear
            (ridge regression on the features); one row of results each.
        neighbours: k, the number of nearest patches.
        vote: weight of a neighbour: majority (equal weights), similarity (its cosine) or attention (softmax of
            cosine / temperature).
        temperature: temperature of the attention.
        ridge: L2 penalty of the linear probe on the weights of standardised channels.
        size: height,width of all images, or a single number for squares. [each image's own, rounded to the patch size,
            or the fixed input size of the network]
        interpolation: interpolation of resized images.
        precision: precision of the stored features; float16 halves their size.

    Raises:
        InputError: a value is out of range.
    """

    name: ClassVar[str] = "depth"

    methods: tuple[str, ...] = METHODS
    neighbours: Annotated[int, at_least(1)] = 30
    vote: Vote = "attention"
    temperature: Annotated[float, above(0)] = 0.02
    ridge: Annotated[float, above(0)] = 1e-3
    size: tuple[Side, Side] | None = None
    interpolation: Interpolation = "bicubic"
    precision: FeaturePrecision = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_distinct("methods", self.methods, METHODS)
