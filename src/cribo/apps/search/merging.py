"""Implementation of `cribo merge` for databases: join those that `cribo index` built of the shares of a collection."""

import dataclasses
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from cribo.apps.search.database import DatabaseInfo, ObjectDatabase, as_uri, holds_database, is_remote
from cribo.apps.search.indexing import IndexQuality, index_vectors
from cribo.base.console import Phases
from cribo.base.errors import DatabaseError
from cribo.base.files import require, write_folder_whole
from cribo.base.job import describe_changes, require_writable, result_kind
from cribo.base.shares import Share, order_shares, require_mergeable
from cribo.base.wording import command_line, counted

log = logging.getLogger("cribo")


class MergedDatabase(NamedTuple):
    """Result of `merge_databases`.

    Attributes:
        database: the new database.
        unreadable: number of images that are not valid images.
        unread: number of images that are missing, because they could not be read, and the name of the first.
        quality: measurement of the vector index, if any.
    """

    database: ObjectDatabase
    unreadable: int
    unread: tuple[int, str]
    quality: IndexQuality | None


def merge_databases(
    parts: Sequence[str | os.PathLike[str]], *, out: str | os.PathLike[str], console: Console | None = None
) -> MergedDatabase:
    """Join the databases of all shares of a collection into one, as if one command had indexed all images.

    Objects are copied, in bounded memory; nothing is extracted again. The database appears at `out` once it is
    complete: an interrupted command leaves nothing in a folder, and tables without a description at a URL.

    Args:
        parts: databases of `index_collection` with `part` 1/n to n/n, in any order: folders or URLs.
        out: the new database: a folder or a URL.
        console: console for progress.

    Raises:
        ValueError: shares are missing, repeated, not finished, damaged, or of different options or images, or `out`
            already exists; raised before anything is written.
        FileNotFoundError: a folder does not exist.
        ConnectionError: the object storage cannot be reached.
        ImportError: Lance is not installed.
        OSError: the database cannot be written.

    >>> merge_databases(["part-1.db", "part-2.db"], out="s3://bucket/all")  # doctest: +SKIP
    """
    place = as_uri(out)
    _require_new(place)
    places = [as_uri(part) for part in parts]
    databases = [_open(part) for part in places]
    infos = [database.info for database in databases]
    for part, info in zip(places, infos, strict=True):
        require_mergeable(places[0], part, [*_changes(infos[0], info)])
    order = order_shares(places, [info.part for info in infos])
    databases = [databases[index] for index in order]
    for database in databases:
        _require_complete(database)
    unreadable = _check_images(databases)
    unread = [database.info.unread or (0, "") for database in databases]
    missing = sum(number for number, _ in unread), next((name for number, name in unread if number), "")
    whole = dataclasses.replace(databases[0].info, part=str(Share()), unread=missing)
    quality: list[IndexQuality | None] = []
    with Phases(console or Console(quiet=True)) as progress:

        def fill(database: ObjectDatabase) -> None:
            database.add_all(databases, progress)
            database.compact()
            quality.append(index_vectors(database, progress=progress))

        if is_remote(place):
            ObjectDatabase.create(place, whole, fill)
        else:
            write_folder_whole(Path(place), lambda folder: ObjectDatabase.create(folder, whole, fill))
    return MergedDatabase(ObjectDatabase.open(place), unreadable, missing, quality[0])


def _require_new(place: str) -> None:
    """Raise DatabaseError if a folder or URL is not free for a new database."""
    if is_remote(place):
        if holds_database(place):
            raise DatabaseError(f"{place} already contains a database: choose another --out")
        return
    path = Path(place)
    require_writable(path)
    if path.is_dir() and any(path.iterdir()):
        raise DatabaseError(f"{place} already exists: choose another --out, or delete it")


def _open(place: str) -> ObjectDatabase:
    """Open the database of a share; raises DatabaseError if there is none."""
    if not is_remote(place):
        require(Path(place))
    if not holds_database(place):
        kind = None if is_remote(place) else result_kind(Path(place))
        contains = "no database of objects" if kind is None else f"{kind} results, not a database of objects"
        raise DatabaseError(f"{place} contains {contains}: give results of one kind")
    return ObjectDatabase.open(place)


def _changes(before: DatabaseInfo, now: DatabaseInfo) -> Iterator[str]:
    """Yield the differences between two databases: backbone, settings or images."""

    def options(info: DatabaseInfo) -> dict[str, Any]:
        blocks = "the last" if info.blocks is None else ",".join(map(str, info.blocks))
        backbone = f"{info.backbone_name} ({info.config['source']}, {info.identity[:12]}, blocks: {blocks})"
        settings = dataclasses.asdict(info.settings)
        return {
            "backbone": backbone,
            **settings,
            "images": info.images or info.root,
            "column": info.column,
            **info.pixels,
        }

    if before.identity == now.identity:  # it may be at another place
        now = dataclasses.replace(now, backbone=before.backbone, config=before.config, blocks=before.blocks)
    changes = [*describe_changes(options(before), options(now))]
    if not changes and before.collection != now.collection:
        number, other = (info.collection.partition(" ")[0] or "an unknown number of" for info in (before, now))
        changes = [f"images were added, removed or renamed: the collection had {number} images, has {other}"]
    yield from changes


def _require_complete(database: ObjectDatabase) -> None:
    """Raise DatabaseError if images of the share are not indexed."""
    info = database.info
    again = f"repeat {command_line('cribo', 'index', '--db', database.uri, '--part', info.part)}"
    if info.unread is None:
        raise DatabaseError(f"{database.uri} is not finished: {again}")
    expected = len(Share.parse(info.part).of(range(int(info.collection.partition(" ")[0]))))
    found = database.count_images(unreadable=True)
    if found + info.unread[0] < expected:
        raise DatabaseError(f"{database.uri} lacks {expected - found} of its {counted(expected, 'image')}: {again}")


def _check_images(databases: Sequence[ObjectDatabase]) -> int:
    """Return the number of unreadable images; raises DatabaseError for an image in two databases."""
    import pyarrow as pa

    paths = [database.paths() for database in databases]
    every = pa.chunked_array([chunk for several in paths for chunk in several.chunks], pa.string())
    if len(every.unique()) < len(every):
        first: dict[str, str] = {}
        for database, several in zip(databases, paths, strict=True):
            for path in several.to_pylist():
                if path in first:
                    raise DatabaseError(
                        f"the image {path} is in {first[path]} and in {database.uri}: remove images of earlier calls "
                        "with cribo index --db DATABASE --part PART --prune"
                    )
                first[path] = database.uri
    return len(every) - sum(database.count_images() for database in databases)
