"""Incremental indexing of a folder of images into a database of objects."""

import logging
import statistics
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cribo.apps.search.database import IndexedImage, ObjectDatabase, is_remote, new_entry
from cribo.apps.search.extractor import READ_AHEAD, Found, ObjectExtractor
from cribo.base.console import Progress
from cribo.base.errors import DataError, FolderError, TooManyPixels
from cribo.base.job import locked
from cribo.data.reading import FileState
from cribo.data.sources.collection import ImageCollection
from cribo.features.encoder import Encoder
from cribo.features.objects import ImageObject
from cribo.features.spread.engines import LocalEngine
from cribo.features.spread.parts import ImagePart, part_size
from cribo.features.spread.work import Engine
from cribo.features.stream import Streamed

log = logging.getLogger("cribo")

INDEX_LOCK = ".index.lock"

_MOST_IMAGES = 256  # limit per part; an interrupted part is indexed again
_COMMIT_SECONDS = 30.0
_PRUNED_SHARE = 0.05  # maximum share of the images to remove without --prune
_EXACT_SEARCHES = 3  # each reads all vectors


@dataclass
class IndexSummary:
    """Summary of an indexing run.

    Attributes:
        new: number of added images.
        changed: number of images whose content changed.
        unchanged: number of images that were already indexed.
        removed: number of images removed from the database because their files no longer exist.
        unreadable: (path, reason) of files that are not valid images; they are skipped until they change.
        unread: (path, reason) of files that could not be read; the next run tries them again.
        objects: number of objects of the new and changed images.
        seconds: duration from the first image to the last commit.
    """

    new: int = 0
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)
    objects: int = 0
    seconds: float = 0.0

    @property
    def images_per_second(self) -> float:
        """Number of new and changed images per second."""
        return (self.new + self.changed) / self.seconds if self.seconds else 0.0


def index_lock(uri: str) -> AbstractContextManager[object]:
    """Lock a database for one writer, until the end of a `with` statement.

    Object storage has no locks: users must run one writer at a time.

    Raises:
        FolderError: another process holds the lock, or the folder is not writable.
    """
    if is_remote(uri):
        return nullcontext()
    folder = Path(uri)
    advice = "use another --db"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(f"cannot write to {folder}: {error.strerror or error}; {advice}") from error
    return locked(folder, INDEX_LOCK, otherwise=advice)


def index_images(
    database: ObjectDatabase,
    encoder: Encoder,
    files: ImageCollection,
    *,
    prune: bool | None = None,
    batch_size: int = 16,
    workers: int | None = None,
    engine: Engine | None = None,
    progress: Progress | None = None,
) -> IndexSummary:
    """Update a database with the new, changed and removed images of a collection.

    Can be interrupted at any time: commits are kept, and the next call resumes. The caller must hold `index_lock`.

    Args:
        database: the database to update.
        encoder: the encoder with which the database was built; for an engine with other processes, that of a source,
            which they open on their own devices.
        files: all images that the database should contain.
        prune: remove images that are no longer among the files, and old versions of the database immediately; False
            keeps them. By default, up to 5 % of the images are removed, and old versions are kept for a week.
        batch_size: number of images of equal size to encode at once.
        workers: number of threads that read images. [half of the cores]
        engine: engine that spreads the work. [this process]
        progress: called with the progress.

    Raises:
        ConfigError: the database was built with another encoder.
        DataError: more than 5 % of the images are missing and `prune` is None; the database is not changed.
        OSError: the database is not writable, or the disk is full.
    """
    if encoder.is_open:
        database.require_encoder(encoder, "the one given")
    encoder.expect(database.info.identity)
    summary = IndexSummary()
    database.repair()
    work, gone = _compare(database, files, summary, progress)
    if gone and prune is not False:
        if prune is None:
            _require_few([image for image in gone if not image.error], database.count_images(), files)
        database.drop_images(gone)
        summary.removed = len(gone)
    started = time.perf_counter()
    extractor = ObjectExtractor(
        encoder, settings=database.info.settings, reading=files.reading, batch_size=batch_size, workers=workers
    )
    engine = engine or LocalEngine()
    # In this process, a small part loses less when it is interrupted, and costs little.
    size = READ_AHEAD * batch_size if isinstance(engine, LocalEngine) else part_size(len(work), most=_MOST_IMAGES)
    parts = [
        _Part(
            files.part([one.place for one in several]),
            ["" if one.before is None else one.before.sha256 for one in several],
            work=several,
        )
        for several in (work[start : start + size] for start in range(0, len(work), size))
    ]
    commits = _Commits(database, summary)
    done = 0
    try:
        with closing(engine.run(_IndexParts(extractor, database), parts)) as results:
            for part in results:
                commits.add(part)
                done += part.images
                if progress is not None:
                    progress("objects", done, len(work))
    finally:  # also what was done before an interruption
        commits.write()
    if work or gone:
        database.compact(drop_versions=bool(prune))
    summary.seconds = time.perf_counter() - started
    return summary


