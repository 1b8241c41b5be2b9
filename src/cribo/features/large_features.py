"""Features and objects of images that are too large to decode as a whole, in windows."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from faster_coco_eval.core import mask as coco_mask
from jaxtyping import Bool, Float

from cribo.base.errors import UnreadableImage
from cribo.data.windows import LargeImage
from cribo.features.config import ObjectSettings
from cribo.features.encoder import Encoder
from cribo.features.object_extraction import MAX_PATCHES, extract_prepared, prepare_image
from cribo.features.objects import Box, GridMask, ImageObject
from cribo.features.windows import WINDOW, WindowGrid, hann_weights, window_batches

_MOST_BYTES = 2**30  # of the features of an image's patches


def feature_windows(
    encoder: Encoder, size: tuple[int, int], settings: ObjectSettings, *, overlap: bool = True
) -> WindowGrid:
    """Return the windows of a large image, each of which is encoded at its own size.

    Their side is `settings.size` pixels, rounded to patches and at most 64 of them, or the fixed size of the network;
    they overlap by a third.
    """
    patch = encoder.patch_size
    side = encoder.image_size or round((settings.size or WINDOW) / patch) * patch
    side = min(max(1, side // patch), math.isqrt(MAX_PATCHES))
    return WindowGrid(size, patch, side, max(1, side * 2 // 3) if overlap else side)


@torch.no_grad()
def large_global(
    encoder: Encoder, image: LargeImage, settings: ObjectSettings, batch_size: int
) -> Float[np.ndarray, " d"]:
    """Return the mean of the global tokens of windows side by side, weighted by the area that only they cover.

    Raises:
        UnreadableImage: pixels cannot be decoded.
    """
    windows = feature_windows(encoder, image.size, settings, overlap=False)
    total, area = torch.zeros(()), 0
    for places, pixels in window_batches(image, windows, batch_size):
        weights = torch.tensor([_new_patches(windows, top, left) for top, left in places], dtype=torch.double)
        total = total + weights @ encoder.global_tokens(pixels).cpu().double()
        area += float(weights.sum())
    return (total / area).float().numpy()


def _new_patches(windows: WindowGrid, top: int, left: int) -> int:
    """Return the number of patches of a window that are in no window above it or to its left."""
    starts, sides = (windows.tops, windows.lefts), windows.shape
    new = [
        start + side - max([0, *(other + side for other in others if other < start)])
        for start, others, side in zip((top, left), starts, sides, strict=True)
    ]
    return new[0] * new[1]


@torch.no_grad()
def large_patches(
    encoder: Encoder, image: LargeImage, settings: ObjectSettings, batch_size: int
) -> Float[np.ndarray, "rows columns d"]:
    """Return the features of all patches; where windows overlap, the mean with Hann weights.

    Raises:
        UnreadableImage: pixels cannot be decoded, or the features take more than 1 GiB.
    """
    windows = feature_windows(encoder, image.size, settings)
    (height, width), (rows, columns), dim = windows.shape, windows.grid, encoder.dim
    if (size := rows * columns * dim * 4) > _MOST_BYTES:
        raise UnreadableImage(
            image.file,
            f"the features of {rows} x {columns} patches with {dim} channels take {size / 2**30:.1f} GiB, more than 1: "
            "embed objects or global features,",
        )
    found, weights = np.zeros((rows, columns, dim), np.float32), np.zeros((rows, columns, 1), np.float32)
    weight = hann_weights(height, width).numpy()
    for places, pixels in window_batches(image, windows, batch_size):
        for (top, left), grid in zip(places, encoder.grids(pixels).cpu().numpy(), strict=True):
            area = slice(top, top + height), slice(left, left + width)
            found[area] += weight * grid
            weights[area] += weight
    found /= weights
    return found


@torch.no_grad()
def large_objects(
    encoder: Encoder, image: LargeImage, settings: ObjectSettings, batch_size: int
) -> tuple[ImageObject, ...]:
    """Return the objects of all windows, in descending order of area, with their places in the image.

    Windows overlap by a third. An object belongs to the window in whose middle its centre lies, which sees most of it;
    `min_share` is the share of a window.

    Raises:
        UnreadableImage: pixels cannot be decoded.
    """
    windows = feature_windows(encoder, image.size, settings)
    own_size = replace(settings, size=None)  # windows are not resized
    found: list[ImageObject] = []
    for places, pixels in window_batches(image, windows, batch_size):
        prepared = [prepare_image(each, encoder, own_size) for each in pixels]
        for place, each in zip(places, extract_prepared(encoder, prepared, own_size), strict=True):
            found += _in_image(each.objects, windows, *place)
    found.sort(key=lambda each: -each.area)
    return tuple(replace(each, number=number) for number, each in enumerate(found))


def _in_image(objects: Sequence[ImageObject], windows: WindowGrid, top: int, left: int) -> Iterator[ImageObject]:
    """Yield the objects that belong to a window, with box, area and mask in the whole image."""
    core = _core(windows.tops, top, windows.shape[0]), _core(windows.lefts, left, windows.shape[1])
    for each in objects:
        mask = each.mask.patches()
        rows, columns = np.nonzero(mask)
        centre = top + rows.mean() + 0.5, left + columns.mean() + 0.5
        if not all(start <= place < end for (start, end), place in zip(core, centre, strict=True)):
            continue
        box, area = _place(mask, windows, top, left)
        yield replace(
            each, mask=GridMask(windows.grid, _counts(mask, windows.grid, top, left), windows.size), box=box, area=area
        )


def _core(starts: Sequence[int], start: int, side: int) -> tuple[float, float]:
    """Return the middle of a window along one axis, in patches: up to the middle of the overlaps with its neighbours.

    >>> _core([0, 20, 35], 20, 30)
    (25.0, 42.5)
    """
    borders = [-np.inf, *((one + side + other) / 2 for one, other in itertools.pairwise(starts)), np.inf]
    number = starts.index(start)
    return borders[number], borders[number + 1]


def _place(mask: Bool[np.ndarray, "gh gw"], windows: WindowGrid, top: int, left: int) -> tuple[Box, int]:
    """Return box and area in pixels of the image, beyond which the last patches may extend."""
    patch, (height, width) = windows.patch, windows.size
    rows, columns = map(np.unique, np.nonzero(mask))
    tall, wide = (
        np.clip(size - (start + np.arange(count)) * patch, 0, patch)
        for size, start, count in ((height, top, mask.shape[0]), (width, left, mask.shape[1]))
    )
    y1, x1 = min(height, (top + rows[-1] + 1) * patch), min(width, (left + columns[-1] + 1) * patch)
    box = int((left + columns[0]) * patch), int((top + rows[0]) * patch), int(x1), int(y1)
    return box, int((mask * tall[:, None] * wide).sum())


def _counts(mask: Bool[np.ndarray, "gh gw"], grid: tuple[int, int], top: int, left: int) -> bytes:
    """Return COCO's compressed run lengths, along columns, of a mask that is part of a larger grid."""
    padded = np.pad(mask.T.astype(np.int8), ((0, 0), (1, 1)))
    column, change = np.diff(padded, axis=1).nonzero()  # begin and end of each run, in turn
    places = (left + column) * grid[0] + top + change
    runs = np.diff(places, prepend=0, append=grid[0] * grid[1]).tolist()
    encoded: Any = coco_mask.frPyObjects({"size": list(grid), "counts": runs}, *grid)
    return encoded["counts"]
