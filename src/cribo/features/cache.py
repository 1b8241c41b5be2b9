"""Disk cache of features, keyed by encoder, image content and preparation."""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import timm
import torch
from jaxtyping import Float
from torch import Tensor

from cribo.base.devices import available_memory
from cribo.base.errors import InputError
from cribo.base.files import write_json, write_whole
from cribo.features.config import FeaturePrecision
from cribo.features.search import Keys, Neighbours, nearest

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "float16": torch.float16}
"""Data types of stored features."""

# Increased whenever the features of the same backbone and image change.
_CACHE_VERSION = 1
_ABOUT = "about.json"


class FeatureCache:
    """Disk cache of features, keyed by encoder, image content and preparation.

    Files are written atomically and never modified, so several processes may fill one cache concurrently, and an
    interrupted run reuses its files. Changed weights, images or sizes have other keys and need no clearing.

    Args:
        folder: parent folder of the cache, created on the first write.
        identity: key of the encoder of the features.
        about: description of the encoder, written to `about.json` for information.

    Raises:
        ValueError: the encoder has no identity.
    """

    def __init__(self, folder: Path, identity: str | None, about: Mapping[str, object] | None = None) -> None:
        if identity is None:
            raise InputError("an encoder without identity cannot be cached: set its identity, or disable the cache")
        # Another version of timm may compute a network differently.
        key = f"{_CACHE_VERSION} {timm.__version__} {identity}"
        self.folder = folder.expanduser() / hashlib.sha256(key.encode()).hexdigest()[:20]
        self._about = {"encoder": identity, "timm": timm.__version__, **(about or {})}

    def path(self, content: str, preparation: str, precision: FeaturePrecision) -> Path:
        """Return the file of the features of an image, given its content hash."""
        name = hashlib.sha256(f"{content} {preparation} {precision}".encode()).hexdigest()
        return self.folder / name[:2] / f"{name[2:34]}.npy"

    def read(self, path: Path) -> np.ndarray | None:
        """Return the (N, D) features in a file, None if it does not exist or is corrupt."""
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):  # truncated, or not an array
            return None

    def write(self, path: Path, features: np.ndarray) -> None:
        """Store features.

        Raises:
            ValueError: the folder is not writable, or the disk is full.
        """

        def save(part: Path) -> None:
            with part.open("wb") as file:
                np.save(file, features, allow_pickle=False)

        about = self.folder / _ABOUT
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not about.exists():
                write_json(about, self._about)
            write_whole(path, save)
        except OSError as error:
            raise InputError(
                f"cannot write features to {self.folder} ({error.strerror or error}): free disk space, choose another "
                "--cache, or disable it with --cache none"
            ) from error


@dataclass
class Machine:
    """Resources of an evaluation without training; results do not depend on them beyond rounding.

    Args:
        devices: devices that share the search; the first one encodes.
        batch_size: number of images of equal size to encode at once.
        workers: number of worker processes that read images.
        memory_gib: memory limit of the search on each device, in GiB; half of the free memory if None.
        cache: cache of the features; None keeps them in memory.
    """

    devices: tuple[str, ...] = ("cpu",)
    batch_size: int = 16
    workers: int = 0
    memory_gib: float | None = None
    cache: FeatureCache | None = None

    @property
    def budget(self) -> int:
        """Memory limit of a search on each device, in bytes."""
        if self.memory_gib is not None:
            return int(self.memory_gib * 2**30)
        return min(available_memory(device) for device in self.devices) // 2

    def search(
        self,
        queries: Float[Tensor, "q d"],
        keys: Keys,
        neighbours: int,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Neighbours:
        """Return the nearest keys of each query by exact search within the memory limit (`search.nearest`).

        Args:
            queries: (Q, D).
            keys: keys to search.
            neighbours: k.
            progress: called with the number of compared keys.
        """
        return nearest(queries, keys, neighbours, devices=self.devices, budget=self.budget, progress=progress)


def store(rows: Float[Tensor, "n d"], path: Path | None, cache: FeatureCache | None) -> Tensor | Path:
    """Write features to the cache and return their path, or return a copy if there is no cache."""
    if cache is None or path is None:
        return rows.clone()  # a view would keep the whole batch in memory
    cache.write(path, rows.numpy())
    return path


def stored(held: Tensor | Path) -> Float[Tensor, "n d"]:
    """Return features stored by `store`."""
    return held if isinstance(held, Tensor) else torch.from_numpy(np.load(held, allow_pickle=False))


def in_blocks(parts: Iterable[Float[Tensor, "_ d"]], rows: int) -> Iterator[Float[Tensor, "m d"]]:
    """Regroup parts of any length into blocks of `rows` rows; the last block may be shorter.

    Example:
        >>> [len(block) for block in in_blocks([torch.zeros(5, 2), torch.zeros(1, 2)], 4)]
        [4, 2]
    """
    gathered, waiting = [], 0
    for part in parts:
        while len(part):
            taken = part[: rows - waiting]
            gathered.append(taken)
            waiting += len(taken)
            part = part[len(taken) :]
            if waiting == rows:
                yield torch.cat(gathered)
                gathered, waiting = [], 0
    if waiting:
        yield torch.cat(gathered)


def require_room(needed: float, cache: FeatureCache | None) -> None:
    """Check that features fit in memory or on the disk of the cache.

    Args:
        needed: size of the features in bytes.
        cache: cache that stores them; None for memory.

    Raises:
        ValueError: they do not fit.
    """
    if cache is None:
        room, place = available_memory("cpu"), "memory"
        advice = "store them on disk with --cache FOLDER, or halve their size with --precision float16"
    else:
        folder = next(parent for parent in (cache.folder, *cache.folder.parents) if parent.exists())
        room, place = shutil.disk_usage(folder).free, str(folder)
        advice = "choose a --cache on a larger disk, or halve their size with --precision float16"
    if needed > room:
        raise InputError(
            f"the features need about {needed / 2**30:.1f} GiB, {place} has {room / 2**30:.1f} GiB free: {advice}"
        )