def _require_few(gone: Sequence[IndexedImage], images: int, files: ImageCollection) -> None:
    """Raise DataError if many images are missing, for example because a folder is not mounted."""
    if len(gone) > _PRUNED_SHARE * images:
        raise DataError(
            f"indexed images that are no longer in the collection: {len(gone)} of {images}, such as {gone[0].path}, "
            f"more than the limit of {_PRUNED_SHARE:.0%}. Check whether a folder is missing; remove these images from "
            "the database with --prune, or keep them with --prune false"
        )


class _Work(NamedTuple):
    """A new or changed image, by its place in the collection, and its previous row, if any."""

    place: int
    path: str
    state: FileState
    before: IndexedImage | None


def _compare(
    database: ObjectDatabase, files: ImageCollection, summary: IndexSummary, progress: Progress | None
) -> tuple[list[_Work], list[IndexedImage]]:
    """Return new and changed images, by size and modification time, and indexed ones that are not in the collection."""
    before = {image.path: image for image in database.images()}
    work: list[_Work] = []
    seen: set[str] = set()
    for index in range(len(files)):
        path = files.name(index)
        if path in seen:  # a list may name an image twice
            continue
        seen.add(path)
        row = before.pop(path, None)
        try:
            state = files.state(index)
        except OSError as error:
            summary.unread.append((path, error.strerror or str(error)))
            continue
        if row is not None and (row.size_bytes, row.mtime_ns) == state:
            _count_unchanged(row, summary)
        else:
            work.append(_Work(index, path, state, row))
        if progress is not None:
            progress("files compared", index + 1, len(files))
    return work, list(before.values())


@dataclass(frozen=True, kw_only=True)
class _Part(ImagePart):
    """A part of the collection, with the work on each of its images."""

    work: list[_Work]


class _IndexedPart(NamedTuple):
    """Result of a part: its objects, written but not committed, and the rows of its images.

    Attributes:
        fragments: written objects, as `ObjectWriter.write` returns them.
        rows: rows of the images, without those of `unread`.
        before: previous rows of the images that have one.
        unread: (path, reason) of images that could not be read.
        images: number of images.
    """

    fragments: list[str]
    rows: list[IndexedImage]
    before: dict[str, IndexedImage]
    unread: list[tuple[str, str]]
    images: int


class _IndexParts:
    """Extracts the objects of each part and writes them to files of the database; run by an engine."""

    def __init__(self, extractor: ObjectExtractor, database: ObjectDatabase) -> None:
        self.extractor, self.writer = extractor, database.writer()

    def __call__(self, parts: Iterable[_Part]) -> Generator[_IndexedPart, None, None]:
        with closing(self.extractor.stream(parts)) as extracted:
            for part, images in extracted:
                yield self._written(part, images)

    def _written(self, part: _Part, images: Iterable[Streamed[Found]]) -> _IndexedPart:
        rows: list[IndexedImage] = []
        objects: list[tuple[IndexedImage, Sequence[ImageObject]]] = []
        unread: list[tuple[str, str]] = []
        for work, image in zip(part.work, images, strict=True):
            # Images with too many pixels are tried again: the user can raise the limit.
            if isinstance(image.error, OSError | TooManyPixels):
                unread.append((image.name, image.reason))
            elif image.unchanged and work.before is not None:  # its objects are kept
                rows.append(work.before._replace(size_bytes=work.state.size_bytes, mtime_ns=work.state.mtime_ns))
            else:
                size, found = image.result or Found((0, 0), ())
                file = (work.path, new_entry(), work.state.size_bytes, work.state.mtime_ns, image.sha256)
                rows.append(IndexedImage(*file, *size, len(found), image.reason))
                objects.append((rows[-1], found))
        return _IndexedPart(
            self.writer.write(objects),
            rows,
            {work.path: work.before for work in part.work if work.before is not None},
            unread,
            len(part),
        )


