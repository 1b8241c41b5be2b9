"""A cache of features on disk, with a key of encoder, image and preparation."""

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import timm
import torch
from jaxtyping import Float
from torch import Tensor

from cribo.errors import InputError
from cribo.files import write_json, write_whole
from cribo.retrieval.choices import FeaturePrecision
from cribo.retrieval.search import available_memory

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "float16": torch.float16}
"""The types that features are stored in."""

# Raised when the same backbone and image would give other features than before.
_CACHE_VERSION = 1
_ABOUT = "about.json"


class Encoder(Protocol):
    """Something that gives features."""

    @property
    def identity(self) -> str | None:
        """What tells this encoder from all others; None keeps it out of the cache."""
        ...


class FeatureCache:
    """Features on disk, under names that tell encoder, images and preparation apart.

    Files are written atomically and never change: several processes may fill one cache at once, and an interrupted
    one continues. Nothing needs clearing when weights, images or sizes change; files no longer asked for are not read.

    Args:
        folder: created with the first features.
        encoder: whose features.
        about: facts about the encoder, for people who look into the folder.

    Raises:
        ValueError: an encoder without identity.
    """

    def __init__(self, folder: Path, encoder: Encoder, about: Mapping[str, object] | None = None) -> None:
        if encoder.identity is None:
            raise InputError("an encoder without identity cannot be cached: give it one, or use no cache")
        # Another version of timm may compute a network differently.
        identity = f"{_CACHE_VERSION} {timm.__version__} {encoder.identity}"
        self.folder = folder.expanduser() / hashlib.sha256(identity.encode()).hexdigest()[:20]
        self._about = {"encoder": encoder.identity, "timm": timm.__version__, **(about or {})}

    def path(self, content: str, preparation: str, precision: FeaturePrecision) -> Path:
        """Return the file for the features of images with this content."""
        name = hashlib.sha256(f"{content} {preparation} {precision}".encode()).hexdigest()
        return self.folder / name[:2] / f"{name[2:34]}.npy"

    def read(self, path: Path) -> np.ndarray | None:
        """Return the (N, D) features in a file, None if it does not exist or is damaged."""
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):  # shorter than its header says, or no array
            return None

    def write(self, path: Path, features: np.ndarray) -> None:
        """Store features.

        Raises:
            ValueError: the folder cannot be written, or is full.
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
                f"cannot keep features in {self.folder} ({error.strerror or error}): make room, give another --cache, "
                "or do without with --cache none"
            ) from error


@dataclass
class Machine:
    """Resources of an evaluation that does not train; the result does not depend on them beyond rounding.

    Args:
        devices: the search is shared among them.
        batch_size: images encoded at once, if they have the same size.
        workers: processes that read images.
        memory_gib: what the search may use on each device; half of the free memory if None.
        cache: stores features; None keeps them in memory.
    """

    devices: tuple[str, ...] = ("cpu",)
    batch_size: int = 16
    workers: int = 0
    memory_gib: float | None = None
    cache: FeatureCache | None = None

    @property
    def budget(self) -> int:
        """Bytes that a search may use on each device."""
        if self.memory_gib is not None:
            return int(self.memory_gib * 2**30)
        return min(available_memory(device) for device in self.devices) // 2


def store(rows: Float[Tensor, "n d"], path: Path | None, cache: FeatureCache | None) -> Tensor | Path:
    """Write features to the cache and return their path; without a cache, return a copy of them."""
    if cache is None or path is None:
        return rows.clone()  # a view of the batch would keep all of it alive
    cache.write(path, rows.numpy())
    return path


def stored(held: Tensor | Path) -> Float[Tensor, "n d"]:
    """Return features that `store` has stored."""
    return held if isinstance(held, Tensor) else torch.from_numpy(np.load(held, allow_pickle=False))


def require_room(needed: float, cache: FeatureCache | None) -> None:
    """Check that features fit where they are to be stored.

    Args:
        needed: bytes.
        cache: that stores them; None for memory.

    Raises:
        ValueError: they do not fit.
    """
    if cache is None:
        room, place = available_memory("cpu"), "memory"
        advice = "keep them on disk with --cache FOLDER, or in half the room with --precision float16"
    else:
        folder = next(parent for parent in (cache.folder, *cache.folder.parents) if parent.exists())
        room, place = shutil.disk_usage(folder).free, str(folder)
        advice = "give a --cache with more room, or halve what is needed with --precision float16"
    if needed > room:
        raise InputError(
            f"the features need about {needed / 2**30:.1f} GiB, {place} has {room / 2**30:.1f} GiB free: {advice}"
        )
