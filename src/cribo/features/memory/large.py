"""Segmentation of images that are too large to decode as a whole, in overlapping windows."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.data.labelled.label_maps import IGNORE_INDEX
from cribo.data.windows import LargeImage
from cribo.features.memory.memory import SegmentationMemory
from cribo.features.memory.pixels import PixelLabels, label_pixels
from cribo.features.probes.encoding import encode_grids
from cribo.features.windows import PATCHES_AT_ONCE, WINDOW, WindowGrid, hann_weights, read_bands

_BLOCK_PIXELS = 2**21  # labelled at once


class LabelledRows(NamedTuple):
    """Rows of a large image with their labels.

    Attributes:
        image: their pixels.
        labels: class of each pixel; 255 where the confidence is below `min_confidence`, and for pixels without data.
        confidence: probability of the class, 0 to 1; 0 for pixels without data.
    """

    image: UInt8[Tensor, "c h w"]
    labels: UInt8[Tensor, "h w"]
    confidence: Float[Tensor, "h w"]


def memory_windows(memory: SegmentationMemory, size: tuple[int, int]) -> WindowGrid:
    """Return the windows in which a memory encodes a large image.

    A patch covers as many pixels as in the examples, or `patch_size / scale`, rounded to whole pixels. Windows have the
    memory's `window` and `stride`, by default about 512 pixels and two thirds of it, or the fixed size of the network.
    """
    encoder, settings = memory.encoder, memory.settings
    side = encoder.image_size or round(WINDOW / encoder.patch_size) * encoder.patch_size
    if settings.window is None or encoder.image_size is not None:
        settings = replace(settings, window=side, stride=None)
    steps = settings.steps(encoder.patch_size)
    assert steps is not None
    return WindowGrid(size, memory.patch_pixels, *steps)


@torch.no_grad()
def label_rows(memory: SegmentationMemory, image: LargeImage) -> Iterator[LabelledRows]:
    """Label a large image from top to bottom; memory does not grow with its height.

    The class probabilities of patches are averaged where windows overlap, with Hann weights. Pixels are labelled from
    them as in other images, in blocks with a margin as wide as the reach of the filter, so that blocks have no seams.

    Args:
        memory: the memory.
        image: the image.

    Raises:
        UnreadableImage: pixels cannot be decoded.
        DataError: the memory is empty.
    """
    windows = memory_windows(memory, image.size)
    margin = 2 + math.ceil(memory.settings.reach)
    tops, rows = windows.tops, windows.grid[0]
    votes = _Votes(memory, windows)
    done = 0
    for number, (top, (pixels, valid)) in enumerate(read_bands(image, windows, above=2 * margin)):
        first = max(0, top - 2 * margin)
        votes.add(top, pixels[:, (top - first) * windows.patch :])
        end = rows if number + 1 == len(tops) else tops[number + 1] - margin
        if end <= done:
            continue
        start, stop = max(0, done - margin), min(rows, end + margin)
        band = pixels[:, (start - first) * windows.patch : (stop - first) * windows.patch]
        found = _label_band(memory, votes.mean(start, stop), band, windows.patch, margin)
        within = slice((done - start) * windows.patch, (end - start) * windows.patch)
        height = min(end * windows.patch, image.size[0]) - done * windows.patch
        labels, confidence = (values[within][:height, : image.size[1]] for values in found)
        labels = labels.masked_fill(confidence < memory.settings.min_confidence, IGNORE_INDEX)
        if valid is not None:
            known = valid[(done - first) * windows.patch :][:height]
            labels, confidence = labels.masked_fill(~known, IGNORE_INDEX), confidence * known
        yield LabelledRows(band[:, within][:, :height, : image.size[1]], labels, confidence)
        done = end
        votes.drop(done - margin)


class _Votes:
    """Class probabilities of the rows of patches that are not labelled yet: sums over windows, and their weights."""

    def __init__(self, memory: SegmentationMemory, windows: WindowGrid) -> None:
        self._memory, self._windows = memory, windows
        self._fitted, encoder = memory.fitted(), memory.encoder
        self._settings = replace(
            memory.settings, size=None, scale=encoder.patch_size / windows.patch, window=None, stride=None
        )
        patches = windows.shape[0] * windows.shape[1]
        self._at_once = max(1, min(memory.batch_size, PATCHES_AT_ONCE // patches))
        self._first = 0  # row of patches
        self._sums = torch.zeros(0, windows.grid[1], len(memory.classes))
        self._weights = torch.zeros(0, windows.grid[1], 1)

    def add(self, top: int, pixels: UInt8[Tensor, "c height width"]) -> None:
        """Add the windows of a row, given its pixels."""
        (height, width), patch = self._windows.shape, self._windows.patch
        more = top + height - self._first - len(self._sums)
        self._sums, self._weights = (
            torch.cat((values, values.new_zeros(max(0, more), *values.shape[1:])))
            for values in (self._sums, self._weights)
        )
        weight = hann_weights(height, width)
        rows, lefts = slice(top - self._first, top - self._first + height), self._windows.lefts
        for start in range(0, len(lefts), self._at_once):
            part = lefts[start : start + self._at_once]
            cut = [pixels[:, :, left * patch : (left + width) * patch] for left in part]
            for left, votes in zip(part, self._of_windows(cut), strict=True):
                columns = slice(left, left + width)
                self._sums[rows, columns] += weight * votes
                self._weights[rows, columns] += weight

    def _of_windows(self, images: list[UInt8[Tensor, "c h w"]]) -> list[Float[Tensor, "rows columns k"]]:
        memory, fitted = self._memory, self._fitted
        blocks = fitted.choice.probe.blocks
        grids = encode_grids(memory.encoder, images, self._settings, batch_size=len(images), blocks=blocks)
        return [fitted(fitted.rows(grid.flatten(0, 1))).cpu().unflatten(0, grid.shape[:2]) for grid in grids]

    def mean(self, start: int, stop: int) -> Float[Tensor, "rows columns k"]:
        """Return the mean probabilities of rows of patches."""
        rows = slice(start - self._first, stop - self._first)
        return self._sums[rows] / self._weights[rows]

    def drop(self, start: int) -> None:
        """Drop the rows of patches before one."""
        kept = max(0, start - self._first)
        self._sums, self._weights = self._sums[kept:].clone(), self._weights[kept:].clone()
        self._first += kept


def _label_band(
    memory: SegmentationMemory,
    votes: Float[Tensor, "rows columns k"],
    pixels: UInt8[Tensor, "c h w"],
    patch: int,
    margin: int,
) -> PixelLabels:
    """Label the pixels of a band of patches, in blocks of columns with a margin."""
    settings, columns = memory.settings, votes.shape[1]
    step = max(4 * margin, _BLOCK_PIXELS // (pixels.shape[1] * patch))
    parts = []
    for left in range(0, columns, step):
        start, stop = max(0, left - margin), min(columns, left + step + margin)
        found = label_pixels(
            votes[:, start:stop],
            pixels[:, :, start * patch : stop * patch],
            patch_size=memory.encoder.patch_size,
            refine=settings.refine,
            reach=settings.reach,
            contrast=settings.contrast,
        )
        within = slice((left - start) * patch, (min(columns, left + step) - start) * patch)
        parts.append(PixelLabels(*(values[:, within] for values in found)))
    return PixelLabels(*(torch.cat(values, dim=1) for values in zip(*parts, strict=True)))
