"""Where the images of tar shards lie: found by a walk over the headers, kept in a file."""

import io
import logging
import os
import posixpath
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from jaxtyping import Int64

from cribo.console import duration
from cribo.data.images import EXTENSIONS, DataError, PackedNames
from cribo.data.storage import CACHE_DIR, RemoteShards, ShardError, ShardStore, key_of, only_one
from cribo.files import write_whole

log = logging.getLogger("cribo")

INDEX = "cribo-index.npz"
"""The file that lists the images of the shards that lie beside it."""

HEADER = 512
"""Bytes of the header that comes right before a member's content."""

_MOST_EXTENSION = 2**24  # bytes; names and records have some hundred
_READERS = 8  # shards that are walked over at a time: waiting for object storage, mostly
_SAY_EVERY = 30.0


@dataclass(frozen=True)
class ShardIndex:
    """The images of a collection of shards, shard by shard, each in the order of the file.

    Flat arrays without Python objects, which worker processes go on sharing.

    Attributes:
        shards: names of the files.
        sizes: bytes of each file.
        ends: number of images up to the end of each shard.
        offsets: of each image's content in its file.
        lengths: bytes of each image's content.
        members: names inside the files, with unprintable characters escaped.
    """

    shards: tuple[str, ...]
    sizes: tuple[int, ...]
    ends: Int64[np.ndarray, " s"]
    offsets: Int64[np.ndarray, " n"]
    lengths: Int64[np.ndarray, " n"]
    members: PackedNames

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def counts(self) -> Int64[np.ndarray, " s"]:
        """Number of images of each shard."""
        return np.diff(self.ends, prepend=0)

    def shard(self, image: int) -> int:
        """Number of the shard that an image lies in."""
        return int(np.searchsorted(self.ends, image, side="right"))

    def write(self, path: Path) -> None:
        """Write the index, whole or not at all."""
        text, ends = self.members.arrays
        arrays = {
            "shards": np.frombuffer("\0".join(self.shards).encode("utf-8", "surrogateescape"), dtype=np.uint8),
            "sizes": np.array(self.sizes, dtype=np.int64),
            "ends": self.ends,
            "offsets": self.offsets,
            "lengths": self.lengths,
            "member_text": text,
            "member_ends": ends,
        }

        def save(part: Path) -> None:
            with part.open("wb") as file:  # given a path, NumPy would add an ending to it
                np.savez(file, allow_pickle=False, **arrays)

        write_whole(path, save)


