"""Incremental indexing of a folder of images into a database of objects."""

import hashlib
import logging
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from filelock import FileLock, Timeout

from cribo.console import Progress
from cribo.data.images import DataError, ImageFiles
from cribo.data.reading import EncodedImage, TooManyPixels, UnreadableImage
from cribo.files import FolderError
from cribo.object_search.database import IndexedImage, ObjectDatabase, is_remote, new_entry
from cribo.prefetching import prefetch
from cribo.retrieval.encoders import PatchEncoder, batches_by_size
from cribo.retrieval.object_extraction import ImageObjects, PreparedImage, extract_prepared, read_prepared
from cribo.retrieval.object_settings import ObjectSettings
from cribo.retrieval.objects import ImageObject

log = logging.getLogger("cribo")

INDEX_LOCK = ".index.lock"

_COMMIT_IMAGES = 256  # per commit: each commit creates a file and a manifest of all files
_COMMIT_SECONDS = 30.0
_PRUNED_SHARE = 0.05  # maximum share of the images to remove without --prune
_EXACT_SEARCHES = 3  # each reads all vectors
_READ_AHEAD = 4  # batches; images of equal size among them are encoded together


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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The operating system releases the lock when the process ends, even if it is killed.
        return FileLock(folder / INDEX_LOCK).acquire(timeout=0)
    except Timeout as error:
        raise FolderError(
            f"another cribo index is writing to {folder}: wait until it has finished, stop it, or use another --db"
        ) from error
    except OSError as error:
        raise FolderError(f"cannot write to {folder}: {error.strerror or error}; use another --db") from error


def index_images(
    database: ObjectDatabase,
    encoder: PatchEncoder,
    files: ImageFiles,
    *,
    prune: bool | None = None,
    device: torch.device | str = "cpu",
    batch_size: int = 16,
    workers: int = 2,
    progress: Progress | None = None,
) -> IndexSummary:
    """Update a database with the new, changed and removed images of a folder.

    Can be interrupted at any time: commits are kept, and the next call resumes. The caller must hold `index_lock`.

    Args:
        database: the database to update.
        encoder: the encoder with which the database was built, on `device`.
        files: all images that the database should contain.
        prune: remove images that are no longer among the files, and old versions of the database immediately; False
            keeps them. By default, up to 5 % of the images are removed, and old versions are kept for a week.
        device: device of the encoder.
        batch_size: number of images of equal size to encode at once.
        workers: number of threads that read images; 0 counts as 1.
        progress: called with the progress.

    Raises:
        ConfigError: the database was built with another encoder.
        DataError: more than 5 % of the images are missing and `prune` is None; the database is not changed.
        OSError: the database is not writable, or the disk is full.
    """
    database.require_encoder(encoder, "the one given")
    summary = IndexSummary()
    database.repair()
    work, gone = _compare(database, files, summary, progress)
    if gone and prune is not False:
        if prune is None:
            _require_few([image for image in gone if not image.error], database.count_images(), files)
        database.drop_images(gone)
        summary.removed = len(gone)
    started = time.perf_counter()
    writer = _Writer(database, summary)
    settings = database.info.settings
    # Threads, because decoding and resizing release the GIL and Lance is not fork-safe.
    reads = prefetch(
        lambda one: _read(one, files, encoder, settings),
        work,
        threads=max(1, workers),
        ahead=_READ_AHEAD * batch_size,
        nbytes=lambda _, read: None if read is None else getattr(read.prepared, "nbytes", 0),
    )
    done = 0
    while several := list(islice(reads, _READ_AHEAD * batch_size)):
        for batch in batches_by_size(several, lambda read: read.size, lambda _: batch_size):
            own = [several[number] for number in batch]
            prepared = [read.prepared for read in own if read.prepared is not None]
            found = extract_prepared(encoder, prepared, settings, device=device) or [None] * len(own)
            for read, objects in zip(own, found, strict=True):
                writer.take(read, objects)
            done += len(own)
            if progress is not None:
                progress("objects", done, len(work))
    writer.commit()
    if work or gone:
        database.compact(drop_versions=bool(prune))
    summary.seconds = time.perf_counter() - started
    return summary


def _require_few(gone: Sequence[IndexedImage], images: int, files: ImageFiles) -> None:
    """Raise DataError if many images are missing, for example because a folder is not mounted."""
    if len(gone) > _PRUNED_SHARE * images:
        raise DataError(
            f"indexed images that are no longer in {files.folder}: {len(gone)} of {images}, such as {gone[0].path}, "
            f"more than the limit of {_PRUNED_SHARE:.0%}. Check whether a folder is missing; remove these images from "
            "the database with --prune, or keep them with --prune false"
        )


