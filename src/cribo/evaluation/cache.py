"""Features on disk: computed once, found again by whose they are and of what."""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import timm
import torch

from cribo.files import write_json, write_whole
from cribo.retrieval.choices import FeaturePrecision
from cribo.retrieval.search import available_memory

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "float16": torch.float16}
"""In which features are kept."""

# Raised when the same backbone and image would give other features than before.
_CACHE_VERSION = 1
_ABOUT = "about.json"


class Encoder(Protocol):
    """What gives features."""

    @property
    def identity(self) -> str | None:
        """What tells this encoder from all others; None keeps it out of the cache."""
        ...


class FeatureCache:
    """Features on disk, under names that tell encoder, images and preparation apart.

    A file is there whole or not at all, and its name says what must be in it: two processes may fill one cache
    at once, and one that was cut short goes on where it stopped. Nothing has to be cleared when weights, images
    or sizes change: what is not asked for any more is only not read any more.

    Args:
        folder: made when the first features are written.
        encoder: whose features.
        about: what a person who finds the folder should know about it.

    Raises:
        ValueError: an encoder without identity.
    """

    def __init__(self, folder: Path, encoder: Encoder, about: Mapping[str, object] | None = None) -> None:
        if encoder.identity is None:
            raise ValueError("an encoder without identity cannot be cached: give it one, or do without the cache")
        # Another version of timm may compute a network differently.
        identity = f"{_CACHE_VERSION} {timm.__version__} {encoder.identity}"
        self.folder = folder.expanduser() / hashlib.sha256(identity.encode()).hexdigest()[:20]
        self._about = {"encoder": encoder.identity, "timm": timm.__version__, **(about or {})}

    def path(self, content: str, preparation: str, precision: FeaturePrecision) -> Path:
        """Where the features of what has that content stand."""
        name = hashlib.sha256(f"{content} {preparation} {precision}".encode()).hexdigest()
        return self.folder / name[:2] / f"{name[2:34]}.npy"

    def read(self, path: Path) -> np.ndarray | None:
        """The (N, D) features in a file, None if it is not there or damaged."""
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):  # shorter than its header says, or no array
            return None

    def write(self, path: Path, features: np.ndarray) -> None:
        """Keep features.

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
            raise ValueError(
                f"cannot keep features in {self.folder} ({error.strerror or error}): make room, give another --cache, "
                "or do without with --cache none"
            ) from error


def require_room(needed: float, cache: FeatureCache | None) -> None:
    """Refuse features that will not fit where they are to be kept.

    Args:
        needed: bytes.
        cache: that keeps them; None for memory.

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
        raise ValueError(
            f"the features need about {needed / 2**30:.1f} GiB, {place} has {room / 2**30:.1f} GiB free: {advice}"
        )
