"""What counts as an object: every choice that the objects of an image depend on, beside the backbone."""

from dataclasses import dataclass
from typing import get_args

from cribo.arguments import ConfigError
from cribo.method.recipe import Marginals


@dataclass(frozen=True)
class ObjectSettings:
    """What counts as an object; a database holds objects of one kind.

    Attributes:
        num_objects: K, the clusters of an image at most. More of them find smaller things, and cut large ones.
        marginals: adaptive lets the number and the sizes of the objects follow the image; uniform makes K of about
            one size.
        position_weight: weight of nearness in the image against likeness. 0 joins what looks alike wherever it is.
        size: the shorter side at which an image is encoded, in pixels: larger finds smaller things and takes longer.
            null for each image's own size. Sides are rounded to the patch size, and shrunk where there would be more
            than 4096 patches.
        min_share: objects that cover less of the image are left out.

    Raises:
        ConfigError: a value out of range.
    """

    num_objects: int = 16
    marginals: Marginals = "adaptive"
    position_weight: float = 1.0
    size: int | None = 480
    min_share: float = 0.005

    def __post_init__(self) -> None:
        if self.num_objects < 1:
            raise ConfigError(f"num_objects must be >= 1, got {self.num_objects}")
        if self.marginals not in get_args(Marginals):
            raise ConfigError(f"marginals must be one of {', '.join(get_args(Marginals))}, got {self.marginals!r}")
        if not 0 <= self.position_weight < float("inf"):
            raise ConfigError(f"position_weight must be >= 0, got {self.position_weight}")
        if self.size is not None and self.size < 1:
            raise ConfigError(f"size must be >= 1 pixel, or null for the image's own, got {self.size}")
        if not 0 <= self.min_share < 1:
            raise ConfigError(f"min_share must be >= 0 and < 1, got {self.min_share}")
