"""Instance segmentation: regions of a class are split where objects touch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int32, UInt8
from PIL import Image
from scipy import ndimage
from torch import Tensor

from cribo.base.errors import InputError
from cribo.data.reading import read_values
from cribo.features.config import ProbeSettings
from cribo.features.memory.memory import Segmentation, SegmentationMemory

MOST_INSTANCES = 65535
"""Limit on the instances of an image, whose numbers are stored in 16 bits."""

_NECK = 0.9  # a neck is narrower than this share of the parts that it joins (benchmarks/RESULTS.md)
_STEP = 1.5  # and by this many pixels: oblique borders have steps
_LEVELS = 32  # depths at which necks are searched
_CROSS = ndimage.generate_binary_structure(2, 1)  # neighbours of connected pixels

Mask = Bool[np.ndarray, "h w"]
Depth = Float[np.ndarray, "h w"]
Place = tuple[slice, slice]


@dataclass(frozen=True)
class Instance:
    """An object in an image.

    Attributes:
        label: its class.
        area: number of its pixels.
        confidence: mean confidence of its pixels, 0 to 1.
        box: left, top, width and height in pixels.
    """

    label: int
    area: int
    confidence: float
    box: tuple[int, int, int, int]


@dataclass(frozen=True)
class InstanceCounts:
    """The instances of a class in all images.

    Attributes:
        count: number of instances.
        per_image: mean number in an image.
        area: mean number of pixels; NaN without instances.
        confidence: mean confidence, 0 to 1; NaN without instances.
    """

    count: int
    per_image: float
    area: float
    confidence: float

    @classmethod
    def of(cls, instances: Sequence[Instance], images: int = 1) -> "InstanceCounts":
        """Count the instances of a class in so many images."""
        count = len(instances)
        area = sum(each.area for each in instances) / count if count else math.nan
        confidence = sum(each.confidence for each in instances) / count if count else math.nan
        return cls(count, count / max(1, images), area, confidence)


class Instances(NamedTuple):
    """The instances of an image.

    Attributes:
        numbers: number of the instance of each pixel, from 1; 0 for none.
        found: the instances in the order of their numbers.
    """

    numbers: Int32[Tensor, "h w"]
    found: list[Instance]


@dataclass(frozen=True)
class Splitter:
    """Splits the classes of `--instances` in the labels of an image.

    Attributes:
        classes: the classes to split.
        min_area: smaller instances are left out, in pixels; None for the area of a patch.
        patch_size: patch size in pixels of the encoded image.
        settings: settings for resizing images before they are encoded.
    """

    classes: tuple[int, ...]
    min_area: float | None
    patch_size: int
    settings: ProbeSettings

    @classmethod
    def of_names(cls, names: Sequence[str], min_area: float | None, memory: SegmentationMemory) -> "Splitter":
        """Return the splitter for classes of a memory by name; raises InputError if one does not exist."""
        classes = memory.classes
        for name in names:
            if name not in classes:
                raise InputError(f"--instances must be one or more of {', '.join(classes)}, got {name!r}")
        labels = tuple(sorted({classes.index(name) for name in names}))
        return cls(labels, min_area, memory.encoder.patch_size, memory.settings)

    def __call__(self, found: Segmentation) -> Instances:
        """Split the labels of an image; see `split_instances`."""
        patch_area = self.settings.patch_area(self.patch_size, *found.labels.shape)
        min_area = patch_area if self.min_area is None else self.min_area
        return split_instances(found.labels, found.confidence, self.classes, min_area=min_area)


def write_instances(numbers: Int32[Tensor, "h w"], file: Path) -> None:
    """Write the numbers of instances as a grey PNG of 16 bits."""
    Image.fromarray(numbers.numpy().astype(np.uint16)).save(file, "PNG")


def read_instances(file: Path) -> Int32[Tensor, "h w"]:
    """Read the numbers of instances."""
    return torch.from_numpy(np.array(read_values(file)).astype(np.int32))


def split_instances(
    labels: UInt8[Tensor, "h w"],
    confidence: Float[Tensor, "h w"],
    classes: Sequence[int],
    *,
    min_area: float = 1,
) -> Instances:
    """Split the regions of some classes into instances, numbered by class, then from top to bottom.

    Connected regions are split at their necks: where the largest circle inside the region has a radius less than 90 %
    of the radii on both sides. Each pixel belongs to the nearest part, so that parts meet at the neck. The size of the
    objects need not be known. Distances are measured with holes filled, so that small ones split nothing.

    Args:
        labels: class of each pixel.
        confidence: probability of the class, 0 to 1.
        classes: the classes to split.
        min_area: smaller instances are left out, in pixels.

    Example:
        >>> labels = torch.zeros(20, 42, dtype=torch.uint8)
        >>> rows, columns = torch.meshgrid(torch.arange(20), torch.arange(42), indexing="ij")
        >>> for x in (11, 29):  # two discs that touch
        ...     labels[(rows - 10) ** 2 + (columns - x) ** 2 <= 90] = 1
        >>> [instance.area for instance in split_instances(labels, torch.ones(20, 42), [1]).found]
        [293, 286]
    """
    numbers, found = np.zeros(labels.shape, dtype=np.int32), []
    of_pixels, sure = labels.numpy(), confidence.numpy()
    for label in classes:
        for mask, place in _components(of_pixels == label):
            if mask.sum() < min_area:
                continue
            for part, within in _split(mask, _depth(mask)):
                if (area := int(part.sum())) < min_area:
                    continue
                rows, columns = own = _inside(place, within)
                mean = float(sure[own][part].mean())
                box = columns.start, rows.start, columns.stop - columns.start, rows.stop - rows.start
                found.append(Instance(label, area, mean, box))
                numbers[own][part] = len(found)
    return Instances(torch.from_numpy(numbers), found)


def _depth(mask: Mask) -> Depth:
    """Return the distance of each pixel to the outer border of a region."""
    solid: Any = ndimage.binary_fill_holes(mask)
    distance: Any = ndimage.distance_transform_edt(np.pad(solid, 1))
    return np.where(mask, distance[1:-1, 1:-1], 0.0)


def _split(mask: Mask, depth: Depth) -> Iterator[tuple[Mask, Place]]:
    """Yield the parts of a connected region, in their boxes; the region itself if it has no neck."""
    for level in np.linspace(0, depth.max(), _LEVELS, endpoint=False)[1:]:
        seeds = _seeds(depth, level)
        if seeds is not None:
            for part, place in _nearest(mask, seeds):
                for each, within in _split(part, np.where(part, depth[place], 0.0)):
                    yield each, _inside(place, within)
            return
    yield mask, (slice(0, mask.shape[0]), slice(0, mask.shape[1]))


def _seeds(depth: Depth, level: float) -> Int32[np.ndarray, "h w"] | None:
    """Number the parts above a level whose maximum is well above it; None unless there are several."""
    parts = np.zeros(depth.shape, dtype=np.int32)
    count: Any = ndimage.label(depth > level, output=parts)
    if count < 2:
        return None
    deepest = np.array(ndimage.maximum(depth, parts, range(1, count + 1)))
    is_part = np.append(False, level <= np.minimum(_NECK * deepest, deepest - _STEP))
    return np.where(is_part, is_part.cumsum(), 0).astype(np.int32)[parts] if is_part.sum() > 1 else None


def _nearest(mask: Mask, seeds: Int32[np.ndarray, "h w"]) -> Iterator[tuple[Mask, Place]]:
    """Yield the pixels of a region that are nearest to each seed; all parts are connected."""
    places: Any = ndimage.distance_transform_edt(seeds == 0, return_distances=False, return_indices=True)
    nearest = np.where(mask, seeds[tuple(places)], 0)
    for number, place in enumerate(ndimage.find_objects(nearest), start=1):
        for part, within in _components(nearest[place] == number):
            own = _inside(place, within)
            if not (seeds[own][part] == number).any():  # the nearest seed is across a gap
                nearest[own][part] = 0
    while (missing := mask & (nearest == 0)).any():
        nearest[missing] = ndimage.grey_dilation(nearest, footprint=_CROSS)[missing]
    for number, place in enumerate(ndimage.find_objects(nearest), start=1):
        yield nearest[place] == number, place


def _components(mask: Mask) -> Iterator[tuple[Mask, Place]]:
    numbers = np.zeros(mask.shape, dtype=np.int32)
    ndimage.label(mask, output=numbers)
    for number, place in enumerate(ndimage.find_objects(numbers), start=1):
        yield numbers[place] == number, place


def _inside(outer: Place, inner: Place) -> Place:
    """Return the slices of an inner box, given relative to an outer box."""
    rows, columns = (slice(o.start + i.start, o.start + i.stop) for o, i in zip(outer, inner, strict=True))
    return rows, columns
