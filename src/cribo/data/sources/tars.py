"""Index of the images in tar shards, built in one pass over the headers and stored in a file."""

import errno
import io
import logging
import posixpath
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from filelock import FileLock
from jaxtyping import Int64

from cribo.base.errors import DataError, ShardError
from cribo.base.files import open_arrays, write_whole
from cribo.data.reading import EXTENSIONS
from cribo.data.sources.images import PackedNames
from cribo.data.sources.storage import ShardStore, needs_ranges, retry

log = logging.getLogger("cribo")

INDEX = "cribo-index.npz"
"""Name of the index file in the folder of the shards."""

HEADER = 512
"""Size in bytes of the header that precedes a member's content."""

_READERS = 8  # shards scanned in parallel, since object storage has a high latency
_LOG_SECONDS = 30.0


@dataclass(frozen=True)
class ShardIndex:
    """The images of a collection of shards, ordered by shard and by position in the shard.

    Consists of flat arrays without Python objects, so that forked workers share their memory.

    Attributes:
        shards: names of the shards.
        sizes: size of each shard in bytes.
        ends: number of images up to the end of each shard.
        offsets: offset of each image's content in its shard.
        lengths: size of each image's content in bytes.
        members: names of the images inside the shards, with unprintable characters escaped.
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
        """Return the index of an image's shard."""
        return int(np.searchsorted(self.ends, image, side="right"))

    def images_of(self, shard: int) -> Iterator[tuple[str, int, int]]:
        """Yield name, offset and length of the images of a shard."""
        for image in range(int(self.ends[shard] - self.counts[shard]), int(self.ends[shard])):
            yield self.members[image], int(self.offsets[image]), int(self.lengths[image])

    def part(self, images: Int64[np.ndarray, " m"]) -> "ShardIndex":
        """Return the index of some images, in ascending order, and of the shards that contain them."""
        owners, counts = np.unique(np.searchsorted(self.ends, images, side="right"), return_counts=True)
        return ShardIndex(
            tuple(self.shards[owner] for owner in owners),
            tuple(self.sizes[owner] for owner in owners),
            np.cumsum(counts),
            self.offsets[images],
            self.lengths[images],
            PackedNames(self.members[image] for image in images.tolist()),
        )

    def write(self, path: Path) -> None:
        """Write the index atomically."""
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
            with part.open("wb") as file:  # NumPy appends .npz to a path
                np.savez(file, allow_pickle=False, **arrays)

        write_whole(path, save)


def read_index(read: Callable[[], bytes], store: ShardStore) -> ShardIndex | None:
    """Parse the index file that `read` returns; None if it is missing, damaged, or belongs to other shards."""
    try:
        with open_arrays(io.BytesIO(read())) as arrays:
            index = ShardIndex(
                shards=tuple(arrays["shards"].tobytes().decode("utf-8", "surrogateescape").split("\0")),
                sizes=tuple(arrays["sizes"].tolist()),
                ends=arrays["ends"],
                offsets=arrays["offsets"],
                lengths=arrays["lengths"],
                members=PackedNames.from_arrays(arrays["member_text"], arrays["member_ends"]),
            )
        return index if _fits(index, store) else None
    except Exception:  # missing, damaged or unreadable: scan the shards instead
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


def stored_index(store: ShardStore) -> ShardIndex | None:
    """Load the index of a collection from `store.index_folder`, or from beside its shards; None if there is none."""
    return read_index((store.index_folder / INDEX).read_bytes, store) or read_index(
        lambda: store.read_beside(INDEX), store
    )


def index_of(store: ShardStore) -> ShardIndex:
    """Load the index of a collection, or build it and store it in `store.index_folder`.

    Raises:
        DataError: a shard is broken, or no shard contains an image.
        ShardError: a shard cannot be read.
    """
    path = store.index_folder / INDEX
    index = read_index(path.read_bytes, store)
    if index is not None:
        return index
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{INDEX}.lock")):
            index = read_index(path.read_bytes, store)  # another process may have written it meanwhile
            if index is None:
                index = read_index(lambda: store.read_beside(INDEX), store) or build_index(store)
                index.write(path)
            return index
    except OSError as error:
        log.warning("cannot store the list of images in %s: %s; it will be rebuilt in the next run", path.parent, error)
        return index or build_index(store)


