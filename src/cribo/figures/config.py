"""Names and options of figures; does not import torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from cribo.arguments import ConfigError
from cribo.checks import require_least

FigureName = Literal["matches", "clusters", "bootstrapping", "features", "losses", "schedules"]
FIGURES: tuple[FigureName, ...] = get_args(FigureName)
FIGURE_FORMATS = ("pdf", "png")


@dataclass(frozen=True)
class FigureConfig:
    """Options of figures.

    Attributes:
        only: figures to draw; figures without data in the run are skipped with a reason.
        formats: pdf, png, or both.
        objects: K, number of clusters of a view pair in the matching figure; 12 in the paper.
        queries: number of query images in the matching figure.
        images: glob pattern of images for the feature figure; by default, images of the run's data.
        count: number of images in the feature figure.
        size: maximum of the shorter side, in pixels, at which these images are encoded.
        root: current folder of the run's data, if it has moved.

    Raises:
        ConfigError: a value is out of range.
    """

    only: tuple[FigureName, ...] = FIGURES
    formats: tuple[str, ...] = FIGURE_FORMATS
    objects: int = 12
    queries: int = 3
    images: str | None = None
    count: int = 6
    size: int = 480
    root: str | None = None

    def __post_init__(self) -> None:
        for what, values, known in (("only", self.only, FIGURES), ("format", self.formats, FIGURE_FORMATS)):
            unknown = [value for value in values if value not in known]
            if unknown or not values:
                raise ConfigError(
                    f"{what} must be one or more of {', '.join(known)}, got {', '.join(unknown) or 'nothing'}"
                )
        require_least(self, {"objects": 2, "queries": 1, "count": 1, "size": 32})
