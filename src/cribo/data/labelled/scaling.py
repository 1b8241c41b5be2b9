"""Conversion of labels between full resolution and the resolution at which an image is read."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Integer
from torch import Tensor

from cribo.data.config import Reading
from cribo.data.reading import full_size, image_size


class Scaling(NamedTuple):
    """Sizes (height, width) of an image; they differ with `Reading.pixel_size`.

    Attributes:
        full: at full resolution, in whose pixels annotation files state coordinates.
        read: as the image is read, and labelled.
    """

    full: tuple[int, int]
    read: tuple[int, int]

    @classmethod
    def unscaled(cls, size: tuple[int, int]) -> "Scaling":
        """Return the scaling of an image that is read at full resolution."""
        return cls(size, size)

    @property
    def factors(self) -> tuple[float, float]:
        """Vertical and horizontal factor from full resolution to the image as read; 1 without a pixel size."""
        return self.read[0] / self.full[0], self.read[1] / self.full[1]

    def corners(self, values: Float[np.ndarray, "n 2"]) -> Float[np.ndarray, "n 2"]:
        """Scale (x, y) from full resolution to the image as read."""
        down, across = self.factors
        return values * (across, down)

    def ring_in_full(self, ring: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
        """Scale corners (x, y) from the image as read to full resolution, rounded to a hundredth of a pixel."""
        if self.full == self.read:
            return [*ring]
        down, across = self.factors
        return [(round(x / across, 2), round(y / down, 2)) for x, y in ring]

    def box(self, values: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
        """Scale (left, top, right, bottom) from full resolution to the image as read."""
        down, across = self.factors
        return values[0] * across, values[1] * down, values[2] * across, values[3] * down

    def nearest(self, axis: int) -> Int64[np.ndarray, " n"]:
        """Return the full-resolution row (axis 0) or column (axis 1) nearest to each one of the image as read."""
        return _nearest(self.full[axis], self.read[axis])

    def reduced(self, mask: Bool[np.ndarray, "full_h full_w"]) -> Bool[np.ndarray, "h w"]:
        """Resize a full-resolution mask to the image as read, by nearest neighbour."""
        return mask if self.full == self.read else mask[np.ix_(self.nearest(0), self.nearest(1))]


def scaling_of(path: str | os.PathLike[str], reading: Reading) -> Scaling:
    """Return the sizes of an image file; reads only its header.

    Raises:
        UnreadableImage: see `image_size`.
    """
    read = image_size(path, reading=reading)
    return Scaling(full_size(path, reading=reading) if reading.pixel_size else read, read)


def resized(labels: Integer[Tensor, "h w"], size: tuple[int, int]) -> Integer[Tensor, "new_h new_w"]:
    """Resize labels to a size (height, width), by nearest neighbour."""
    height, width = labels.shape
    if (height, width) == size:
        return labels
    rows, columns = (torch.from_numpy(_nearest(*sides)) for sides in zip((height, width), size, strict=True))
    return labels[rows][:, columns]


def _nearest(given: int, wanted: int) -> Int64[np.ndarray, " n"]:
    """Return, for each of `wanted` positions along a side, the index of the nearest of `given` positions."""
    places = ((np.arange(wanted) + 0.5) * (given / wanted)).astype(np.int64)
    return places.clip(max=given - 1)