def read_index(file: Path | BinaryIO, store: ShardStore) -> ShardIndex | None:
    """The index in a file, if it is one of just these shards; None otherwise."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            index = ShardIndex(
                shards=tuple(arrays["shards"].tobytes().decode("utf-8", "surrogateescape").split("\0")),
                sizes=tuple(arrays["sizes"].tolist()),
                ends=arrays["ends"],
                offsets=arrays["offsets"],
                lengths=arrays["lengths"],
                members=PackedNames.from_arrays(arrays["member_text"], arrays["member_ends"]),
            )
        return index if _fits(index, store) else None
    except Exception:  # whatever is wrong with a file of numbers: the shards themselves say more
        return None


def _fits(index: ShardIndex, store: ShardStore) -> bool:
    if index.shards != store.names or index.sizes != store.sizes:
        return False
    images = len(index.offsets)
    if not len(index.lengths) == len(index.members) == images or len(index.ends) != len(index.shards):
        return False
    if images == 0 or index.ends[-1] != images or (index.counts < 0).any():
        return False
    beyond = index.offsets + index.lengths > np.repeat(np.array(index.sizes), index.counts)
    return not (beyond.any() or (index.offsets < HEADER).any() or (index.lengths < 0).any())


def index_of(store: ShardStore) -> ShardIndex:
    """The index of a collection: the one that is kept, or a new one, which is then kept.

    A new index is kept beside local shards if that folder can be written to, else in the folder of the cache.

    Raises:
        DataError: a shard is broken, or none holds an image.
        ShardError: a shard cannot be read.
    """
    remote = isinstance(store, RemoteShards)
    home = store.folder if remote else Path(store.root)
    kept = read_index(home / INDEX, store)
    if kept is not None:
        return kept
    if not remote and not os.access(home, os.W_OK):
        home = Path(CACHE_DIR).expanduser() / key_of(os.path.realpath(store.root))
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError:  # not even a home to keep it in: each process makes its own
        return build_index(store)
    with only_one(home, INDEX):
        index = read_index(home / INDEX, store)  # made by another process meanwhile
        if index is None:
            index = (_index_beside(store) if remote else None) or build_index(store)
            try:
                index.write(home / INDEX)
            except OSError as error:
                log.warning("cannot keep the list of images in %s: %s; the next run makes it again", home, error)
    return index


def _index_beside(store: RemoteShards) -> ShardIndex | None:
    content = store.read_beside(INDEX)
    return None if content is None else read_index(io.BytesIO(content), store)


def build_index(store: ShardStore) -> ShardIndex:
    """Walk over the headers of all shards.

    Raises:
        DataError: a shard is broken, or none holds an image.
        ShardError: a shard cannot be read.
    """
    members: list[str] = []
    places: list[tuple[int, int]] = []
    ends: list[int] = []
    progress = _Progress(store)
    with ThreadPoolExecutor(_READERS) as pool:
        for found in pool.map(lambda shard: _images_of(store, shard), range(len(store.names))):
            members += [name for name, _, _ in found]
            places += [(offset, length) for _, offset, length in found]
            ends.append(len(members))
            progress(len(ends))
    if not members:
        raise DataError(
            f"no images in the {len(store.names)} shards of {store.root}: looked for members that end in "
            f"{' '.join(EXTENSIONS)}"
        )
    offsets, lengths = np.array(places, dtype=np.int64).T
    return ShardIndex(
        store.names,
        store.sizes,
        np.array(ends, dtype=np.int64),
        np.ascontiguousarray(offsets),
        np.ascontiguousarray(lengths),
        PackedNames(members),
    )


class _Progress:
    def __init__(self, store: ShardStore) -> None:
        self.store = store
        self.started = self.said = time.monotonic()

    def __call__(self, done: int) -> None:
        now, total = time.monotonic(), len(self.store.names)
        if now - self.said >= _SAY_EVERY:
            left = duration((total - done) * (now - self.started) / done)
            log.info("listing the images of %d shards in %s: %d done, ETA %s", total, self.store.root, done, left)
            self.said = now


def _images_of(store: ShardStore, shard: int) -> list[tuple[str, int, int]]:
    """Name, offset and length of each image in a shard."""
    what = f"the shard {store.root}/{store.names[shard]}"

    def walk() -> list[tuple[str, int, int]]:
        with store.stream(shard) as file:
            return list(image_members(file, store.sizes[shard], what))

    return store.patience.try_to(what, walk)


def image_members(file: BinaryIO, size: int, what: str) -> Iterator[tuple[str, int, int]]:
    """The images in a tar file: name with unprintable characters escaped, offset and length of the content.

    Regular members with one of `EXTENSIONS` count, except hidden ones, and those that WebDataset takes for a
    further part of a sample: `7.mask.png` beside `7.jpg`. Nothing is unpacked; a name is a label and no path.

    Args:
        file: a tar file, not compressed.
        size: of it in bytes.
        what: it is, for errors.

    Raises:
        DataError: the file is broken, truncated or no tar file.
    """
    found: list[tuple[str, str, int, int]] = []
    for member in _members(file, size, what):
        folder, _, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")
        if stem and member.isreg() and not member.issparse() and posixpath.splitext(base)[1].lower() in EXTENSIONS:
            found.append((f"{folder}/{stem}", extension, member.offset_data, member.size))
    whole = {key for key, extension, _, _ in found if "." not in extension}
    for key, extension, offset, length in found:
        if "." not in extension or key not in whole:
            yield escaped(f"{key}.{extension}".removeprefix("/")), offset, length


class _Bounded:
    """A file of which no more is asked for than the extension of a header may have, whatever a forged one declares.

    tarfile reads extensions (long names, extended records, maps of sparse files) whole, into memory.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def read(self, size: int = -1) -> bytes:
        """As many bytes as there are, up to `size`."""
        if not 0 <= size <= _MOST_EXTENSION:
            raise tarfile.ReadError(f"a header declares an extension of {size} bytes")
        return self._file.read(size)

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place in the file."""
        if whence == os.SEEK_SET and not 0 <= place <= self._size:
            raise tarfile.ReadError("unexpected end of data")
        return self._file.seek(place, whence)

    def tell(self) -> int:
        """The place."""
        return self._file.tell()


def _members(file: BinaryIO, size: int, what: str) -> Iterator[tarfile.TarInfo]:
    try:
        with tarfile.open(fileobj=cast(Any, _Bounded(file, size)), mode="r:") as tar:
            position = -1
            while (member := tar.next()) is not None:
                cast(Any, tar).members.clear()  # which it would keep for good
                end = member.offset_data + (member.size if member.isreg() else 0)
                if member.size < 0 or member.offset <= position or end > size:
                    raise DataError(
                        f"{what} is broken: its member {escaped(member.name)!r} ends at byte {end} of {size}; "
                        "fetch or write it again"
                    )
                position = member.offset
                yield member
            file.seek(tar.offset)
            # tarfile ends without a word where the next header should be and something else is
            if file.read(HEADER).strip(b"\0"):
                raise DataError(
                    f"{what} is broken: no member begins at byte {tar.offset} of {size}; fetch or write it again"
                )
    # tarfile meets forged numbers, and extensions of extensions without end, with errors of many kinds.
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, IndexError, KeyError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{what} is broken, or no uncompressed tar file: {error}; fetch or write it again") from error


def escaped(name: str) -> str:
    r"""A name for people: what cannot be printed is written as an escape.

    >>> escaped("straße\n.jpg")
    'straße\\n.jpg'
    """
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in name)


def content_of(block: bytes, length: int, what: str) -> bytes:
    """The content of a member, from it and the header before it.

    Args:
        block: header and content.
        length: of the content, as the index says.
        what: it is read from, for errors.

    Raises:
        ShardError: the header is not one of such a member: the file is not the one that was indexed.
    """
    try:
        header = tarfile.TarInfo.frombuf(block[:HEADER], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        header = None
    if header is None or header.size != length or len(block) != HEADER + length:
        raise ShardError(f"{what} is not what {INDEX} says, it has been changed: remove that file, and start again")
    return block[HEADER:]