class _Commits:
    """Collects results of parts and commits them periodically, since each commit writes a manifest of all files."""

    def __init__(self, database: ObjectDatabase, summary: IndexSummary) -> None:
        self.database, self.summary = database, summary
        self._parts: list[_IndexedPart] = []
        self._written = time.perf_counter()

    def add(self, part: _IndexedPart) -> None:
        """Add the result of a part, and count its images."""
        self._parts.append(part)
        summary = self.summary
        summary.unread += part.unread
        for row in part.rows:
            before = part.before.get(row.path)
            if before is not None and before.entry == row.entry:
                _count_unchanged(row, summary)
            elif row.error:
                summary.unreadable.append((row.path, row.error))
            elif before is None:
                summary.new += 1
            else:
                summary.changed += 1
            summary.objects += row.objects if before is None or before.entry != row.entry else 0
        if time.perf_counter() - self._written >= _COMMIT_SECONDS:
            self.write()

    def write(self) -> None:
        """Commit what was collected."""
        rows = [row for part in self._parts for row in part.rows]
        before = {path: row for part in self._parts for path, row in part.before.items()}
        if rows:
            replaced = [before[row.path].entry for row in rows if row.path in before]
            kept = {row.entry for row in rows}
            fragments = [fragment for part in self._parts for fragment in part.fragments]
            self.database.commit(fragments, rows, replaced=[entry for entry in replaced if entry not in kept])
        self._parts = []
        self._written = time.perf_counter()


def _count_unchanged(image: IndexedImage, summary: IndexSummary) -> None:
    """Count an image whose content is as indexed, as unchanged or unreadable."""
    if image.error:
        summary.unreadable.append((image.path, image.error))
    else:
        summary.unchanged += 1


@dataclass(frozen=True)
class IndexQuality:
    """Recall and speed of a vector index, measured by searches for objects without those of the same image.

    Attributes:
        recall: mean share of the k nearest objects that are found.
        k: number of neighbours.
        queries: number of searches.
        milliseconds: median duration of a search with the index, when its parts are in memory.
        exact_milliseconds: median duration of a search that compares every object.
    """

    recall: float
    k: int
    queries: int
    milliseconds: float
    exact_milliseconds: float

    @property
    def text(self) -> str:
        """Recall and speed, as text."""
        return (
            f"the vector index finds {self.recall:.1%} of the {self.k} nearest objects in {self.milliseconds:.0f} ms; "
            f"exact search takes {self.exact_milliseconds:.0f} ms"
        )


def index_vectors(
    database: ObjectDatabase,
    *,
    least: int = 100_000,
    queries: int = 100,
    k: int = 10,
    progress: Progress | None = None,
) -> IndexQuality | None:
    """Build the vector index of a large database if it has none, and measure it.

    The queries are stored objects, without the objects of their image among the results. Unlike new objects, they have
    influenced the centres of the index.

    Args:
        database: the database; `compact` adds new objects to an existing index.
        least: minimum number of objects for an index; below it, exact search takes tens of milliseconds.
        queries: maximum number of searches.
        k: number of neighbours of each.
        progress: called with the progress.

    Returns:
        None without an index. A neighbour as similar as the last exact one, up to rounding, counts as found.
    """
    if database.num_rows < least:
        return None
    if not database.has_index():
        log.info("building the vector index of %d objects", database.num_rows)
        database.build_index(progress)
    images, rows = zip(*database.sample_objects(queries), strict=True)
    vectors = np.stack(rows)
    last = database.kth_similarities(vectors, k, exclude=[image.entry for image in images])

    def search(number: int, *, exact: bool = False) -> tuple[float, list[float]]:
        begun = time.perf_counter()
        [found] = database.search(vectors[number, None], k, exclude_image=images[number].path, exact=exact)
        return 1000 * (time.perf_counter() - begun), [one.similarity for one in found]

    search(0)  # loads the index
    times, found = zip(*(search(number) for number in range(len(images))), strict=True)
    exact = [search(number, exact=True)[0] for number in range(min(_EXACT_SEARCHES, len(images)))]
    shares = [sum(one >= similar - 1e-6 for one in several) / k for several, similar in zip(found, last, strict=True)]
    return IndexQuality(
        float(statistics.mean(shares)), k, len(images), statistics.median(times), statistics.median(exact)
    )
