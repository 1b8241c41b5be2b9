"""Images in tar shards (WebDataset's layout, or any tar files), in a folder or object storage."""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from cribo.data.images import DataError, ImageFiles, has_images, open_images, require
from cribo.data.limits import MAX_PIXELS
from cribo.data.randomness import keyed_generator
from cribo.data.reading import EncodedImage, read_image, read_reduced
from cribo.data.storage import (
    CACHE_DIR,
    CACHE_GIB,
    SUFFIX,
    LocalShards,
    RemoteShards,
    ShardCache,
    ShardStore,
    list_tars,
    retry,
)
from cribo.data.tars import HEADER, INDEX, ShardIndex, content_of, index_of

WINDOW_SHARDS = 64
"""Maximum number of shards read at a time."""

WINDOW_BYTES = 4 * 2**30
"""Maximum total size in bytes of the shards read at a time; `MIN_WINDOW_SHARDS` takes precedence."""

MIN_WINDOW_SHARDS = 8
"""Minimum number of shards read at a time, regardless of their size."""

# Key of the random order; cribo.data.samples uses 0 to 2.
_SHARD_ORDER = 3


class ShardedImages:
    """The images of tar shards, with an epoch order that reads few shards at a time.

    Images are ordered by shard name, then by position in the shard. They are read by (offset, length)
    from files that stay open. Instances can be pickled, shared by threads, and used after a fork.

    Args:
        store: the shards.
        index: index of their images; by default, it is loaded or built.
        max_pixels: as for `read_image`.

    Attributes:
        window: number of shards read at a time.

    Raises:
        DataError: a shard is broken, or no shard contains an image.
        ShardError: a shard cannot be read.
    """

    def __init__(self, store: ShardStore, index: ShardIndex | None = None, *, max_pixels: int = MAX_PIXELS) -> None:
        if max_pixels < 4:
            raise DataError(f"max_pixels must be >= 4 (the smallest image is 2 x 2), got {max_pixels}")
        self.store = store
        self.index = index_of(store) if index is None else index
        self.max_pixels = max_pixels
        self.window = window_of(self.index.sizes)
        # An evicted file is closed with its last reference, since another thread may be reading it.
        self._open = lru_cache(self.window)(store.open)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ShardedImages, self.store, self.index, max_pixels=self.max_pixels), ()

    def __len__(self) -> int:
        return len(self.index)

    def name(self, index: int) -> str:
        """Return the shard and the name inside it, with unprintable characters escaped."""
        member = self.index.members[index]
        return f"{self.index.shards[self.index.shard(index)]}/{member}"

    def load(self, index: int) -> UInt8[Tensor, "3 h w"]:
        """Load an image as upright RGB.

        Raises:
            UnreadableImage: see `read_image`.
            ShardError: the shard cannot be read.
        """
        return read_image(self._encoded(index), max_pixels=self.max_pixels)

    def load_reduced(self, index: int, reduction: Callable[[int, int], int]) -> tuple[UInt8[Tensor, "3 h w"], int]:
        """Load an image at a fraction of its size if that is faster (see `read_reduced`); raises as `load` does."""
        return read_reduced(self._encoded(index), reduction, max_pixels=self.max_pixels)

    def epoch_order(self, seed: int, epoch: int) -> Int[Tensor, " n"]:
        """Return all indices in the order of an epoch, which reads `window` shards at a time.

        The shards are arranged in a circle in random order; whenever one enters the window, another leaves it. Each
        image is read at a uniformly random time while its shard is in the window. At any time, including the first and
        last steps of the epoch, all shards of the window have contributed the same fraction of their images on average.
        If all shards fit into the window, all orders are equally likely.
        """
        generator = keyed_generator(seed, _SHARD_ORDER, epoch)
        shards = len(self.index.shards)
        place = torch.empty(shards, dtype=torch.float64)
        place[torch.randperm(shards, generator=generator)] = torch.arange(shards, dtype=torch.float64)
        joined = place.repeat_interleave(torch.from_numpy(self.index.counts))
        waited = torch.rand(len(self), dtype=torch.float64, generator=generator) * self.window
        return ((joined + waited) % shards).argsort(stable=True)

    def _encoded(self, index: int) -> EncodedImage:
        if not 0 <= index < len(self):
            raise IndexError(f"index must be in 0..{len(self) - 1}, got {index}")
        shard = self.index.shard(index)
        offset, length = int(self.index.offsets[index]), int(self.index.lengths[index])
        what = f"the shard {self.store.root}/{self.index.shards[shard]}"

        def attempt() -> bytes:
            try:
                return _read_at(self._open(shard), offset - HEADER, HEADER + length)
            except OSError:
                self._open.cache_clear()  # a stale handle would fail again
                raise

        return EncodedImage(self.name(index), content_of(retry(what, attempt), length, what))


