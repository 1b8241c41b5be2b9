"""Images in tar shards (WebDataset's layout, or any tar files), in a folder or in object storage."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
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
    Patience,
    RemoteShards,
    ShardCache,
    ShardStore,
    holds_tars,
)
from cribo.data.tars import HEADER, INDEX, ShardIndex, content_of, index_of

WINDOW_SHARDS = 64
"""Shards that are read from at a time, where that is not more than `WINDOW_BYTES`."""

WINDOW_BYTES = 4 * 2**30
"""What the shards that are read from at a time have together, as far as they are not fewer than `LEAST_SHARDS`."""

LEAST_SHARDS = 8
"""Shards that are read from at a time, however large they are."""

# What the order is drawn for; 0 to 2 are taken by cribo.data.pairs.
_SHARD_ORDER = 3


class ShardedImages:
    """The images of tar shards, with an order of each epoch that needs few shards at a time.

    Index i is the i-th image in the order of the shards' names, and of the members in each. Each process reads
    by (offset, length) from files that it keeps open; it can be pickled, and used after a fork.

    Args:
        store: where the shards are.
        index: of their images; looked up or made when not given.
        max_pixels: as for `read_image`.

    Attributes:
        window: number of shards that are read from at a time.

    Raises:
        DataError: a shard is broken, or none holds an image.
        ShardError: a shard cannot be read.
    """

    def __init__(self, store: ShardStore, index: ShardIndex | None = None, *, max_pixels: int = MAX_PIXELS) -> None:
        if max_pixels < 4:
            raise DataError(f"max_pixels must be >= 4 (the smallest image is 2 x 2), got {max_pixels}")
        self.store = store
        self.index = index_of(store) if index is None else index
        self.max_pixels = max_pixels
        self.window = window_of(self.index.sizes)
        self._files = _OpenFiles(store, most=self.window)

    def __len__(self) -> int:
        return len(self.index)

    def name(self, index: int) -> str:
        """Shard and name inside it, with unprintable characters escaped."""
        member = self.index.members[index]
        return f"{self.index.shards[self.index.shard(index)]}/{member}"

    def load(self, index: int) -> UInt8[Tensor, "3 h w"]:
        """One image, RGB, upright.

        Raises:
            UnreadableImage: as `read_image` does.
            ShardError: its shard cannot be read.
        """
        return read_image(self._encoded(index), max_pixels=self.max_pixels)

    def load_reduced(self, index: int, reduction: Callable[[int, int], int]) -> tuple[UInt8[Tensor, "3 h w"], int]:
        """One image at a fraction of its size where that saves work (see `read_reduced`); raises as `load` does."""
        return read_reduced(self._encoded(index), reduction, max_pixels=self.max_pixels)

    def prepare(self, indices: Sequence[int]) -> None:
        """Bring the shards of these images to this machine, several at a time.

        Raises:
            ShardError: one of them cannot be read.
        """
        shards = {self.index.shard(index) for index in indices}
        self.store.prepare(sorted(shards - self._files.open_shards))

    def epoch_order(self, seed: int, epoch: int) -> Int[Tensor, " n"]:
        """All indices in the order of an epoch, which reads from `window` shards at a time.

        The shards come in a drawn order, round a circle: one at a time joins those that are read from, and another
        leaves. An image is drawn to come anywhere while its shard is among them. At every moment all shards of the
        window have given the same share of their images, on average, the epoch's first and last steps included;
        with no more shards than the window, all orders are equally likely.
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
        block = self._files.read(shard, offset - HEADER, HEADER + length)
        what = f"the shard {self.store.root}/{self.index.shards[shard]}"
        return EncodedImage(self.name(index), content_of(block, length, what))


