"""What a page can be asked to show, and how much a visitor may send; free of torch."""

from dataclasses import dataclass
from pathlib import Path

from cribo.arguments import ConfigError
from cribo.retrieval.source import BackboneSource


@dataclass(frozen=True)
class Asked:
    """What a user wants to look at.

    Attributes:
        run: a run folder.
        db: a database of objects.
        backbone: whose features are shown; that of the database or of the run when not given.
        images: where the images are; where the database or the run says when not given.
        limit: of images, where objects are found at the start because there is no database.
        device: of the network; a GPU if there is one when not given.

    Raises:
        ConfigError: nothing to look at, or a limit of no image.
    """

    run: Path | None = None
    db: str | None = None
    backbone: BackboneSource | None = None
    images: Path | None = None
    limit: int = 100
    device: str | None = None

    def __post_init__(self) -> None:
        if self.run is None and self.db is None and self.backbone is None:
            raise ConfigError("there is nothing to look at: give --run DIR, --db DIR or --backbone SOURCE")
        if self.limit < 1:
            raise ConfigError(f"limit must be >= 1, got {self.limit}")


@dataclass(frozen=True)
class Limits:
    """How much a visitor may send.

    Attributes:
        megabytes: of one picture's file.
        megapixels: of one picture; the header says so, and nothing larger is decoded.

    Raises:
        ValueError: a limit that allows nothing.
    """

    megabytes: float = 20.0
    megapixels: float = 40.0

    def __post_init__(self) -> None:
        for name in ("megabytes", "megapixels"):
            if getattr(self, name) <= 0:
                raise ValueError(f"max_{name} must be > 0, got {getattr(self, name)}")

    @property
    def bytes(self) -> int:
        """Of one picture's file."""
        return round(1e6 * self.megabytes)

    @property
    def pixels(self) -> int:
        """Of one picture."""
        return round(1e6 * self.megapixels)

    def __str__(self) -> str:
        return f"up to {self.megabytes:g} MB and {self.megapixels:g} megapixels"
