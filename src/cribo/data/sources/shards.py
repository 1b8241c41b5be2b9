"""Images in tar shards (WebDataset's layout, or any tar files), in a folder or object storage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from cribo.base.bounds import above
from cribo.base.errors import DataError
from cribo.base.files import require
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.reading import EncodedImage, FileState
from cribo.data.sources.images import EncodedImages, ascending, is_url
from cribo.data.sources.storage import (
    CACHE_DIR,
    CACHE_GIB,
    LocalShards,
    RemoteShards,
    ShardCache,
    ShardStore,
    require_answer,
    retry,
)
from cribo.data.sources.tars import HEADER, ShardIndex, content_of, image_members, index_of, stored_index

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

WINDOW_SHARDS = 64
"""Maximum number of shards read at a time."""

WINDOW_BYTES = 4 * 2**30
"""Maximum total size in bytes of the shards read at a time; `MIN_WINDOW_SHARDS` takes precedence."""

MIN_WINDOW_SHARDS = 8
"""Minimum number of shards read at a time, regardless of their size."""

# Key of the random order; cribo.data.samples uses 0 to 2.
_SHARD_ORDER = 3


class ShardedImages(EncodedImages):
    """The images of tar shards, with an epoch order that reads few shards at a time.

    Images are ordered by shard name, then by position in the shard. They are read by (offset, length)
    from files that stay open. Instances can be pickled, shared by threads, and used after a fork.

    Args:
        store: the shards.
        index: index of their images; by default, it is loaded or built.
        reading: as for `read_image`.

    Attributes:
        window: number of shards read at a time.

    Raises:
        DataError: a shard is broken, or no shard contains an image.
        ShardError: a shard cannot be read.
    """

    def __init__(
        self, store: ShardStore, index: ShardIndex | None = None, *, reading: Reading = DEFAULT_READING
    ) -> None:
        super().__init__(reading)
        self.store = store
        self.index = index_of(store) if index is None else index
        self.window = window_of(self.index.sizes)
        # An evicted file is closed with its last reference, since another thread may be reading it.
        self._open = lru_cache(self.window)(store.open)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ShardedImages, self.store, self.index, reading=self.reading), ()

    def __len__(self) -> int:
        return len(self.index)

    def name(self, index: int) -> str:
        """Return the shard and the name inside it, with unprintable characters escaped."""
        member = self.index.members[index]
        return f"{self.index.shards[self.index.shard(index)]}/{member}"

    def read(self, index: int) -> EncodedImage:
        """Read the bytes of an image; raises ShardError if the shard cannot be read."""
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

    def state(self, index: int) -> FileState:
        """Return the size of an image, and the modification time of its shard when it was opened."""
        return FileState(int(self.index.lengths[index]), self.store.mtimes_ns[self.index.shard(index)])

    def part(self, indices: Sequence[int]) -> ShardedImages:
        """Return some of the images, given ascending indices. Other shards are not opened."""
        index = self.index.part(ascending(indices, len(self)))
        number = {name: shard for shard, name in enumerate(self.store.names)}
        store = self.store.part([number[name] for name in index.shards])
        return ShardedImages(store, index, reading=self.reading)

    def epoch_order(self, seed: int, epoch: int) -> Int[Tensor, " n"]:
        """Return all indices in the order of an epoch, which reads `window` shards at a time.

        The shards are arranged in a circle in random order; whenever one enters the window, another leaves it. Each
        image is read at a uniformly random time while its shard is in the window. At any time, including the first and
        last steps of the epoch, all shards of the window have contributed the same fraction of their images on average.
        If all shards fit into the window, all orders are equally likely.
        """
        import torch

        from cribo.data.randomness import keyed_generator

        generator = keyed_generator(seed, _SHARD_ORDER, epoch)
        shards = len(self.index.shards)
        place = torch.empty(shards, dtype=torch.float64)
        place[torch.randperm(shards, generator=generator)] = torch.arange(shards, dtype=torch.float64)
        joined = place.repeat_interleave(torch.from_numpy(self.index.counts))
        waited = torch.rand(len(self), dtype=torch.float64, generator=generator) * self.window
        return ((joined + waited) % shards).argsort(stable=True)


def window_of(sizes: Sequence[int]) -> int:
    """Return the number of shards to read at a time, given their sizes in bytes.

    Depends only on the collection, so that a run does not depend on the storage of its shards.

    >>> window_of([64 * 2**20] * 1000), window_of([2**30] * 1000), window_of([2**20] * 3)
    (64, 8, 3)
    """
    mean = max(1, sum(sizes) // max(1, len(sizes)))
    return min(len(sizes), max(MIN_WINDOW_SHARDS, min(WINDOW_SHARDS, WINDOW_BYTES // mean)))


def read_member(root: str, shard: str, member: str) -> bytes:
    """Read one image of the shards in a folder or below a URL, without downloading its shard.

    Args:
        root: the folder or URL.
        shard: name of the shard.
        member: name of the image in the shard, as `ShardedImages.name` returns it.

    Raises:
        FileNotFoundError: there is no such shard or image.
        DataError: the shard is broken.
        ShardError: the storage failed repeatedly, or the shard has changed.
    """
    store = RemoteShards(root, ShardCache(CACHE_DIR, limit_bytes=0)) if is_url(root) else LocalShards(root)
    what = f"the shard {store.root}/{shard}"
    if shard not in store.names:
        raise FileNotFoundError(f"{what} does not exist")
    number = store.names.index(shard)

    def scan() -> list[tuple[str, int, int]]:
        with store.stream(number) as file:
            return image_members(file, store.sizes[number], what)

    index = stored_index(store)
    members = retry(what, scan) if index is None else index.images_of(number)
    place = next(((offset, length) for name, offset, length in members if name == member), None)
    if place is None:
        raise FileNotFoundError(f"{what} does not contain {member}")
    offset, length = place

    def attempt() -> bytes:
        with store.stream(number) as file:
            file.seek(offset - HEADER)
            return file.read(HEADER + length)

    return content_of(retry(what, attempt), length, what)


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
    reading: Reading = DEFAULT_READING,
    cache_dir: str | os.PathLike[str] = CACHE_DIR,
    cache_gib: float = CACHE_GIB,
) -> ShardedImages:
    """Open the tar shards in a folder or below a URL, or a single tar file.

    The list of images is read from `INDEX`, which `cribo shard` writes, or built by scanning the shards once.
    Shards from a URL are downloaded completely to `cache_dir`, which keeps the most recently used ones.

    Args:
        root: a folder, a .tar file, or a URL that fsspec understands, such as s3://bucket/prefix.
        reading: how images are read.
        cache_dir: folder for shards downloaded from a URL.
        cache_gib: maximum total size of the shards in this folder, in GiB.

    Raises:
        ConfigError: `cache_gib` is out of range.
        DataError: no shards, broken shards, or a cache too small for the shards read at a time.
        ConnectionError: the storage does not answer.
        ShardError: the storage failed repeatedly.

    >>> images = open_shards("s3://pictures/street", cache_gib=20)  # doctest: +SKIP
    """
    if not is_url(root):
        require(Path(root).expanduser())
        return ShardedImages(LocalShards(root), reading=reading)
    above(0).check(cache_gib=cache_gib)
    require_answer(str(root))
    cache = ShardCache(cache_dir, limit_bytes=int(cache_gib * 2**30))
    images = ShardedImages(RemoteShards(str(root), cache), reading=reading)
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
