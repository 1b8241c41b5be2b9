"""Reader of whole slides, by openslide-python (extra `slides`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import openslide

from cribo.base.errors import InputError
from cribo.data.config import Reading
from cribo.data.readers import ImageKind, Picture, Window, WindowedPicture
from cribo.data.readers.pillow import chosen_channels, over_white, require_plain
from cribo.data.readers.scale import MICROMETRES, PixelSize, Scale

if TYPE_CHECKING:
    from jaxtyping import Bool, UInt8

_TILE = 512  # of slides that do not state the size of their tiles, in pixels


@contextmanager
def open_picture(file: BinaryIO, name: str, kind: ImageKind, reading: Reading) -> Iterator[Picture]:
    """Open a slide; arguments and errors as `open_windows`."""
    with open_windows(file, name, kind, reading) as picture:
        yield picture


@contextmanager
def open_windows(file: BinaryIO, name: str, kind: ImageKind, reading: Reading) -> Iterator[WindowedPicture]:
    """Open a slide to decode windows of it.

    Raises:
        InputError: openslide does not recognise it, it is not on disk, or the pixel size does not exist.
    """
    path = getattr(file, "name", None)
    if not isinstance(path, str) or not Path(path).is_file():
        raise InputError(
            "slides are read from files on this machine, not from shards, Parquet files or storage: copy it to a folder"
        )
    try:
        slide = openslide.OpenSlide(path)
    except openslide.OpenSlideUnsupportedFormatError as error:
        raise InputError("openslide does not recognise it as a slide: convert it to tiled TIFF") from error
    with slide:
        yield _Slide(kind, slide, reading)


class _Slide(WindowedPicture):
    """A slide that openslide has opened. Transparent areas, which were not scanned, have no data and are white."""

    def __init__(self, kind: ImageKind, slide: openslide.OpenSlide, reading: Reading) -> None:
        self._slide, self._reading = slide, reading
        sizes = [(height, width) for width, height in slide.level_dimensions]
        self._whole_size, self._stated = sizes[0], _stated(slide)
        self._scale = Scale.of(sizes, self._stated, reading)
        super().__init__(kind, self._scale.size)

    @property
    def pixel_size(self) -> PixelSize | None:
        return None if self._stated is None else self._stated.of(self._whole_size, self._scale.size)

    @property
    def unit_pixels(self) -> int:
        tile = f"openslide.level[{self._scale.level}].tile-"
        height, width = (int(self._slide.properties.get(tile + side, _TILE)) for side in ("height", "width"))
        return height * width

    def require_whole(self) -> None:
        require_plain(f"{self.kind.name} images", self._reading)

    def pixels(self) -> UInt8[np.ndarray, "h w c"]:
        return self.window(0, 0, *self.header_size).pixels

    def valid(self) -> Bool[np.ndarray, "h w"] | None:
        return self.window(0, 0, *self.header_size).valid

    def window(self, top: int, left: int, height: int, width: int) -> Window:
        rows, columns = slice(top, top + height), slice(left, left + width)
        values = self._scale.read(self._of_level, rows, columns)
        scanned = values[..., 3] >= 128
        pixels = chosen_channels(np.ascontiguousarray(values[..., :3]), self._reading)
        return Window(pixels, None if scanned.all() else scanned)

    def _of_level(self, rows: slice, columns: slice) -> UInt8[np.ndarray, "h w 4"]:
        """Decode a part of the level that is read: RGB over white, and opacity."""
        downsample = self._slide.level_downsamples[self._scale.level]
        place = round(columns.start * downsample), round(rows.start * downsample)
        size = columns.stop - columns.start, rows.stop - rows.start
        image = self._slide.read_region(place, self._scale.level, size)
        opacity = np.array(image.getchannel("A"))
        colours = image.convert("RGB") if opacity.min() == 255 else over_white(image)
        return np.dstack((np.array(colours), opacity))


def _stated(slide: openslide.OpenSlide) -> PixelSize | None:
    """Return the pixel size of the full resolution of a slide; None if it states none."""
    try:
        height, width = (
            float(slide.properties[name]) for name in (openslide.PROPERTY_NAME_MPP_Y, openslide.PROPERTY_NAME_MPP_X)
        )
    except (KeyError, ValueError):
        return None
    return PixelSize(height, width, MICROMETRES) if min(height, width) > 0 else None
