"""Every choice that image-level nearest neighbours depend on, beside backbone and data; free of torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from cribo.arguments import ConfigError
from cribo.retrieval.choices import FeaturePrecision

NEIGHBOURS = (10, 20, 100, 200)
"""The k that are usually reported."""


@dataclass(frozen=True)
class ImageNNSettings:
    """How images are classified.

    Attributes:
        neighbours: the k; kept in ascending order.
        temperature: a neighbour's vote is exp(cosine / temperature).
        resize: pixels to which the shorter side of an image is resized.
        crop: pixels of the square that is cut from its centre.
        precision: of the kept features.

    Raises:
        ConfigError: numbers out of range.
    """

    neighbours: tuple[int, ...] = NEIGHBOURS
    temperature: float = 0.07
    resize: int = 256
    crop: int = 224
    precision: FeaturePrecision = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "neighbours", tuple(sorted(self.neighbours)))
        if not self.neighbours or min(self.neighbours) < 1:
            raise ConfigError(f"neighbours must be numbers >= 1, at least one, got {list(self.neighbours)}")
        if len(set(self.neighbours)) < len(self.neighbours):
            raise ConfigError(f"neighbours must differ, got {', '.join(map(str, self.neighbours))}")
        if not self.temperature > 0:
            raise ConfigError(f"temperature must be > 0, got {self.temperature}")
        if self.crop < 1:
            raise ConfigError(f"crop must be >= 1, got {self.crop}")
        if self.resize < self.crop:
            raise ConfigError(f"resize must be >= crop, which is cut from it, got {self.resize} and crop {self.crop}")


def check_neighbours(neighbours: Sequence[int], images: int, *, leave_one_out: bool) -> None:
    """Raises ConfigError where there are not as many neighbours as are asked for."""
    there = images - leave_one_out
    if max(neighbours) > there:
        others = "others " if leave_one_out else ""
        raise ConfigError(
            f"neighbours must be at most the number of training images, {there} {others}here, got {max(neighbours)}: "
            f"give fewer, --neighbours {min(5, there)}, say"
        )