class _Work(NamedTuple):
    """A new or changed file and its previous row, if any."""

    path: str
    size_bytes: int
    mtime_ns: int
    before: IndexedImage | None


def _compare(
    database: ObjectDatabase, files: ImageFiles, summary: IndexSummary, progress: Progress | None
) -> tuple[list[_Work], list[IndexedImage]]:
    """Return new and changed files, by size and modification time, and images without files."""
    before = {image.path: image for image in database.images()}
    work: list[_Work] = []
    seen: set[str] = set()
    for index in range(len(files)):
        path = files.name(index)
        if path in seen:  # a list may name an image twice
            continue
        seen.add(path)
        known = before.pop(path, None)
        try:
            path.encode()
            status = Path(files.path(index)).stat()
        except UnicodeEncodeError:
            summary.unread.append((path, "its name is not valid UTF-8: rename it"))
            continue
        except OSError as error:
            summary.unread.append((path, error.strerror or str(error)))
            continue
        if known is not None and (known.size_bytes, known.mtime_ns) == (status.st_size, status.st_mtime_ns):
            _count_unchanged(known, summary)
        else:
            work.append(_Work(path, status.st_size, status.st_mtime_ns, known))
        if progress is not None:
            progress("files compared", index + 1, len(files))
    return work, list(before.values())


class _Read(NamedTuple):
    """Result of reading a file: an image or an error."""

    work: _Work
    sha256: str
    prepared: PreparedImage | None = None
    error: str = ""
    passing: bool = False
    """Whether the error is temporary, so that the file is tried again by the next run."""

    @property
    def size(self) -> tuple[int, ...]:
        """Shape of the pixels; () without pixels."""
        return () if self.prepared is None else tuple(self.prepared.pixels.shape)


def _read(work: _Work, files: ImageFiles, encoder: PatchEncoder, settings: ObjectSettings) -> _Read:
    try:
        content = (Path(files.folder) / work.path).read_bytes()
    except OSError as error:
        return _Read(work, "", error=error.strerror or str(error), passing=True)
    sha256 = hashlib.sha256(content).hexdigest()
    if work.before is not None and work.before.sha256 == sha256:
        return _Read(work, sha256)
    try:
        prepared = read_prepared(EncodedImage(work.path, content), encoder, settings, max_pixels=files.max_pixels)
    except UnreadableImage as error:
        # Images with too many pixels are tried again: the user can raise the limit.
        return _Read(work, sha256, error=error.reason, passing=isinstance(error, TooManyPixels))
    return _Read(work, sha256, prepared=prepared)


class _Writer:
    """Collects indexed images and commits them periodically."""

    def __init__(self, database: ObjectDatabase, summary: IndexSummary) -> None:
        self.database = database
        self.summary = summary
        self._images: list[tuple[IndexedImage, Sequence[ImageObject]]] = []
        self._replaced: list[int] = []
        self._written = time.perf_counter()

    def take(self, read: _Read, found: ImageObjects | None) -> None:
        """Add an image with its objects, or its error."""
        work, before, summary = read.work, read.work.before, self.summary
        if read.passing:
            summary.unread.append((work.path, read.error))
            return
        if before is not None and read.sha256 == before.sha256:  # the content is the same: its objects are kept
            self._images.append((before._replace(size_bytes=work.size_bytes, mtime_ns=work.mtime_ns), ()))
            _count_unchanged(before, summary)
        else:
            height, width, objects = (0, 0, ()) if found is None else (found.height, found.width, found.objects)
            file = (work.path, new_entry(), work.size_bytes, work.mtime_ns, read.sha256)
            self._images.append((IndexedImage(*file, height, width, len(objects), read.error), objects))
            summary.objects += len(objects)
            if read.error:
                summary.unreadable.append((work.path, read.error))
            elif before is None:
                summary.new += 1
            else:
                summary.changed += 1
            if before is not None:
                self._replaced.append(before.entry)
        if len(self._images) >= _COMMIT_IMAGES or time.perf_counter() - self._written >= _COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Write the collected images."""
        if self._images:
            self.database.put(self._images, replaced=self._replaced)
        self._images, self._replaced = [], []
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


def index_vectors(
    database: ObjectDatabase,
    *,
    least: int = 100_000,
    queries: int = 100,
    k: int = 10,
    progress: Progress | None = None,
) -> IndexQuality | None:
    """Build the vector index of a large database if it has none, and measure it.

    The queries are stored objects, but all objects of their image are left out: this is a search for objects that are
    not in the database, except that they took part in placing the centres of the index.

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
