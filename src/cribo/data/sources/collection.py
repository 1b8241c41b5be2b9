"""Collections of encoded images: files, members of tar shards, rows of Parquet files, objects below a URL."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, cast

import numpy as np

from cribo.base.errors import DataError, InputError, UnreadableImage
from cribo.base.files import path_inside, require
from cribo.base.redaction import is_masked, without_secrets
from cribo.base.wording import enumerated
from cribo.data.config import DEFAULT_READING, Reading, spread
from cribo.data.reading import EXTENSIONS, EncodedImage, FileState, ImageContent
from cribo.data.sources.images import (
    EncodedImages,
    ImageSource,
    ascending,
    has_images,
    is_url,
    list_directly,
    open_images,
    read_list,
)
from cribo.data.sources.parquet import PARQUET, open_parquet, open_row
from cribo.data.sources.remote import located, open_mixed_list, open_remote
from cribo.data.sources.shards import open_shards, read_member
from cribo.data.sources.storage import (
    CACHE_DIR,
    CACHE_GIB,
    SUFFIX,
    file_state,
    list_folder,
    read_file,
    require_answer,
)
from cribo.data.sources.tars import INDEX

Read = TypeVar("Read")

_STATE_READERS = 16  # for storage with a high latency
_STATE_BLOCK = 4096


class ImageCollection(ImageSource, Protocol):
    """Encoded images with names, which can be divided, pickled and opened in another process."""

    reading: Reading
    """Maximum number of pixels of an image; larger ones are unreadable."""

    def read(self, index: int) -> ImageContent:
        """Read the bytes of an image; a large file is opened where it is decoded.

        Raises:
            OSError: the file is missing or cannot be read; the error may be temporary.
            UnreadableImage: there are no bytes to read.
            ShardError: a shard cannot be read, or object storage failed repeatedly.
        """
        ...

    def state(self, index: int) -> FileState:
        """Return size and modification time, by which changes are detected; raises OSError if the file is missing."""
        ...

    def part(self, indices: Sequence[int]) -> ImageCollection:
        """Return the collection of some of the images, given ascending indices.

        Its pickle is small, and opening it lists no folders.
        """
        ...


def open_collection(
    root: str | os.PathLike[str],
    images: str = "",
    *,
    column: str | None = None,
    reading: Reading = DEFAULT_READING,
    inside: bool = False,
    cache_dir: str | os.PathLike[str] = CACHE_DIR,
    cache_gib: float = CACHE_GIB,
) -> ImageCollection:
    """Open a collection of images: files, a list, tar shards or Parquet files, local or below a URL.

    A folder is read as shards if it contains `INDEX`, or tar files and no image at any depth; as Parquet if it contains
    Parquet files and no image, or `column` is given; else as images. A URL that fsspec understands, such as
    s3://bucket/prefix, is read as shards or Parquet if such files are directly below it, else as images of any depth. A
    .txt list may contain paths and URLs.

    Args:
        root: a folder, a .txt, .tar or .parquet file, or a URL of a folder or a .parquet file.
        images: sub-folder of `root`.
        column: column of images in Parquet files (see `open_parquet`).
        reading: how images are read.
        inside: images must be inside the folder, or that of the list (see `open_images`).
        cache_dir: folder for shards downloaded from a URL.
        cache_gib: maximum total size of the shards in this folder, in GiB.

    Raises:
        DataError: there are no images, files are broken or of several kinds, or `column` does not exist.
        MissingData: a folder, a list, a listed file or a URL does not exist.
        ConnectionError: the storage of a URL does not answer.
        ShardError: the storage failed repeatedly.
        ImportError: pyarrow, or a package for the URL, is not installed.

    >>> open_collection("photographs"), open_collection("s3://pictures/street")  # doctest: +SKIP
    """
    place = _joined(root, images)
    kind = (_kind_of_url if is_url(place) else _kind_of_path)(place, column)
    if column is not None and kind != "parquet":
        raise DataError(f"column {column!r} requires Parquet files: {place} contains {kind}")
    if kind == "parquet":
        return open_parquet(place, column=column, reading=reading, inside=inside)
    if kind == "shards":
        return open_shards(place, reading=reading, cache_dir=cache_dir, cache_gib=cache_gib)
    if is_url(place):
        return open_remote(place, reading=reading)
    path = Path(place)
    if path.suffix.lower() == ".txt" and path.is_file():
        listed = read_list(path)
        if any(is_url(name) for _, name in listed):
            return open_mixed_list(path, listed, reading=reading, inside=inside)
    return open_images(root, images, reading=reading, inside=inside)


def _joined(root: str | os.PathLike[str], images: str) -> str:
    """Return the path or URL of a sub-folder."""
    if is_url(root):
        return f"{os.fspath(root).rstrip('/')}/{images}" if images else os.fspath(root)
    return str(Path(root).expanduser() / images)


def _kind_of_path(place: str, column: str | None) -> str:
    """Return the kind of a folder or file: images, shards or parquet; raises DataError for a mixed folder."""
    path = Path(place)
    require(path)
    if path.is_file():
        return {SUFFIX: "shards", PARQUET: "parquet"}.get(path.suffix.lower(), "images")
    if (path / INDEX).is_file():
        return "shards"
    parquet, tars = (list_directly(path, suffix) for suffix in (PARQUET, SUFFIX))
    # Parquet files beside images contain their metadata, unless a column is given.
    if not (parquet or tars) or (not (parquet and column) and has_images(path)):
        return "images"
    if parquet and tars:
        raise DataError(_mixed(path, parquet[0].name))
    return "parquet" if parquet else "shards"


def _kind_of_url(url: str, column: str | None) -> str:
    """Return the kind of the files directly below a URL; raises as `open_collection` does."""
    require_answer(url)
    suffix = posixpath.splitext(url)[1].lower()
    if suffix == PARQUET:
        return "parquet"
    files, _ = list_folder(url)
    if not files and suffix in (SUFFIX, ".txt", *EXTENSIONS):
        raise DataError(f"{url} is a file: give the URL of its folder, or a .txt list of URLs on this machine")
    parquet = [name for name in files if name.endswith(PARQUET)]
    tars = any(name.endswith(SUFFIX) for name in files)
    if parquet and tars:
        raise DataError(_mixed(url, parquet[0]))
    beside_images = not column and any(name.lower().endswith(EXTENSIONS) for name in files)
    return "parquet" if parquet and not beside_images else "shards" if tars else "images"


def _mixed(place: object, parquet: str) -> str:
    return f"{place} contains both Parquet and tar files: give the path of {parquet}, or of a folder of one kind"


# ------------------------------------------------------------------------------------------------------- batches


class RowImages(EncodedImages):
    """The images of a batch of rows, as an ImageCollection; created by `rows_of`."""

    def __init__(self, names: np.ndarray, contents: np.ndarray | None, *, reading: Reading = DEFAULT_READING) -> None:
        super().__init__(reading)
        self._names, self._contents = names, contents

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        """Return the name of an image, or "row INDEX" if it has none."""
        name = self._names[index]
        return name if isinstance(name, str) and name else f"row {index}"

    def read(self, index: int) -> EncodedImage:
        """Return the bytes of an image, or read it from its path or URL; raises as `ImageCollection.read` does."""
        name = self._names[index]
        if self._contents is not None:
            content = self._contents[index]
            if not isinstance(content, bytes | bytearray | memoryview) or not len(content):
                raise UnreadableImage(self.name(index), "the row has no bytes")
            return EncodedImage(self.name(index), bytes(content))
        if not isinstance(name, str) or not name:
            raise UnreadableImage(self.name(index), "the row has no path")
        return EncodedImage(name, read_file(name))

    def state(self, index: int) -> FileState:
        """Return the number of bytes, or the state of the file at the path or URL."""
        if self._contents is None:
            return file_state(self.name(index))
        content = self._contents[index]
        return FileState(len(content) if isinstance(content, bytes | bytearray | memoryview) else 0, 0)

    def part(self, indices: Sequence[int]) -> RowImages:
        """Return some of the images, given ascending indices."""
        chosen = ascending(indices, len(self))
        contents = None if self._contents is None else self._contents[chosen]
        return RowImages(self._names[chosen], contents, reading=self.reading)


def rows_of(batch: Mapping[str, np.ndarray], *, reading: Reading = DEFAULT_READING) -> RowImages:
    """Return the images of a batch of Ray Data, Daft or Spark.

    Args:
        batch: arrays of equal length: `image`, the names; and `bytes`, without which the names are paths or URLs.
        reading: as for `read_image`.

    Raises:
        DataError: there is no column `image`, or it does not contain text.

    >>> images = rows_of({"image": np.array(["a.jpg", "b.jpg"])})
    >>> len(images), images.name(1)
    (2, 'b.jpg')
    """
    if "image" not in batch:
        raise DataError(
            "a batch must have the column image, with names, paths or URLs, and optionally bytes, got "
            f"{enumerated(list(batch), 20) or 'no columns'}: rename or select columns"
        )
    names = np.asarray(batch["image"]).astype(object)
    wrong = next((name for name in names if name is not None and not isinstance(name, str | float)), None)
    if wrong is not None:
        raise DataError(
            f"the column image must contain names, paths or URLs, got {type(wrong).__name__}: put the contents of "
            "files into the column bytes"
        )
    contents = np.asarray(batch["bytes"], dtype=object) if "bytes" in batch else None
    if contents is not None and len(contents) != len(names):
        raise DataError(f"the columns image and bytes must have equal length, got {len(names)} and {len(contents)}")
    return RowImages(names, contents, reading=reading)


# ------------------------------------------------------------------------------------------------ whole collections


def without_repeats(collection: ImageCollection) -> ImageCollection:
    """Return the images with different names: the first of each name, since a list may name an image twice."""
    first: dict[str, int] = {}
    for index in range(len(collection)):
        first.setdefault(collection.name(index), index)
    return collection if len(first) == len(collection) else collection.part(list(first.values()))


class Fingerprint(NamedTuple):
    """Hashes by which changes of a collection are detected without reading its images.

    Attributes:
        files: hash of the names and sizes of all images.
        times: hash of their modification times, which copies may not keep; compare `content_hash` where it differs.
    """

    files: str
    times: str


def fingerprint(collection: ImageCollection) -> Fingerprint:
    """Return hashes of the names, sizes and modification times of all images.

    Raises:
        ShardError: object storage failed repeatedly.
    """

    def state(index: int) -> FileState:
        try:
            return collection.state(index)
        except OSError:  # missing
            return FileState(-1, 0)

    files, times = hashlib.sha256(), hashlib.sha256()
    for index, found in _in_threads(state, range(len(collection))):
        files.update(f"{collection.name(index)} {found.size_bytes}\n".encode("utf-8", "surrogateescape"))
        times.update(f"{found.mtime_ns}\n".encode())
    return Fingerprint(files.hexdigest(), times.hexdigest())


def content_hash(collection: ImageCollection) -> str:
    """Return a hash of the contents of all images, which are read; unreadable ones count as empty.

    Raises:
        ShardError: object storage failed repeatedly.
    """
    digests = (digest for _, digest in _in_threads(partial(content_digest, collection), range(len(collection))))
    return joined_digest(digests)


def content_digest(collection: ImageCollection, index: int) -> bytes:
    """Return the SHA-256 of the content of an image; empty if it cannot be read."""
    try:
        return bytes.fromhex(collection.read(index).sha256)
    except (OSError, UnreadableImage):
        return b""


def joined_digest(digests: Iterable[bytes]) -> str:
    """Return `content_hash`, given the hash of each image."""
    return hashlib.sha256(b"\n".join(digests)).hexdigest()


def sampled_hash(images: ImageSource, most: int = 64) -> str:
    """Return a hash of the names of all images, and of the contents of up to `most` evenly spread ones.

    For results of a whole collection, which another collection with the same names must not continue. Copies have the
    same hash. Contents of sources that have no files, such as generated scenes, are ignored.

    Raises:
        ShardError: object storage failed repeatedly.
    """
    digest = hashlib.sha256()
    for index in range(len(images)):
        digest.update(images.name(index).encode("utf-8", "surrogateescape") + b"\n")
    if isinstance(images, EncodedImages):
        files = cast("ImageCollection", images)
        for _, content in _in_threads(partial(content_digest, files), spread(len(images), most)):
            digest.update(content)
    return digest.hexdigest()


def _in_threads(read: Callable[[int], Read], indices: Sequence[int]) -> Iterator[tuple[int, Read]]:
    """Yield indices and what is read there, in order, with many requests at the same time."""
    with ThreadPoolExecutor(_STATE_READERS) as pool:
        for start in range(0, len(indices), _STATE_BLOCK):
            block = indices[start : start + _STATE_BLOCK]
            yield from zip(block, pool.map(read, block), strict=True)


def names_hash(collection: ImageCollection) -> str:
    """Return the number of images and a hash of their names; unlike `fingerprint`, it does not access the files."""
    digest = hashlib.sha256()
    for index in range(len(collection)):
        digest.update(os.fsencode(collection.name(index)) + b"\n")
    return f"{len(collection)} {digest.hexdigest()}"


def locate_image(folder: str | os.PathLike[str], name: str, *, source: str | os.PathLike[str]) -> str:
    """Return the path or URL of an image that a file, such as a database, names.

    Args:
        folder: folder or URL of the images.
        name: name of the image: a path below the folder, or as in the list that is the source.
        source: path or URL from which the collection was opened.

    Raises:
        DataError: the image is not below the folder, and not on the list.
    """
    try:
        if not is_url(name):
            path_inside(Path(folder), name, source=source, follow_links=True)
            return located(os.fspath(folder), name)
    except InputError:
        pass
    path = Path(source)
    if path.suffix.lower() == ".txt" and path.is_file() and name in _listed_names(path, path.stat().st_mtime_ns):
        return located(os.fspath(folder), name)
    raise DataError(f"{name!r} is neither below {folder} nor listed in {source}: index the images again")


@lru_cache(maxsize=1)
def _listed_names(path: Path, mtime_ns: int) -> frozenset[str]:
    return frozenset(name for _, name in read_list(path))


def read_named(source: str | os.PathLike[str], name: str, column: str | None = None) -> EncodedImage:
    """Read one image of a source of `open_collection` by its name, without listing the images.

    Args:
        source: path or URL from which the collection was opened.
        name: name of the image.
        column: column of images in Parquet files.

    Raises:
        OSError: the image is missing or cannot be read.
        UnreadableImage: there are no bytes to read.
        DataError: the source is broken, or the name leads outside it.
        ShardError: a shard cannot be read, or object storage failed repeatedly.
    """
    place = _joined(source, "")
    if is_masked(name) and place.endswith(".txt") and not is_url(place):
        name = next((url for _, url in read_list(Path(place)) if without_secrets(url) == name), name)
    is_file = posixpath.splitext(place)[1].lower() in (".txt", SUFFIX, PARQUET)
    folder = (posixpath.dirname(place) if is_file else place.rstrip("/")) or "."
    container, _, member = name.partition("/")
    try:
        location = locate_image(folder, name, source=place)
    except DataError:
        if not (member and container.endswith((SUFFIX, PARQUET))):  # members may have any name
            raise
        location = ""
    if location and not is_url(location) and Path(location).is_file():
        return EncodedImage(name, Path(location).read_bytes())
    if (row := re.fullmatch(r"(\d+)(\.\w+)?", member)) and container.endswith(PARQUET):
        return EncodedImage(name, open_row(located(folder, container), int(row[1]), column=column).read(0).content)
    if container.endswith(SUFFIX) and member:
        return EncodedImage(name, read_member(folder, container, member))
    return EncodedImage(name, read_file(location))
