"""Extraction of patch features from images, in memory or in the disk cache."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from scipy.sparse import csr_array
from torch import Tensor
from torch.utils.data import Dataset

from cribo.base.console import Progress, no_progress
from cribo.base.devices import available_memory
from cribo.data import ImageFiles, LabelledImages, LabelledSubset
from cribo.data.batches import Batches
from cribo.data.labelled.crops import resize_labels
from cribo.features.cache import DTYPES, FeatureCache, Machine, in_blocks, require_room, store, stored
from cribo.features.config import FeaturePrecision
from cribo.features.encoder import Encoder
from cribo.features.grid import grid_size
from cribo.features.patches import augment_image, augment_labels, class_counts, resize_image
from cribo.method.config import Interpolation

_PROBE_VIEWS = 32  # number of encoded views from which the total size is estimated
_PENDING_BATCHES = 8  # maximum number of images queued for batches of equal size, in batches


class EncodedView(NamedTuple):
    """An image or one of its augmented views.

    Attributes:
        image: index of the image in its data set.
        augmentation: index of the augmented view; None for the image itself.
    """

    image: int
    augmentation: int | None = None


@dataclass(frozen=True)
class Preparation:
    """Resizing and augmentation of images before encoding, and normalisation of their features.

    Attributes:
        patch_size: patch size in pixels.
        size: (height, width) of all images; None rounds the size of each image to multiples of the patch size.
        interpolation: interpolation of resized images.
        seed: seed of the augmentations.
        unit: whether features are scaled to unit length.
    """

    patch_size: int
    size: tuple[int, int] | None = None
    interpolation: Interpolation = "bicubic"
    seed: int = 0
    unit: bool = True

    def image(self, images: LabelledImages, view: EncodedView) -> UInt8[Tensor, "c h w"]:
        """Return the resized or augmented image."""
        image = images.load(view.image)
        size = self.size or grid_size(image.shape[1], image.shape[2], self.patch_size)
        if view.augmentation is None:
            return resize_image(image, size, self.interpolation)
        return augment_image(image, size, self.interpolation, (self.seed, view.image, view.augmentation))

    def labels(self, images: LabelledImages, view: EncodedView) -> UInt8[Tensor, "h w"]:
        """Return the label map, resized or augmented like the image."""
        labels = images.labels(view.image)
        size = self.size or grid_size(labels.shape[0], labels.shape[1], self.patch_size)
        if view.augmentation is None:
            return resize_labels(labels, size)
        return augment_labels(labels, size, (self.seed, view.image, view.augmentation))

    def key(self, view: EncodedView) -> str:
        """Return the cache key of the preparation, which does not include the image and the encoder."""
        augmentation = "" if view.augmentation is None else f" {self.seed} {view.image} {view.augmentation}"
        return f"{self.patch_size} {self.size} {self.interpolation}{augmentation}{'' if self.unit else ' raw'}"


@dataclass
class PatchFeatures:
    """Patch features of views, in memory or in the cache, with the class counts of each patch.

    Attributes:
        dim: D, number of feature channels.
        counts: (N, C + 1) pixel counts of each class in each patch (`patches.class_counts`), by view; sparse, since
            most patches contain only one or two classes.
        sizes: (height, width) at which each view was encoded.
        held: features of each view, or the path of their cache file.
    """

    dim: int = 0
    counts: dict[EncodedView, csr_array] = field(default_factory=dict)
    sizes: dict[EncodedView, tuple[int, int]] = field(default_factory=dict)
    held: dict[EncodedView, Tensor | Path] = field(default_factory=dict)

    @property
    def patches(self) -> int:
        """Number of patches of all views."""
        return sum(map(self.patches_of, self.counts))

    def patches_of(self, view: EncodedView) -> int:
        """Return the number of patches of a view."""
        return self.counts[view].shape[0]  # pyright: ignore[reportOptionalSubscript]: SciPy has no types

    def features(self, view: EncodedView) -> Float[Tensor, "n d"]:
        """Return the stored features of a view, of unit length unless `Preparation.unit` is False."""
        return stored(self.held[view])

    def grid(self, view: EncodedView) -> tuple[int, int]:
        """Return the number of rows and columns of patches."""
        height, width = self.sizes[view]
        side = round((height * width / self.patches_of(view)) ** 0.5)
        return height // side, width // side


class SelectedKeys:
    """Selected patches as the keys of a search (`search.Keys`).

    Args:
        source: features of the views.
        rows: indices of the selected patches, by view.
    """

    def __init__(self, source: PatchFeatures, rows: Mapping[EncodedView, Int[Tensor, " m"]]) -> None:
        self.source, self.rows, self.dim = source, rows, source.dim
        self._length = sum(len(kept) for kept in rows.values())

    def __len__(self) -> int:
        return self._length

    def blocks(self, rows: int) -> Iterator[Float[Tensor, "m d"]]:
        """Yield all keys in order, in blocks of at most `rows`."""
        return in_blocks(map(self._selected, self.rows), rows)

    def _selected(self, view: EncodedView) -> Float[Tensor, "m d"]:
        features, kept = self.source.features(view), self.rows[view]
        return features if len(kept) == len(features) else features[kept]


def in_chunks(sizes: Mapping[EncodedView, int]) -> Iterator[list[EncodedView]]:
    """Split views into as few chunks as fit in half of the free memory, since all keys are read once per chunk.

    Args:
        sizes: memory that the search takes for each view, in bytes.
    """
    limit = available_memory("cpu") // 2
    chunk: list[EncodedView] = []
    used = 0
    for view, size in sizes.items():
        if chunk and used + size > limit:
            yield chunk
            chunk, used = [], 0
        chunk.append(view)
        used += size
    if chunk:
        yield chunk


@torch.no_grad()
def extract_patches(
    encoder: Encoder,
    images: LabelledImages,
    views: Sequence[EncodedView],
    preparation: Preparation,
    *,
    machine: Machine | None = None,
    precision: FeaturePrecision = "float32",
    progress: Progress = no_progress,
    what: str = "features",
) -> PatchFeatures:
    """Encode views that are not cached yet, and count the classes in their patches.

    Args:
        encoder: the encoder, on its device.
        images: images of the views.
        views: views to encode.
        preparation: resizing and augmentation of the views.
        machine: resources; without a cache, all features are kept in memory.
        precision: precision of the stored features.
        progress: progress callback.
        what: name of this phase in `progress`.

    Raises:
        UnreadableImage, DataError: an image or label map is unusable.
        ValueError: the features do not fit in memory (without a cache) or on the disk (with one), raised after the
            first images; or the encoder returns a number of features that differs from the number of patches.
    """
    machine = machine or Machine()
    cache, found = machine.cache, PatchFeatures()
    prepared_views = _Views(images, list(views), preparation, cache, precision)
    loader = Batches(prepared_views, itemgetter(0), workers=machine.workers)
    missing = seen = 0  # uncached views, and all views from the first uncached one on

    def uncached() -> Iterator[_Prepared]:
        nonlocal missing, seen
        for done, prepared in enumerate(loader, 1):
            missing += prepared.image is not None
            seen += missing > 0
            found.counts[prepared.view], found.sizes[prepared.view] = prepared.counts, prepared.size
            if prepared.image is not None:
                yield prepared
            elif prepared.path is not None:
                found.held[prepared.view], found.dim = prepared.path, prepared.dim
            progress(what, done, len(views))

    checked = False
    for batch in _of_equal_size(uncached(), machine.batch_size):
        pixels = [torch.from_numpy(prepared.image) for prepared in batch if prepared.image is not None]
        features = encoder.grids(torch.stack(pixels)).flatten(1, 2)
        if preparation.unit:
            features = F.normalize(features, dim=-1)
        found.dim = features.shape[-1]
        for prepared, rows in zip(batch, features.to(DTYPES[precision]).cpu(), strict=True):
            found.held[prepared.view] = store(rows, prepared.path, cache)
        if not checked and missing >= _PROBE_VIEWS:
            expected = (len(views) - len(found.held)) * missing / seen  # estimated number of views left to encode
            patches = found.patches / len(found.counts)
            require_room(patches * expected * found.dim * DTYPES[precision].itemsize, cache)
            checked = True
    return found


def content_hash(images: LabelledImages, index: int) -> str:
    """Return the SHA-256 hash of an image's file, or of its pixels if it has no file."""
    if isinstance(images, LabelledSubset):
        return content_hash(images.images, images.indices[index])
    if isinstance(images, ImageFiles):
        with Path(images.path(index)).open("rb") as file:
            found = hashlib.file_digest(file, "sha256")
        found.update(images.reading.key)
        return found.hexdigest()
    pixels = images.load(index)
    return hashlib.sha256(f"{tuple(pixels.shape)}".encode() + pixels.numpy().tobytes()).hexdigest()


