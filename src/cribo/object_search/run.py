"""Implementation of `cribo index`."""

import dataclasses
import logging
import os
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from cribo.arguments import ConfigError
from cribo.console import Phases
from cribo.data import ImageFiles, open_images
from cribo.data.images import require_readable
from cribo.data.limits import MAX_PIXELS
from cribo.devices import resolve_device
from cribo.errors import if_interrupted
from cribo.object_search.config import IndexConfig
from cribo.object_search.database import (
    DatabaseInfo,
    ObjectDatabase,
    as_uri,
    holds_database,
    require_free,
)
from cribo.object_search.indexing import IndexQuality, IndexSummary, index_images, index_lock, index_vectors
from cribo.retrieval.encoders import open_encoder
from cribo.retrieval.object_settings import ObjectSettings
from cribo.retrieval.source import BackboneSource

log = logging.getLogger("cribo")

_MOST_WORKERS = 16


class Indexed(NamedTuple):
    """Result of `index_collection`, with the measurement of its vector index, if any."""

    summary: IndexSummary
    database: ObjectDatabase
    quality: IndexQuality | None


def index_collection(config: IndexConfig, *, console: Console | None = None) -> Indexed:
    """Create a database of the objects in a folder of images, or update an existing one.

    Can be interrupted at any time; the next call resumes.

    Raises:
        ValueError: backbone, images, settings or database are invalid, or no image can be read; raised before any
            computation.
        FileNotFoundError: the images or a file of the backbone do not exist.
        ConnectionError: timm's weights, or the object storage, cannot be reached.
        ImportError: Lance is not installed.
        OSError: the database is not writable.
    """
    console = console or Console(quiet=True)
    place = as_uri(config.db)
    known = ObjectDatabase.open(place).info if holds_database(place) else None
    files, source = _open_files(config, known)
    settings = config.settings(ObjectSettings() if known is None else known.settings)
    backbone = config.backbone or _known_backbone(known)
    if known is None:
        require_free(place)
    else:
        _require_same_images(known, files, source, place, moved=config.moved)
        config = dataclasses.replace(config, blocks=config.blocks or known.blocks)
    device = resolve_device(config.device)
    encoder, about = open_encoder(backbone, device, blocks=config.blocks)
    kept = "indexed images are kept; to continue, repeat the command"
    with if_interrupted(lambda: kept), index_lock(place), Phases(console) as progress:
        if known is None:
            info = DatabaseInfo.of(
                encoder, device, about, backbone, settings, _root(files), images=source, blocks=config.blocks
            )
            database = ObjectDatabase.create(place, info)
        else:
            database = ObjectDatabase.open(place)
            database.require_encoder(encoder, about["name"])
            database.require_settings(settings)
            if (_root(files), source) != (known.root, known.images):
                database.move(_root(files), source)
        summary = index_images(
            database,
            encoder,
            files,
            prune=config.prune,
            device=device,
            batch_size=config.batch_size,
            workers=min(os.cpu_count() or 1, _MOST_WORKERS) if config.workers is None else config.workers,
            progress=progress,
        )
        return Indexed(summary, database, index_vectors(database, progress=progress))


def _open_files(config: IndexConfig, known: DatabaseInfo | None) -> tuple[ImageFiles, str]:
    """Return the images and the absolute path of their folder or list."""
    source = config.images or (None if known is None else known.images or known.root)
    if source is None:
        raise ConfigError(f"--images is required to create the database {config.db}")
    files = open_images(source, max_pixels=config.max_pixels or MAX_PIXELS)
    require_readable(files, source)
    return files, _absolute(Path(source).expanduser())


def _known_backbone(known: DatabaseInfo | None) -> BackboneSource:
    if known is None:
        raise ConfigError("--backbone is required to create a database")
    return known.backbone_config


def _require_same_images(known: DatabaseInfo, files: ImageFiles, source: str, place: str, *, moved: bool) -> None:
    """Raise ConfigError for another collection: indexing it would remove all other images."""
    before, now = (known.images or known.root, known.root), (source, _root(files))
    if now != before and not moved:
        raise ConfigError(
            f"{place} is a database of the images of {before[0]}, not of {source}: add --moved if the same images were "
            "moved there, --moved --prune to also remove missing images from the database, or use another --db"
        )


def _root(files: ImageFiles) -> str:
    return _absolute(files.folder)


def _absolute(path: str | os.PathLike[str]) -> str:
    """Return the absolute path without `..`, so that equal paths compare equal."""
    return os.path.abspath(path)  # noqa: PTH100 (Path.absolute keeps `..`)
