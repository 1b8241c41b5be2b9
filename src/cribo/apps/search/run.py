"""Implementation of `cribo index`."""

import dataclasses
import logging
import os
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from cribo.apps.search.config import IndexConfig
from cribo.apps.search.database import DatabaseInfo, ObjectDatabase, as_uri, holds_database, is_remote, require_free
from cribo.apps.search.indexing import IndexQuality, IndexSummary, index_images, index_lock, index_vectors
from cribo.base.console import Phases
from cribo.base.errors import ConfigError, if_interrupted
from cribo.base.packages import require_packages
from cribo.base.redaction import masked
from cribo.base.trust import check_address
from cribo.data.config import Reading
from cribo.data.sources.collection import ImageCollection, names_hash, open_collection, without_repeats
from cribo.data.sources.images import ImageFiles, collection_name, is_url, require_readable
from cribo.features.config import BackboneSource, ObjectSettings
from cribo.features.encoder import Encoder
from cribo.features.reading import completed_for
from cribo.features.spread.engines import open_engine

log = logging.getLogger("cribo")


class Indexed(NamedTuple):
    """Result of `index_collection`, with the measurement of its vector index, if any."""

    summary: IndexSummary
    database: ObjectDatabase
    quality: IndexQuality | None


def index_collection(config: IndexConfig, *, console: Console | None = None) -> Indexed:
    """Create or update a database of the objects in a collection of images.

    Can be interrupted at any time; the next call resumes.

    Raises:
        ValueError: backbone, images, settings or database are invalid, or no image can be read; raised before any
            computation.
        FileNotFoundError: the images or a file of the backbone do not exist.
        ConnectionError: timm's weights, or the object storage, cannot be reached.
        ImportError: Lance is not installed.
        OSError: the database is not writable.
    """
    require_packages("object search", "lance", extra="search")
    console = console or Console(quiet=True)
    place = as_uri(config.db or _default_database(config))
    opened = ObjectDatabase.open(place) if holds_database(place) else None
    known = None if opened is None else opened.info
    reading = completed_for(config.backbone, config.reading) if opened is None else opened.reading(config.reading)
    images, source = _open_images(config, known, reading)
    own = images.part(config.share.of(range(len(images))))
    settings = config.settings(ObjectSettings() if known is None else known.settings)
    backbone = config.backbone or _known_backbone(known, trust=config.trust)
    if known is None:
        require_free(place)
    else:
        _require_same_images(known, images, source, place, config)
        config = dataclasses.replace(config, blocks=config.blocks or known.blocks)
    encoder = Encoder(backbone, blocks=config.blocks, device=config.device, in_chans=reading.in_chans)
    # Workers open the backbone on their own devices; here it is only described.
    described = (encoder if config.engine == "local" else encoder.on("cpu")).open()
    of_images = {
        "root": _root(images, source),
        "images": source,
        "files": isinstance(images, ImageFiles),
        "column": config.column or (None if known is None else known.column),
        "part": str(config.share),
        "collection": names_hash(images),
        "pixels": reading.given,
    }
    kept = "indexed images are kept; to continue, repeat the command"
    shared_folder = None if is_remote(place) else Path(place)
    with (
        if_interrupted(lambda: kept),
        open_engine(config, writes_to=shared_folder) as engine,
        index_lock(place),
        Phases(console) as progress,
    ):
        if known is None:
            info = DatabaseInfo.of(described, backbone, settings, source, blocks=config.blocks)
            database = ObjectDatabase.create(place, dataclasses.replace(info, **of_images))
        else:
            database = ObjectDatabase.open(place)
            database.require_encoder(described, described.about["name"])
            database.require_settings(settings)
            if any(getattr(known, name) != masked(value) for name, value in of_images.items()):
                database.describe(**of_images, unread=None)
        summary = index_images(
            database,
            encoder,
            own,
            prune=config.prune,
            batch_size=config.batch_size,
            workers=config.workers,
            engine=engine,
            progress=progress,
        )
        # Measuring the vector index reads all vectors several times.
        changed = summary.new + summary.changed + summary.removed > 0 or not database.has_index()
        indexed = Indexed(summary, database, index_vectors(database, progress=progress) if changed else None)
        unread = len(summary.unread), summary.unread[0][0] if summary.unread else ""
        if database.info.unread != unread:
            database.describe(unread=unread)
        return indexed


def _default_database(config: IndexConfig) -> str:
    """Return where the database of a collection is without --db."""
    assert config.images is not None  # checked by the constructor of `config`
    return f"objects/{collection_name(config.images)}{config.share.suffix}.lance"


def _open_images(config: IndexConfig, known: DatabaseInfo | None, reading: Reading) -> tuple[ImageCollection, str]:
    """Return the images, and the absolute path of their folder or list, or their URL."""
    source = config.images or (None if known is None else known.images or known.root)
    if source is None:
        raise ConfigError(f"IMAGES is required to create the database {config.db}")
    if config.images is None:
        check_address(source, config.db, "--images", trust=config.trust)
    column = config.column or (None if known is None else known.column)
    images = open_collection(source, column=column, reading=reading)
    require_readable(images, source, windows=True)
    images = without_repeats(images)  # otherwise an image could be in two shares
    return images, source if is_url(source) else _absolute(Path(source).expanduser())


def _known_backbone(known: DatabaseInfo | None, *, trust: bool) -> BackboneSource:
    if known is None:
        raise ConfigError("--backbone is required to create a database")
    return known.backbone_source(trust=trust)


def _require_same_images(
    known: DatabaseInfo, images: ImageCollection, source: str, place: str, config: IndexConfig
) -> None:
    """Raise ConfigError for another collection, or another share of it: indexing it would remove all other images."""
    before, now = masked((known.images or known.root, known.root)), masked((source, _root(images, source)))
    if now != before and not config.moved:
        raise ConfigError(
            f"{place} is a database of the images of {before[0]}, not of {source}: add --moved if the same images were "
            "moved there, --moved --prune to also remove missing images from the database, or use another --db"
        )
    if known.part != str(config.share):
        raise ConfigError(
            f"{place} contains part {known.part} of the images, not {config.share}: use another --db for each part"
        )


def _root(images: ImageCollection, source: str) -> str:
    return _absolute(images.folder) if isinstance(images, ImageFiles) else source


def _absolute(path: str | os.PathLike[str]) -> str:
    """Return the absolute path without `..`, so that equal paths compare equal."""
    return os.path.abspath(path)  # noqa: PTH100 (Path.absolute keeps `..`)