class _Prepared(NamedTuple):
    """A prepared view; `image` is None if its features are cached."""

    view: EncodedView
    image: UInt8[np.ndarray, "c h w"] | None
    counts: csr_array
    size: tuple[int, int]
    path: Path | None
    dim: int


@dataclass
class _Views(Dataset[_Prepared]):
    """Data set that reads, resizes and counts classes in the workers."""

    images: LabelledImages
    views: list[EncodedView]
    preparation: Preparation
    cache: FeatureCache | None
    precision: FeaturePrecision

    def __len__(self) -> int:
        return len(self.views)

    def __getitem__(self, number: int) -> _Prepared:
        view = self.views[number]
        path, kept = None, None
        if self.cache is not None:
            content = content_hash(self.images, view.image)
            path = self.cache.path(content, self.preparation.key(view), self.precision)
            kept = self.cache.read(path)
        # NumPy arrays are pickled to the main process; tensors would use file descriptors and shared memory, which is
        # scarce in containers.
        image = self.preparation.image(self.images, view).numpy() if kept is None else None
        labels = self.preparation.labels(self.images, view)
        counts = class_counts(labels, self.preparation.patch_size, len(self.images.classes), self.images.ignore_index)
        size = (labels.shape[0], labels.shape[1])
        return _Prepared(view, image, csr_array(counts.int().numpy()), size, path, 0 if kept is None else kept.shape[1])


def _of_equal_size(images: Iterable[_Prepared], batch_size: int) -> Iterator[list[_Prepared]]:
    """Group images of equal size into batches, with a bounded queue."""
    waiting: dict[tuple[int, int], list[_Prepared]] = {}
    for prepared in images:
        waiting.setdefault(prepared.size, []).append(prepared)
        fullest = max(waiting.values(), key=len)
        if len(fullest) == batch_size or sum(map(len, waiting.values())) == _PENDING_BATCHES * batch_size:
            yield waiting.pop(fullest[0].size)
    yield from waiting.values()