def window_of(sizes: Sequence[int]) -> int:
    """Return the number of shards to read at a time, given their sizes in bytes.

    Depends only on the collection, so that a run does not depend on the storage of its shards.

    >>> window_of([64 * 2**20] * 1000), window_of([2**30] * 1000), window_of([2**20] * 3)
    (64, 8, 3)
    """
    mean = max(1, sum(sizes) // len(sizes))
    return min(len(sizes), max(MIN_WINDOW_SHARDS, min(WINDOW_SHARDS, WINDOW_BYTES // mean)))


def _read_at(file: BinaryIO, offset: int, length: int) -> bytes:
    """Read up to `length` bytes without the file position, which forked processes share."""
    parts: list[bytes] = []
    while length > 0 and (part := os.pread(file.fileno(), length, offset)):  # may return fewer bytes
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return b"".join(parts)


def open_shards(
    root: str | os.PathLike[str],
    *,
    max_pixels: int = MAX_PIXELS,
    cache_dir: str | os.PathLike[str] = CACHE_DIR,
    cache_gib: float = CACHE_GIB,
) -> ShardedImages:
    """Open the tar shards in a folder or below a URL, or a single tar file.

    The list of images is read from `INDEX`, which `cribo shard` writes, or built by scanning the shards once.
    Shards from a URL are downloaded completely to `cache_dir`, which keeps the most recently used ones.

    Args:
        root: a folder, a .tar file, or a URL that fsspec understands, such as s3://bucket/prefix.
        max_pixels: maximum number of pixels of an image; larger ones are unreadable.
        cache_dir: folder for shards downloaded from a URL.
        cache_gib: maximum total size of the shards in this folder, in GiB.

    Raises:
        DataError: no shards, broken shards, or a cache too small for the shards read at a time.
        ShardError: the storage failed repeatedly.

    >>> images = open_shards("s3://pictures/street", cache_gib=20)  # doctest: +SKIP
    """
    if not is_url(root):
        require(Path(root).expanduser())
        return ShardedImages(LocalShards(root), max_pixels=max_pixels)
    if not cache_gib > 0:
        raise DataError(f"cache_gib must be > 0, got {cache_gib}")
    cache = ShardCache(cache_dir, limit_bytes=int(cache_gib * 2**30))
    images = ShardedImages(RemoteShards(str(root), cache), max_pixels=max_pixels)
    _require_room(images, cache)
    return images


def _require_room(images: ShardedImages, cache: ShardCache) -> None:
    sizes = images.index.sizes
    # The window, and the shard that enters it next.
    needed = min(sum(sizes), (images.window + 1) * max(sizes))
    if needed > cache.limit_bytes:
        raise DataError(
            f"data.cache_gib {cache.limit_bytes / 2**30:.3g} is too small for {images.store.root}: {images.window} of "
            f"its shards are read at a time, which needs {needed / 2**30:.3g} GiB: raise it, or write smaller shards"
        )


def is_url(root: str | os.PathLike[str]) -> bool:
    """Whether `root` is a URL.

    >>> is_url("s3://bucket/prefix"), is_url("C:/images"), is_url("images")
    (True, False, False)
    """
    return "://" in os.fspath(root)


def open_collection(
    root: str | os.PathLike[str],
    images: str = "",
    *,
    max_pixels: int = MAX_PIXELS,
    inside: bool = False,
    cache_dir: str | os.PathLike[str] = CACHE_DIR,
    cache_gib: float = CACHE_GIB,
) -> "ImageFiles | ShardedImages":
    """Open image files (see `open_images`) or tar shards (see `open_shards`), whichever `root` contains.

    A folder is read as shards if it contains `INDEX`, or tar files and no image at any depth.

    Raises:
        DataError, MissingData, ShardError: as those functions do.
    """
    if is_url(root):
        where = f"{os.fspath(root).rstrip('/')}/{images}" if images else root
        return open_shards(where, max_pixels=max_pixels, cache_dir=cache_dir, cache_gib=cache_gib)
    path = Path(root).expanduser() / images
    indexed = (path / INDEX).is_file()
    if path.suffix.lower() == SUFFIX and path.is_file():
        return open_shards(path, max_pixels=max_pixels)
    if path.is_dir() and (indexed or (list_tars(path) and not has_images(path))):
        return open_shards(path, max_pixels=max_pixels)
    return open_images(root, images, max_pixels=max_pixels, inside=inside)
