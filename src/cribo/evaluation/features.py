"""Features of all patches of many images, computed once."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cribo.console import Progress
from cribo.data import ImageFiles, LabelledImages, LabelledSubset, UnreadableImage
from cribo.data.crops import resize_labels
from cribo.data.loading import unchanged
from cribo.evaluation.cache import DTYPES, FeatureCache, require_room
from cribo.retrieval.choices import FeaturePrecision, Interpolation
from cribo.retrieval.encoders import PatchEncoder
from cribo.retrieval.patches import augment_image, augment_labels, class_counts, grid_size, resize_image
from cribo.retrieval.search import in_blocks

_PROBE_VIEWS = 32  # to be encoded, after which it is clear how much room all of them need
_PENDING_BATCHES = 8  # images of many sizes that may wait for others of their size


class EncodedView(NamedTuple):
    """An image as it is encoded.

    Attributes:
        image: its index in its collection.
        augmentation: number of the augmented view (hummingbird protocol), None for the image as it is.
    """

    image: int
    augmentation: int | None = None


@dataclass(frozen=True)
class Preparation:
    """How an image becomes what is encoded.

    Attributes:
        patch_size: pixels.
        size: (height, width) of all images; None for the closest multiple of the patch size of each.
        interpolation: of the resized image.
        seed: of the augmentations.
    """

    patch_size: int
    size: tuple[int, int] | None = None
    interpolation: Interpolation = "bicubic"
    seed: int = 0

    def image(self, images: LabelledImages, view: EncodedView) -> UInt8[Tensor, "3 h w"]:
        """The pixels to encode."""
        image = images.load(view.image)
        size = grid_size(image.shape[1], image.shape[2], self.patch_size, self.size)
        if view.augmentation is None:
            return resize_image(image, size, self.interpolation)
        return augment_image(image, size, self.interpolation, (self.seed, view.image, view.augmentation))

    def labels(self, images: LabelledImages, view: EncodedView) -> UInt8[Tensor, "h w"]:
        """The labels of these pixels."""
        labels = images.labels(view.image)
        size = grid_size(labels.shape[0], labels.shape[1], self.patch_size, self.size)
        if view.augmentation is None:
            return resize_labels(labels, size)
        return augment_labels(labels, size, (self.seed, view.image, view.augmentation))

    def key(self, view: EncodedView) -> str:
        """What of it decides the pixels of a view, beside the image."""
        augmentation = "" if view.augmentation is None else f" {self.seed} {view.image} {view.augmentation}"
        return f"{self.patch_size} {self.size} {self.interpolation}{augmentation}"


class SparseCounts(NamedTuple):
    """The classes in the patches of a view; few of all there are lie in any one patch.

    Attributes:
        patches: how many.
        columns: classes, one for pixels without class among them.
        places: patch * columns + class of every pair that occurs, ascending.
        pixels: how many pixels each of them has.
    """

    patches: int
    columns: int
    places: np.ndarray
    pixels: np.ndarray

    def dense(self) -> Int[Tensor, "n c_plus_1"]:
        """As `patches.class_counts` gives them."""
        counts = torch.zeros(self.patches * self.columns, dtype=torch.long)
        counts[torch.from_numpy(self.places).long()] = torch.from_numpy(self.pixels).long()
        return counts.view(self.patches, self.columns)


def sparse_counts(counts: Int[Tensor, "n c_plus_1"]) -> SparseCounts:
    """Keep what is not 0."""
    flat = counts.flatten()
    places = flat.nonzero()[:, 0]
    patches, columns = counts.shape
    return SparseCounts(patches, columns, places.int().numpy(), flat[places].int().numpy())


@dataclass
class PatchFeatures:
    """Normalised features of views, wherever they are kept, and the classes in their patches.

    Attributes:
        dim: D.
        counts: of each view, the classes in its patches.
        sizes: of each view, (height, width) at which it was encoded.
        held: of each view, the features or the file of the cache that holds them.
    """

    dim: int = 0
    counts: dict[EncodedView, SparseCounts] = field(default_factory=dict)
    sizes: dict[EncodedView, tuple[int, int]] = field(default_factory=dict)
    held: dict[EncodedView, Tensor | Path] = field(default_factory=dict)

    def features(self, view: EncodedView) -> Float[Tensor, "n d"]:
        """Of one view, of unit length, in the precision they are kept in."""
        held = self.held[view]
        return held if isinstance(held, Tensor) else torch.from_numpy(np.load(held, allow_pickle=False))


class SelectedKeys:
    """Some patches of some views as the keys of a search (`search.Keys`).

    Args:
        source: the features.
        rows: of each view, which of its patches.
    """

    def __init__(self, source: PatchFeatures, rows: Mapping[EncodedView, Int[Tensor, " m"]]) -> None:
        self.source = source
        self.rows = rows
        self.dim = source.dim
        self._length = sum(len(kept) for kept in rows.values())

    def __len__(self) -> int:
        return self._length

    def blocks(self, rows: int) -> Iterator[Float[Tensor, "m d"]]:
        """All keys in order, at most `rows` at once."""
        return in_blocks(map(self._selected, self.rows), rows)

    def _selected(self, view: EncodedView) -> Float[Tensor, "m d"]:
        features, kept = self.source.features(view), self.rows[view]
        return features if len(kept) == len(features) else features[kept]


@torch.no_grad()
def extract_patches(
    encoder: PatchEncoder,
    images: LabelledImages,
    views: Sequence[EncodedView],
    preparation: Preparation,
    *,
    cache: FeatureCache | None = None,
    precision: FeaturePrecision = "float32",
    batch_size: int = 16,
    workers: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    what: str = "features",
) -> PatchFeatures:
    """Encode views, except those whose features the cache holds, and count the classes in their patches.

    Args:
        encoder: on `device`.
        images: where the views come from.
        views: which ones.
        preparation: how they are resized or augmented.
        cache: read and filled; None holds all features in memory.
        precision: in which they are kept.
        batch_size: images encoded at once, where they are of one size.
        workers: processes that read images.
        device: where it is computed.
        progress: is told how far it is.
        what: the name of it all in `progress`.

    Raises:
        UnreadableImage, DataError: an image or label map that cannot be used.
        ValueError: the features do not fit in memory (without a cache) or on the disk (with one), said after the
            first images; or the encoder gives another number of features than there are patches.
    """
    found = PatchFeatures()
    dataset = _Views(images, list(views), preparation, cache, precision)
    loader = DataLoader(
        dataset,
        batch_size=None,
        collate_fn=unchanged,  # the default would take the named tuples apart
        num_workers=workers,
        prefetch_factor=4 if workers else None,
    )
    batches = _Batches(batch_size)
    missing = seen = 0  # views that the cache does not hold, among those since the first of them
    checked = False

    def encode(batch: list[_Prepared]) -> None:
        pixels = [torch.from_numpy(prepared.image) for prepared in batch if prepared.image is not None]
        features = F.normalize(encoder.grids(torch.stack(pixels), device), dim=-1).flatten(1, 2)
        for prepared, rows in zip(batch, features.to(DTYPES[precision]).cpu(), strict=True):
            found.dim = rows.shape[1]
            found.held[prepared.view] = _keep(rows, prepared.path, cache)

    for done, prepared in enumerate(loader, 1):
        if isinstance(prepared, Exception):
            raise prepared
        missing += prepared.image is not None
        seen += missing > 0
        found.counts[prepared.view], found.sizes[prepared.view] = prepared.counts, prepared.size
        if prepared.image is None:
            found.held[prepared.view], found.dim = prepared.path, prepared.dim
        else:
            for batch in batches.add(prepared):
                encode(batch)
        if not checked and missing >= _PROBE_VIEWS and found.dim:
            expected = (len(views) - len(found.held)) * missing / seen
            require_room(_bytes_needed(found, expected, precision), cache)
            checked = True
        if progress is not None:
            progress(what, done, len(views))
    for batch in batches.rest():
        encode(batch)
    return found


def content_hash(images: LabelledImages, index: int) -> str:
    """What tells an image from all others: a hash of its file, or of its pixels where it has none."""
    if isinstance(images, LabelledSubset):
        return content_hash(images.images, images.indices[index])
    if isinstance(images, ImageFiles):
        with Path(images.path(index)).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    pixels = images.load(index)
    return hashlib.sha256(f"{tuple(pixels.shape)}".encode() + pixels.numpy().tobytes()).hexdigest()


class _Prepared(NamedTuple):
    """A view on its way to the encoder; without `image` where the cache has its features already."""

    view: EncodedView
    image: UInt8[np.ndarray, "3 h w"] | None
    counts: SparseCounts
    size: tuple[int, int]
    path: Path | None
    dim: int


class _Views(Dataset[_Prepared | Exception]):
    """Reads, resizes and counts, in the workers.

    What is wrong with an image is handed over like the image itself: an error that is raised in a worker would
    arrive as a text of its traceback.
    """

    def __init__(
        self,
        images: LabelledImages,
        views: list[EncodedView],
        preparation: Preparation,
        cache: FeatureCache | None,
        precision: FeaturePrecision,
    ) -> None:
        self.images = images
        self.views = views
        self.preparation = preparation
        self.cache = cache
        self.precision: FeaturePrecision = precision

    def __len__(self) -> int:
        return len(self.views)

    def __getitem__(self, number: int) -> _Prepared | Exception:
        try:
            return self._prepared(self.views[number])
        except (UnreadableImage, ValueError, OSError) as error:
            return error

    def _prepared(self, view: EncodedView) -> _Prepared:
        path, kept = None, None
        if self.cache is not None:
            content = content_hash(self.images, view.image)
            path = self.cache.path(content, self.preparation.key(view), self.precision)
            kept = self.cache.read(path)
        # NumPy arrays travel through the worker's pipe; tensors would each hold a file open, and shared memory,
        # of which containers have little.
        image = self.preparation.image(self.images, view).numpy() if kept is None else None
        labels = self.preparation.labels(self.images, view)
        counts = class_counts(labels, self.preparation.patch_size, len(self.images.classes), self.images.ignore_index)
        size = (labels.shape[0], labels.shape[1])
        return _Prepared(view, image, sparse_counts(counts), size, path, 0 if kept is None else kept.shape[1])


class _Batches:
    """Collects images of one size into batches; a bounded number of images waits for others of their size."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._waiting: dict[tuple[int, int], list[_Prepared]] = {}
        self._count = 0

    def add(self, prepared: _Prepared) -> Iterator[list[_Prepared]]:
        """Take one more in; gives the batch that has become full, or has waited with too many others."""
        self._waiting.setdefault(prepared.size, []).append(prepared)
        self._count += 1
        fullest = max(self._waiting, key=lambda size: len(self._waiting[size]))
        if len(self._waiting[fullest]) == self.batch_size or self._count == _PENDING_BATCHES * self.batch_size:
            yield self._take(fullest)

    def rest(self) -> Iterator[list[_Prepared]]:
        """All that still waits."""
        for size in list(self._waiting):
            yield self._take(size)

    def _take(self, size: tuple[int, int]) -> list[_Prepared]:
        batch = self._waiting.pop(size)
        self._count -= len(batch)
        return batch


def _keep(rows: Float[Tensor, "n d"], path: Path | None, cache: FeatureCache | None) -> Tensor | Path:
    """Put features where they stay."""
    if cache is None or path is None:
        return rows.clone()  # a row of the batch would keep all of it alive
    cache.write(path, rows.numpy())
    return path


def _bytes_needed(found: PatchFeatures, missing: float, precision: FeaturePrecision) -> float:
    """What so many more views will take, if they have as many patches as those before."""
    patches = [counts.patches for counts in found.counts.values()]
    return sum(patches) / len(patches) * missing * found.dim * DTYPES[precision].itemsize
