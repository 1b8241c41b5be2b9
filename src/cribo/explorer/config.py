"""Contents of a page, and limits of uploads; does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cribo.base.bounds import above, at_least, check_bounds
from cribo.base.errors import ConfigError
from cribo.data.config import DEFAULT_READING, Reading
from cribo.features.config import BackboneSource


@dataclass(frozen=True)
class ExploreConfig:
    """Contents of the page of `cribo explore`.

    Attributes:
        run: a run folder of cribo pretrain; the run may still be in progress.
        db: a database of objects of cribo index: a folder or URL.
        backbone: network of the features. [that of the database or run]
        images: the images: a folder, or for a run also a list of images, tar shards or a URL. Required with a run of
            images other than synthetic scenes: the folder that a run names is never opened. [that of the database]
        trust: use the custom code that the run, database or weights name, and open the addresses in the database. Only
            for files from sources that you trust.
        limit: number of images whose objects are found at start-up, without a database; 0 for none.
        examples: folder of examples for `cribo segment`, created if needed: what is painted on the page is added to
            those that it contains.
        reading: how the images of the collection are read.
        device: such as cuda:0 or cpu. [the first GPU, else the CPU]

    Raises:
        ConfigError: neither `run`, `db` nor `backbone` is given, or a value is out of range.
    """

    run: Path | None = None
    db: str | None = None
    backbone: BackboneSource | None = None
    images: str | Path | None = None
    trust: bool = False
    limit: Annotated[int, at_least(0)] = 100
    examples: Path | None = None
    reading: Reading = DEFAULT_READING
    device: str | None = None

    def __post_init__(self) -> None:
        if self.run is None and self.db is None and self.backbone is None:
            raise ConfigError("--run DIR, --db DIR or --backbone SOURCE is required")
        check_bounds(self)


@dataclass(frozen=True)
class Limits:
    """Limits of uploaded pictures.

    Attributes:
        max_megabytes: size limit of an uploaded picture.
        max_megapixels: pixel limit of an uploaded picture, by its header; larger ones are not decoded.

    Raises:
        ConfigError: a value is out of range.
    """

    max_megabytes: Annotated[float, above(0)] = 20.0
    max_megapixels: Annotated[float, above(0)] = 40.0

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def bytes(self) -> int:
        """Maximum file size in bytes."""
        return round(1e6 * self.max_megabytes)

    @property
    def pixels(self) -> int:
        """Maximum number of pixels."""
        return round(1e6 * self.max_megapixels)

    def __str__(self) -> str:
        return f"up to {self.max_megabytes:g} MB and {self.max_megapixels:g} megapixels"
