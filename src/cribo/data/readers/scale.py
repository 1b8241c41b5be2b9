"""Images at a pixel size: the level of a pyramid to read, and its resizing, window by window."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from cribo.base.errors import InputError
from cribo.data.channels import is_data
from cribo.data.config import Reading

if TYPE_CHECKING:
    from jaxtyping import Num

MICROMETRES = "micrometres"
MAP_UNITS = "map units"

_EQUAL = 1.01  # levels within 1 % of a pixel size are read as they are
_MOST_ENLARGED = 1.25  # scanners of the same nominal magnification differ by a tenth
_AT_ONCE = 2**25  # pixels of a level that are decoded at once


class PixelSize(NamedTuple):
    """Height and width of a pixel.

    Attributes:
        height: along the columns of the image.
        width: along its rows.
        unit: `MICROMETRES` or `MAP_UNITS`.
    """

    height: float
    width: float
    unit: str

    def of(self, size: tuple[int, int], read: tuple[int, int]) -> PixelSize:
        """Return the size of the pixels of an image that is resized from `size` to `read` (height, width)."""
        return PixelSize(self.height * size[0] / read[0], self.width * size[1] / read[1], self.unit)

    def __str__(self) -> str:
        height, width = f"{self.height:.4g}", f"{self.width:.4g}"
        return f"{width if width == height else f'{width} x {height}'} {self.unit}"


class Scale(NamedTuple):
    """The level of a pyramid that is read, and the size to which it is resized.

    Attributes:
        level: number of the level; 0 is the full resolution.
        stored: height and width of the level in pixels.
        size: height and width in pixels as the image is read.
    """

    level: int
    stored: tuple[int, int]
    size: tuple[int, int]

    @classmethod
    def of(cls, levels: Sequence[tuple[int, int]], stated: PixelSize | None, reading: Reading) -> Scale:
        """Return the scale of an image at `reading.pixel_size`; the full resolution without one.

        Args:
            levels: height and width of each level, the full resolution first.
            stated: pixel size of the full resolution; None if the file does not state it.
            reading: how the image is read.

        Raises:
            InputError: the file states no pixel size, or the pixels of its full resolution are too large.
        """
        whole, wanted = levels[0], reading.pixel_size
        if not wanted:
            return cls(0, whole, whole)
        if stated is None:
            raise InputError(
                f"it states no pixel size, which --pixel_size {wanted:g} requires: add it to the file, such as the "
                "resolution of a TIFF or PhysicalSizeX of OME-TIFF, or give --pixel_size 0 for full resolution"
            )
        factors = wanted / stated.height, wanted / stated.width
        if min(factors) * _MOST_ENLARGED < 1:
            least = max(stated.height, stated.width) / _MOST_ENLARGED
            raise InputError(
                f"its finest pixels have {stated}, so --pixel_size {wanted:g} would enlarge it {1 / min(factors):.3g} "
                f"times: give at least {_rounded_up(least)}, or 0 for full resolution"
            )
        ratios = [tuple(full / side for full, side in zip(whole, size, strict=True)) for size in levels]
        fine = [
            number
            for number, ratio in enumerate(ratios)
            if number == 0 or all(each <= factor * _EQUAL for each, factor in zip(ratio, factors, strict=True))
        ]
        level = max(fine, key=lambda number: ratios[number])
        if all(1 / _EQUAL <= ratio / factor <= _EQUAL for ratio, factor in zip(ratios[level], factors, strict=True)):
            return cls(level, levels[level], levels[level])
        height, width = (max(1, round(side / factor)) for side, factor in zip(whole, factors, strict=True))
        return cls(level, levels[level], (height, width))

    def read(
        self,
        stored: Callable[[slice, slice], Num[np.ndarray, "rows columns c"]],
        rows: slice,
        columns: slice,
        nodata: float | None = None,
    ) -> Num[np.ndarray, "h w c"]:
        """Read a window of the image as it is resized; it equals that part of the whole resized image.

        Each pixel is the mean of the pixels of the level that it covers, with the weights of antialiased bilinear
        interpolation. Values that are no data enter no mean; a pixel of which they cover more than half is no data.

        Args:
            stored: decodes rows and columns of the level.
            rows: rows of the resized image.
            columns: columns of the resized image.
            nodata: the value of pixels without data; NaN and infinity are none either.
        """
        if self.stored == self.size:
            return stored(rows, columns)
        across = self._span(columns, 1)
        width = across[0].stop - across[0].start
        at_once = max(1, int(_AT_ONCE / width * self.size[0] / self.stored[0]))
        parts = []
        for start in range(rows.start, rows.stop, at_once):
            stop = min(rows.stop, start + at_once)
            down = self._span(slice(start, stop), 0)
            box = across[1][0], down[1][0], across[1][1], down[1][1]
            size = columns.stop - columns.start, stop - start
            parts.append(_resized(stored(down[0], across[0]), size, box, nodata))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _span(self, part: slice, axis: int) -> tuple[slice, tuple[float, float]]:
        """Return the rows or columns of the level that a part needs, and the place of the part in them."""
        side, factor = self.stored[axis], self.stored[axis] / self.size[axis]
        first, last = part.start * factor, min(part.stop * factor, side)
        margin = max(factor, 1) + 1  # the reach of the filter
        start, stop = max(0, math.floor(first - margin)), min(side, math.ceil(last + margin))
        return slice(start, stop), (first - start, last - start)


def _rounded_up(number: float) -> str:
    """Return a number with three digits that is not smaller."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return f"{math.ceil(number / unit) * unit:.3g}"


def _resized(
    values: Num[np.ndarray, "h w c"],
    size: tuple[int, int],
    box: tuple[float, float, float, float],
    nodata: float | None,
) -> Num[np.ndarray, "new_h new_w c"]:
    """Resize a part of each channel to a size (width, height)."""
    return np.stack([_channel(values[..., place], size, box, nodata) for place in range(values.shape[-1])], axis=-1)


def _channel(
    values: Num[np.ndarray, "h w"], size: tuple[int, int], box: tuple[float, float, float, float], nodata: float | None
) -> Num[np.ndarray, "new_h new_w"]:
    def resize(image: np.ndarray) -> np.ndarray:
        return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR, box=box))

    dtype = values.dtype
    data = is_data(values, nodata)
    if data.all():
        if dtype == np.uint8:
            return resize(np.ascontiguousarray(values))
        return _as_type(resize(values.astype(np.float32)), dtype)
    weights = resize(data.astype(np.float32))
    sums = resize(np.where(data, values, 0).astype(np.float32))
    means = _as_type(sums / np.maximum(weights, 0.5), dtype)
    return np.where(weights >= 0.5, means, np.asarray(np.nan if nodata is None else nodata).astype(dtype))


def _as_type(values: Num[np.ndarray, "h w"], dtype: np.dtype) -> Num[np.ndarray, "h w"]:
    if dtype.kind == "f":
        return values.astype(dtype)
    if dtype == np.bool_:
        return values >= 0.5
    limits = np.iinfo(dtype)
    return np.rint(values.astype(np.float64)).clip(limits.min, limits.max).astype(dtype)
