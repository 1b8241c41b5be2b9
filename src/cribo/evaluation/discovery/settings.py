"""Settings of object discovery. This module does not import torch."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from cribo.base.bounds import require_distinct, require_least
from cribo.base.errors import InputError
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
    candidates: int = 100
    threshold: float = 0.2
    size: int | None = None

    def __post_init__(self) -> None:
        require_least(self, {"candidates": 1, "size": 1})
        require_distinct("methods", self.methods, METHODS)
        if not -1 < self.threshold < 1:
            raise InputError(f"threshold must be a cosine between -1 and 1, got {self.threshold}")
