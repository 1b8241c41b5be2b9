"""Names and options of figures; does not import torch."""

from dataclasses import dataclass
from typing import Annotated

from cribo.base.bounds import at_least, check_bounds
from cribo.base.errors import ConfigError
from cribo.data.config import DEFAULT_READING, Reading

FIGURES = ("matches", "clusters", "bootstrapping", "features", "losses", "schedules")
"""Names of the figures of a run."""

FIGURE_FORMATS = ("pdf", "png")


@dataclass(frozen=True)
class FigureConfig:
    """Options of figures.

    Attributes:
        only: figures to draw; figures without data in the run are skipped with a reason.
        format: pdf for print, png for screens.
        num_objects: K, number of clusters per view pair in the matching figure; 12 in the paper.
        queries: number of query images in the matching figure.
        images: the run's images: a folder, a list of images, tar shards or a URL. Required by the figures `matches`
            and `features`, except for synthetic scenes: the folder that a run names is never opened.
        trust: use the custom code that the run names. Only for runs from sources that you trust.
        features_of: images of the features figure, such as 'photos/*.jpg', quoted. [images of the run]
        reading: how these images are read.
        pictures: number of images in the features figure.
        size: limit on the shorter side of these images in pixels; larger sizes show more detail.

    Raises:
        ConfigError: a value is out of range.
    """

    only: tuple[str, ...] = FIGURES
    format: tuple[str, ...] = FIGURE_FORMATS
    num_objects: Annotated[int, at_least(2)] = 12
    queries: Annotated[int, at_least(1)] = 3
    images: str | None = None
    trust: bool = False
    features_of: str | None = None
    reading: Reading = DEFAULT_READING
    pictures: Annotated[int, at_least(1)] = 6
    size: Annotated[int, at_least(32)] = 480

    def __post_init__(self) -> None:
        for what, values, known in (("only", self.only, FIGURES), ("format", self.format, FIGURE_FORMATS)):
            unknown = [value for value in values if value not in known]
            if unknown or not values:
                raise ConfigError(
                    f"{what} must be one or more of {', '.join(known)}, got {', '.join(unknown) or 'nothing'}"
                )
        check_bounds(self)
