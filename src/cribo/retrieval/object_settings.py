"""Settings that define the objects of an image, together with the backbone."""

from dataclasses import dataclass, fields, replace
from typing import get_args

from cribo.checks import require_least
from cribo.errors import ConfigError
from cribo.method.recipe import Marginals


@dataclass(kw_only=True)
class ObjectOptions:
    """Options of commands for the settings that define objects.

    Attributes:
        num_objects: K, the maximum number of objects per image. Higher values find smaller objects and split large
            ones. [16]
        marginals: adaptive adapts number and sizes of the objects to the image; uniform gives K objects of about equal
            size. [adaptive]
        position_weight: weight of position relative to similarity; 0 joins similar patches regardless of position.
            [1.0]
        size: shorter side in pixels at which images are encoded; larger sizes find smaller objects and take longer. 0
            for each image's own size. [480]
        min_share: minimum share of the image that an object covers; smaller objects are dropped. [0.005]
    """

    num_objects: int | None = None
    marginals: Marginals | None = None
    position_weight: float | None = None
    size: int | None = None
    min_share: float | None = None

    def settings(self, default: "ObjectSettings") -> "ObjectSettings":
        """Return the settings, with those of `default` for options that are not given.

        Raises:
            ConfigError: a value is out of range.
        """
        require_least(self, {"size": 0})
        given = {field.name: getattr(self, field.name) for field in fields(ObjectSettings)}
        values = {name: value for name, value in given.items() if value is not None}
        return replace(default, **values | ({"size": None} if self.size == 0 else {}))


@dataclass(frozen=True)
class ObjectSettings:
    """Settings that define objects; all objects of a database share them.

    Attributes:
        num_objects: K, the maximum number of clusters per image. Higher values find smaller objects and split large
            ones.
        marginals: adaptive adapts number and sizes of the objects to the image; uniform gives K objects of about equal
            size.
        position_weight: weight of distance in the image relative to similarity. 0 ignores positions.
        size: shorter side of the encoded image in pixels: larger values find smaller objects and take longer. null for
            each image's own size. Sides are rounded to the patch size, and reduced so that there are at most 4096
            patches.
        min_share: minimum share of the image that an object covers; smaller objects are dropped.

    Raises:
        ConfigError: a value is out of range.
    """

    num_objects: int = 16
    marginals: Marginals = "adaptive"
    position_weight: float = 1.0
    size: int | None = 480
    min_share: float = 0.005

    def __post_init__(self) -> None:
        require_least(self, {"num_objects": 1})
        if self.marginals not in get_args(Marginals):
            raise ConfigError(f"marginals must be one of {', '.join(get_args(Marginals))}, got {self.marginals!r}")
        if not 0 <= self.position_weight < float("inf"):
            raise ConfigError(f"position_weight must be >= 0, got {self.position_weight}")
        if self.size is not None and self.size < 1:
            raise ConfigError(f"size must be >= 1 pixel, or null for the image's own, got {self.size}")
        if not 0 <= self.min_share < 1:
            raise ConfigError(f"min_share must be >= 0 and < 1, got {self.min_share}")