def window_of(sizes: Sequence[int]) -> int:
    """How many of the shards of these sizes (bytes) are read from at a time.

    A function of the collection alone, so that a run is the same wherever its shards lie.

    >>> window_of([64 * 2**20] * 1000), window_of([2**30] * 1000), window_of([2**20] * 3)
    (64, 8, 3)
    """
    mean = max(1, sum(sizes) // len(sizes))
    return min(len(sizes), max(LEAST_SHARDS, min(WINDOW_SHARDS, WINDOW_BYTES // mean)))


class _OpenFiles:
    """The shards that a process reads from, the last used ones kept open."""

    def __init__(self, store: ShardStore, *, most: int) -> None:
        self.store = store
        self.most = most
        self._forget()

    @property
    def open_shards(self) -> set[int]:
        """Numbers of the shards that are open."""
        self._after_fork()
        return set(self._files)

    def read(self, shard: int, offset: int, length: int) -> bytes:
        """So many bytes of a shard from an offset on, fewer at its end; raises ShardError."""
        self._after_fork()

        def attempt() -> bytes:
            with self._lock:
                try:
                    return _read_at(self._open(shard), offset, length)
                except OSError:
                    self._close(shard)  # a stale handle is not mended by asking again
                    raise

        return self.store.patience.try_to(f"the shard {self.store.root}/{self.store.names[shard]}", attempt)

    def _open(self, shard: int) -> BinaryIO:
        if shard not in self._files:
            while len(self._files) >= self.most:
                self._files.popitem(last=False)[1].close()
            self._files[shard] = self.store.open(shard)
        self._files.move_to_end(shard)
        return self._files[shard]

    def _close(self, shard: int) -> None:
        file = self._files.pop(shard, None)
        if file is not None:
            file.close()

    def _after_fork(self) -> None:
        # A forked process shares the place in a file with its parent: it opens its own.
        if self._pid != os.getpid():
            self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._files: OrderedDict[int, BinaryIO] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self.store, "most": self.most}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)


def _read_at(file: BinaryIO, offset: int, length: int) -> bytes:
    file.seek(offset)
    parts = []
    while length > 0 and (part := file.read(length)):  # unbuffered files may give less than is asked for
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def open_shards(
    root: str | os.PathLike[str],
    *,
    max_pixels: int = MAX_PIXELS,
    cache_dir: str | os.PathLike[str] = CACHE_DIR,
    cache_gib: float = CACHE_GIB,
    patience: Patience = Patience(),  # noqa: B008
) -> ShardedImages:
    """The images of the tar shards in a folder, of one tar file, or of the shards below a URL.

    The list of images is read from `INDEX`, which `cribo shard` writes, or made by a walk over the shards, once.
    Shards from a URL pass through `cache_dir`, whole, those used last staying there.

    Args:
        root: a folder, a .tar file, or a URL that fsspec understands, such as s3://bucket/prefix.
        max_pixels: larger images are unreadable.
        cache_dir: where shards from a URL are kept.
        cache_gib: how much of them together, in GiB.
        patience: with a storage that fails or stalls.

    Raises:
        DataError: nothing there, broken shards, or a cache too small for the shards that are read at a time.
        ShardError: the storage does not answer.

    >>> images = open_shards("s3://pictures/street", cache_gib=20)  # doctest: +SKIP
    """
    if not is_url(root):
        require(Path(root).expanduser())
        return ShardedImages(LocalShards(root, patience=patience), max_pixels=max_pixels)
    if not cache_gib > 0:
        raise DataError(f"cache_gib must be > 0, got {cache_gib}")
    cache = ShardCache(cache_dir, limit_bytes=int(cache_gib * 2**30))
    images = ShardedImages(RemoteShards(str(root), cache, patience=patience), max_pixels=max_pixels)
    _require_room(images, cache)
    return images


def _require_room(images: ShardedImages, cache: ShardCache) -> None:
    sizes = images.index.sizes
    # The window, and the shard that joins it.
    needed = min(sum(sizes), (images.window + 1) * max(sizes))
    if needed > cache.limit_bytes:
        raise DataError(
            f"data.cache_gib {cache.limit_bytes / 2**30:.3g} is too small for {images.store.root}: {images.window} of "
            f"its shards are read from at a time, which needs {needed / 2**30:.3g} GiB: raise it, or write smaller ones"
        )


def is_url(root: str | os.PathLike[str]) -> bool:
    """Whether this names object storage.

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
    """Whatever can be trained on: image files (see `open_images`) or tar shards (see `open_shards`).

    A folder is one of shards if tar files lie in it and no image lies in or below it, or if `INDEX` does.

    Raises:
        DataError, MissingData, ShardError: as those two do.
    """
    if is_url(root):
        where = f"{os.fspath(root).rstrip('/')}/{images}" if images else root
        return open_shards(where, max_pixels=max_pixels, cache_dir=cache_dir, cache_gib=cache_gib)
    path = Path(root).expanduser() / images
    indexed = (path / INDEX).is_file()
    if path.suffix.lower() == SUFFIX and path.is_file():
        return open_shards(path, max_pixels=max_pixels)
    if path.is_dir() and (indexed or (holds_tars(path) and not has_images(path))):
        return open_shards(path, max_pixels=max_pixels)
    return open_images(root, images, max_pixels=max_pixels, inside=inside)
