"""Settings of object discovery. This module does not import torch."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from cribo.base.bounds import above, at_least, below, require_distinct
from cribo.evaluation.settings import UNDECIDED, Decided, Settings

METHODS = ("lost", "tokencut")
DiscoveryFeatures = Literal["keys", "queries", "values", "tokens"]


@dataclass(frozen=True, kw_only=True)
class DiscoverySettings(Settings):
    """Settings of object discovery.

    Attributes:
        methods: lost (Siméoni et al. 2021) or tokencut (Wang et al. 2022), one row of results each.
        features: keys, queries or values of the last attention layer (keys in both papers), or tokens, the features of
            all other protocols. [keys; tokens for networks without attention, or with a linear readout]
        candidates: number of candidate patches for the seed expansion of LOST.
        threshold: minimum cosine of connected patches in TokenCut.
        size: longer side of resized images in pixels. [each image's own size, or the fixed input size of the network]

    Raises:
        InputError: a value is out of range.
    """

    name: ClassVar[str] = "discovery"

    methods: tuple[str, ...] = METHODS
    features: Decided[DiscoveryFeatures] = UNDECIDED
    candidates: Annotated[int, at_least(1)] = 100
    threshold: Annotated[float, above(-1) & below(1)] = 0.2
    size: Annotated[int, at_least(1)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_distinct("methods", self.methods, METHODS)