def build_index(store: ShardStore) -> ShardIndex:
    """Scan the headers of all shards.

    Raises:
        DataError: a shard is broken, or no shard contains an image.
        ShardError: a shard cannot be read.
    """

    def scan(shard: int) -> list[tuple[str, int, int]]:
        what = f"the shard {store.root}/{store.names[shard]}"

        def attempt() -> list[tuple[str, int, int]]:
            with store.stream(shard) as file:
                return image_members(file, store.sizes[shard], what)

        return retry(what, attempt)

    total = len(store.names)
    members: list[str] = []
    places: list[tuple[int, int]] = []
    ends: list[int] = []
    logged = time.monotonic()
    with ThreadPoolExecutor(_READERS) as pool:
        for found in pool.map(scan, range(total)):
            members += [name for name, _, _ in found]
            places += [(offset, length) for _, offset, length in found]
            ends.append(len(members))
            if time.monotonic() - logged >= _LOG_SECONDS:
                log.info("listing the images of %s: %d of %d shards done", store.root, len(ends), total)
                logged = time.monotonic()
    if not members:
        raise DataError(
            f"no images in the {total} shards of {store.root}: looked for members that end in {' '.join(EXTENSIONS)}"
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


def image_members(file: BinaryIO, size: int, what: str) -> list[tuple[str, int, int]]:
    """List the images in a tar file: name with unprintable characters escaped, offset and length of the content.

    Images are regular members with one of `EXTENSIONS`, except hidden ones and further parts of a WebDataset sample,
    such as `7.mask.png` for `7.jpg`. Nothing is unpacked, and names are never used as paths.
    Raises DataError, with `what` as the file's name, if the file is broken or not an uncompressed tar file.
    """
    found: list[tuple[str, str, int, int]] = []
    for member in _members(file, size, what):
        folder, _, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")
        if stem and member.isreg() and not member.issparse() and posixpath.splitext(base)[1].lower() in EXTENSIONS:
            found.append((f"{folder}/{stem}", extension, member.offset_data, member.size))
    samples = {key for key, extension, _, _ in found if "." not in extension}
    return [
        (escaped(f"{key}.{extension}".removeprefix("/")), offset, length)
        for key, extension, offset, length in found
        if "." not in extension or key not in samples
    ]


def _members(file: BinaryIO, size: int, what: str) -> Iterator[tarfile.TarInfo]:
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            position = -1
            while (member := tar.next()) is not None:
                cast(Any, tar).members.clear()  # tarfile would keep all of them
                end = member.offset_data + (member.size if member.isreg() else 0)
                if member.size < 0 or member.offset <= position or end > size:
                    raise DataError(
                        f"{what} is broken: its member {escaped(member.name)!r} ends at byte {end} of {size}; "
                        "download or write it again"
                    )
                position = member.offset
                yield member
            file.seek(tar.offset)
            # tarfile also stops silently at anything that is not a header.
            if file.read(HEADER).strip(b"\0"):
                raise DataError(
                    f"{what} is broken: no member starts at byte {tar.offset} of {size}; download or write it again"
                )
    except DataError:
        raise
    # tarfile does not validate sizes: it seeks and allocates accordingly.
    except (tarfile.TarError, ValueError, ArithmeticError, RecursionError, LookupError, OSError, MemoryError) as error:
        if (isinstance(error, OSError) and error.errno != errno.EINVAL) or needs_ranges(error):
            raise
        raise DataError(
            f"{what} is broken, or not an uncompressed tar file: {error}; download or write it again"
        ) from error


def escaped(name: str) -> str:
    r"""Return a name with unprintable characters escaped.

    >>> escaped("straße\n.jpg")
    'straße\\n.jpg'
    """
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in name)


def content_of(block: bytes, length: int, what: str) -> bytes:
    """Return the content of a member of the shard `what`, given its header and content as one block.

    Raises:
        ShardError: the header does not match `length`: the shard changed after it was indexed.
    """
    try:
        header = tarfile.TarInfo.frombuf(block[:HEADER], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        header = None
    if header is None or header.size != length or len(block) != HEADER + length:
        raise ShardError(f"{what} has changed and does not match {INDEX}: remove {INDEX} and start again")
    return block[HEADER:]
