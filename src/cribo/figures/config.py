"""Which figures there are, and what can be asked for; free of torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from cribo.arguments import ConfigError

FigureName = Literal["matches", "clusters", "bootstrapping", "features", "losses", "schedules"]
FIGURES: tuple[FigureName, ...] = get_args(FigureName)
FIGURE_FORMATS = ("pdf", "png")


@dataclass(frozen=True)
class Wanted:
    """What is to be drawn.

    Attributes:
        only: the figures to draw; those that a run has nothing for are left out, and why is said.
        formats: pdf, png, or both.
        objects: K, clusters of a view pair in the matching figure; 12 in the paper.
        queries: images that ask in the matching figure.
        images: files whose features are coloured, as a glob pattern; images of the run's data when not given.
        count: of how many images the features are coloured.
        size: pixels of the shorter side at which these are encoded, at most.
        root: where the data of the run lies now, if it has moved.

    Raises:
        ConfigError: a value out of range.
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
                raise ConfigError(f"{what} must be of {', '.join(known)}, got {', '.join(unknown) or 'nothing'}")
        for name, least in (("objects", 2), ("queries", 1), ("count", 1), ("size", 32)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be >= {least}, got {getattr(self, name)}")
