"""Contents of a page, and limits of uploads; does not import torch."""

from dataclasses import dataclass
from pathlib import Path

from cribo.arguments import ConfigError
from cribo.checks import require_least
from cribo.errors import InputError
from cribo.retrieval.source import BackboneSource


@dataclass(frozen=True)
class ExploreConfig:
    """Contents of the page of `cribo explore`.

    Attributes:
        run: a run folder of cribo pretrain with a checkpoint; the run may still be in progress.
        db: a database of objects of cribo index: a folder or URL.
        backbone: network of the features. [that of the database or run]
        images: folder of the images. [that of the run or database]
        limit: number of images whose objects are found at start-up, without a database.
        device: such as cuda:0 or cpu. [the first GPU, else the CPU]

    Raises:
        ConfigError: neither `run`, `db` nor `backbone` is given, or `limit` is below 1.
    """

    run: Path | None = None
    db: str | None = None
    backbone: BackboneSource | None = None
    images: Path | None = None
    limit: int = 100
    device: str | None = None

    def __post_init__(self) -> None:
        if self.run is None and self.db is None and self.backbone is None:
            raise ConfigError("--run DIR, --db DIR or --backbone SOURCE is required")
        require_least(self, {"limit": 1})


@dataclass(frozen=True)
class Limits:
    """Limits of uploaded pictures.

    Attributes:
        megabytes: maximum file size.
        megapixels: maximum number of pixels according to the header; larger pictures are not decoded.

    Raises:
        ValueError: a limit is not positive.
    """

    megabytes: float = 20.0
    megapixels: float = 40.0

    def __post_init__(self) -> None:
        for name in ("megabytes", "megapixels"):
            if getattr(self, name) <= 0:
                raise InputError(f"max_{name} must be > 0, got {getattr(self, name)}")

    @property
    def bytes(self) -> int:
        """Maximum file size in bytes."""
        return round(1e6 * self.megabytes)

    @property
    def pixels(self) -> int:
        """Maximum number of pixels."""
        return round(1e6 * self.megapixels)

    def __str__(self) -> str:
        return f"up to {self.megabytes:g} MB and {self.megapixels:g} megapixels"
