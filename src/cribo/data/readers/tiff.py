"""Reader of TIFF: Pillow for ordinary pictures; tifffile for other channels and types, stacks, and deep colour."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import tifffile
from PIL import Image

from cribo.base.errors import InputError
from cribo.base.packages import require_packages
from cribo.base.wording import counted
from cribo.data.channels import FULL, Samples, grey_to_8_bits, has_data, require_bright, scaled
from cribo.data.config import Reading
from cribo.data.readers import ImageKind, Picture, Window, WindowedPicture, pillow
from cribo.data.readers.headers import nodata_of_tiff, samples_of_tiff
from cribo.data.readers.map_tags import ExtraTag, map_tags
from cribo.data.readers.scale import PixelSize, Scale
from cribo.data.readers.tiff_scale import pixel_size_of_tiff

if TYPE_CHECKING:
    from jaxtyping import Bool, Num, UInt8

# Its messages do not contain the name of the file, and what affects the pixels is an error.
logging.getLogger("tifffile").addHandler(logging.NullHandler())

_UNNAMED = "QI"  # axes of tifffile without a meaning: pages
_CHANNELS = "CS"  # channels of the acquisition, and samples of a pixel
_ORIENTATION, _EXTRA_SAMPLES = 274, 338
_WHITE_IS_ZERO, _PALETTE = 0, 3
_OPACITY = (1, 2)  # associated or not
_WITHOUT_EXTRA = (1, 8, 32946, 32773, 34925)  # compressions that tifffile decodes by itself


@contextmanager
def open_picture(file: BinaryIO, name: str, kind: ImageKind, reading: Reading) -> Iterator[Picture]:
    """Open a TIFF file.

    Raises:
        InputError: the header is damaged, or the channels, the page or the pixel size do not exist.
        MissingPackage: its compression requires imagecodecs.
        TooManyPixels: Pillow refuses the number of pixels.
    """
    reason, is_readable = None, False
    if reading.channels is None and reading.page is None and not reading.pixel_size:
        try:
            with pillow.open_picture(file, name, kind, reading) as picture:
                picture.require_whole()
                is_readable = True
                if not picture.is_deep_colour or _is_packed(file):  # then only its high bits are read
                    yield picture
                    return
        except InputError as error:
            if is_readable:  # raised by the caller
                raise
            reason = error
    file.seek(0)
    try:
        tiff = tifffile.TiffFile(file, name=name)
    except Exception as error:  # various errors for damaged headers
        raise reason or error from error
    with tiff:
        yield _TiffPicture(kind, tiff, reading, name)


@contextmanager
def open_windows(file: BinaryIO, name: str, kind: ImageKind, reading: Reading) -> Iterator[WindowedPicture]:
    """Open a TIFF file to decode windows of it, whose tiles or strips are decoded by tifffile.

    Raises:
        InputError: the header is damaged, or the channels, the page or the pixel size do not exist.
        MissingPackage: its compression requires imagecodecs.
    """
    with tifffile.TiffFile(file, name=name) as tiff:
        yield _TiffPicture(kind, tiff, reading, name)


def _is_packed(file: BinaryIO) -> bool:
    """Whether the compression of a TIFF requires imagecodecs, which is not installed."""
    if find_spec("imagecodecs") is not None:
        return False
    file.seek(0)
    with tifffile.TiffFile(file) as tiff:
        return tiff.pages.first.compression not in _WITHOUT_EXTRA


class _TiffPicture(WindowedPicture):
    """A TIFF opened by tifffile."""

    def __init__(self, kind: ImageKind, tiff: tifffile.TiffFile, reading: Reading, name: str) -> None:
        self._tiff, self._reading, self._name = tiff, reading, name
        whole: Any = tiff.series[0]
        if not {"Y", "X"} <= set(whole.axes):
            raise InputError(f"no picture: its axes are {whole.axes or 'none'}")
        self._first: Any = whole.keyframe  # whose tags hold for all levels
        levels = [level for level in whole.levels if (level.axes, level.dtype) == (whole.axes, whole.dtype)]
        sizes = [tuple(level.shape[whole.axes.index(axis)] for axis in "YX") for level in levels]
        self._stated = pixel_size_of_tiff(tiff, self._tags)
        self._whole_size, self._scale = sizes[0], Scale.of(sizes, self._stated, reading)
        self._series: Any = levels[self._scale.level]
        self._page: Any = self._series.keyframe
        axes = whole.axes
        self._sizes = dict(zip(axes, self._series.shape, strict=True))
        self._leading = axes[: len(axes) - len(self._page.axes)]  # axes along which pages are stored
        super().__init__(kind, self._scale.size)

    @property
    def _of_pages(self) -> str:
        """Axes along which --page selects; with --channels alone, unnamed pages are channels instead."""
        axes = "".join(axis for axis in self._series.axes if axis not in f"YX{_CHANNELS}")
        is_channels = self._reading.channels is not None and self._reading.page is None
        if is_channels and axes in tuple(_UNNAMED) and not set(_CHANNELS) & set(self._sizes):
            return ""
        return axes

    @property
    def _channels(self) -> int:
        return math.prod(self._sizes.values()) // math.prod(self._sizes[axis] for axis in f"YX{self._of_pages}")

    @property
    def pages(self) -> int:
        return math.prod(self._sizes[axis] for axis in self._of_pages)

    def require_whole(self) -> None:
        reading, page, pages = self._reading, self._page, self.pages
        others = [each for each in self._tiff.series[1:] if not each.keyframe.is_reduced]
        if others:
            sizes = ", ".join(" x ".join(map(str, each.shape)) for each in (self._series, *others))
            raise InputError(f"a stack of pages of several sizes, {sizes}: save each page as a file of its own")
        if reading.page is None and pages > 1:
            raise InputError(
                f"a stack of {pages} pages, of which one would be read: choose one with --page, from 0 to {pages - 1}, "
                "or save each page as a file of its own"
            )
        if (reading.page or 0) >= pages:
            raise InputError(f"it has {counted(pages, 'page')}, 0 to {pages - 1}, got --page {reading.page}")
        planes = math.prod(size for axis, size in self._sizes.items() if axis not in "YXS")
        if self._tiff.is_imagej and (listed := int((self._tiff.imagej_metadata or {}).get("images", 1))) > planes:
            raise InputError(f"a stack of {listed} pages according to its header, of which {planes} are there")
        count = self._channels
        numbers = reading.channel_numbers
        if numbers is None and count - self._has_opacity not in (1, 3):
            raise InputError(
                f"{count} channels per pixel: choose with --channels, such as --channels "
                f"{','.join(map(str, range(count)))} for all of them, or one or three for grey or colour"
            )
        if numbers is not None and max(numbers) >= count:
            raise InputError(f"it has {count} channels, so --channels must be 0 to {count - 1}, got {max(numbers)}")
        if page.photometric == _PALETTE or page.dtype is None or page.dtype.kind not in "uifb":
            what = "a palette" if page.photometric == _PALETTE else f"values of type {page.dtype}"
            raise InputError(f"{what} cannot be read from this TIFF: convert it to 8 or 16 bits per channel")
        if page.compression not in _WITHOUT_EXTRA:
            require_packages(f"reading TIFF with {page.compression.name} compression", "imagecodecs", extra="tiff")

    def size(self) -> tuple[int, int]:
        height, width = self.header_size
        return (width, height) if self._orientation >= 5 else (height, width)

    def pixels(self) -> UInt8[np.ndarray, "h w c"]:
        values, opacity = self._chosen(self._decoded())
        shared = self._shared_limits(values) if self._reading.range is None and values.shape[-1] > 1 else None
        return pillow.upright(self._in_colour(values, opacity, shared), self._orientation)

    @property
    def unit_pixels(self) -> int:
        page = self._page
        if self._series.dataoffset is not None:  # uncompressed and without gaps: any rows can be read
            return page.imagewidth
        return page.tilelength * page.tilewidth if page.is_tiled else page.rowsperstrip * page.imagewidth

    @property
    def pixel_size(self) -> PixelSize | None:
        return None if self._stated is None else self._stated.of(self._whole_size, self._scale.size)

    @property
    def map_tags(self) -> tuple[ExtraTag, ...]:
        height, width = (whole / read for whole, read in zip(self._whole_size, self._scale.size, strict=True))
        return map_tags(self._tags, (height, width))

    def window(self, top: int, left: int, height: int, width: int) -> Window:
        if self._orientation != 1:
            raise InputError("its orientation is not upright, so windows of it cannot be read: rotate and save it")
        shared, samples = None, self._samples
        if self._reading.range is None and self._page.dtype.itemsize > 1:
            if samples.bits > 16 or samples.high is None:
                raise InputError(
                    f"the range of its {self._page.dtype} values is unknown, and would require the whole image: give "
                    "it with --range LOW,HIGH"
                )
            shared = samples.low, samples.high
        values, opacity = self._chosen(self._decoded(slice(top, top + height), slice(left, left + width)))
        return Window(self._in_colour(values, opacity, shared), self._valid(values))

    def unscaled_window(self, top: int, left: int, height: int, width: int) -> Num[np.ndarray, "n c"] | None:
        if self._page.dtype in (np.bool_, np.uint8):
            return None
        values, _ = self._chosen(self._decoded(slice(top, top + height), slice(left, left + width)))
        valid, samples = self._valid(values), self._samples
        if samples.high is not None and values.max() <= samples.high:
            return None
        return values.reshape(-1, values.shape[-1]) if valid is None else values[valid]

    def _chosen(
        self, values: Num[np.ndarray, "h w c"]
    ) -> tuple[Num[np.ndarray, "h w k"], UInt8[np.ndarray, "h w"] | None]:
        """Return the chosen channels, and the opacity if there is one."""
        if (numbers := self._reading.channel_numbers) is not None:
            return values[..., list(numbers)], None
        if self._has_opacity:
            return values[..., :-1], scaled(values[..., -1], 0, np.iinfo(values.dtype).max)
        return values, None

    def _in_colour(
        self,
        values: Num[np.ndarray, "h w k"],
        opacity: UInt8[np.ndarray, "h w"] | None,
        shared: tuple[float, float] | None,
    ) -> UInt8[np.ndarray, "h w c"]:
        """Scale channels to 8 bits, by a shared range or that of the reading; grey becomes RGB."""
        channels = [
            self._in_8_bits(values[..., place], shared or self._reading.limits(place))
            for place in range(values.shape[-1])
        ]
        if len(channels) == 1:
            channels *= 3
        pixels = np.stack(channels, axis=-1)
        if opacity is not None:
            pixels = np.array(pillow.over_white(Image.fromarray(np.dstack((pixels, opacity)))))
        return pixels

    def valid(self) -> Bool[np.ndarray, "h w"] | None:
        if self._nodata is None and self._page.dtype.kind != "f":
            return None
        found = self._valid(self._chosen(self._decoded())[0])
        return None if found is None else pillow.upright(found, self._orientation)

    def _valid(self, values: Num[np.ndarray, "h w k"]) -> Bool[np.ndarray, "h w"] | None:
        """Return which pixels have data in a chosen channel; None if values of no data are impossible."""
        is_possible = self._nodata is not None or values.dtype.kind == "f"
        return has_data(values, self._nodata) if is_possible else None

    def unscaled(self) -> Num[np.ndarray, "h w c"] | None:
        samples = self._samples
        if self._page.dtype in (np.bool_, np.uint8):
            return None
        values, _ = self._chosen(self._decoded())
        if samples.high is not None and values.max() <= samples.high:
            return None
        return pillow.upright(values, self._orientation)

    def _decoded(self, rows: slice | None = None, columns: slice | None = None) -> Num[np.ndarray, "h w c"]:
        """Decode all channels of the page, or of a window of it, at the size at which the image is read."""
        height, width = self.header_size
        if rows is None or columns is None:
            if self._scale.stored == self._scale.size:
                return self._of_level(slice(None), slice(None))
            rows, columns = slice(0, height), slice(0, width)
        return self._scale.read(self._of_level, rows, columns, self._nodata)

    def _of_level(self, rows: slice, columns: slice) -> Num[np.ndarray, "h w c"]:
        """Decode all channels of the level that is read, or of a window of it."""
        chosen = np.unravel_index(self._reading.page or 0, [self._sizes[axis] for axis in self._of_pages] or [1])
        place = dict(zip(self._of_pages, chosen, strict=False))
        counts = [self._sizes[axis] for axis in self._leading]
        picked = [[int(place[axis])] if axis in place else range(self._sizes[axis]) for axis in self._leading]
        numbers = np.ravel_multi_index(np.ix_(*picked), counts) if counts else np.zeros(1, dtype=int)
        stored = self._stored if rows == columns == slice(None) else partial(self._stored_window, rows, columns)
        pages = np.stack([stored(int(number)) for number in numbers.ravel()])
        # The axes of a page follow those along which pages are stored.
        pages = pages.reshape([*map(len, picked), *pages.shape[1:]])
        axes = self._leading + self._page.axes
        for axis in [axis for axis in self._page.axes if axis in place]:
            pages = pages.take([int(place[axis])], axis=axes.index(axis))
        others = [number for number, axis in enumerate(axes) if axis not in "YX"]
        values = pages.transpose([axes.index("Y"), axes.index("X"), *others])
        return values.reshape(*values.shape[:2], -1)

    def _stored(self, number: int) -> Num[np.ndarray, "*shape"]:
        """Decode a page; those of a contiguous series may lack headers of their own."""
        series = self._series
        if series.dataoffset is None:
            return series.pages[number].asarray().reshape(self._page.shape)
        dtype = np.dtype(series.dtype).newbyteorder(self._tiff.byteorder)
        size = math.prod(self._page.shape)
        handle = self._tiff.filehandle
        handle.seek(series.dataoffset + number * size * dtype.itemsize)
        content = _whole(handle.read(size * dtype.itemsize), size * dtype.itemsize)
        return np.frombuffer(content, dtype).reshape(self._page.shape).astype(series.dtype)

    def _stored_window(self, rows: slice, columns: slice, number: int) -> Num[np.ndarray, "*shape"]:
        """Decode the tiles or strips of a page that meet a window, and cut it from them."""
        keyframe, handle = self._page, self._tiff.filehandle
        planes, depth, length, width, samples = keyframe.shaped
        size = rows.stop - rows.start, columns.stop - columns.start
        found = np.zeros((planes, depth, *size, samples), keyframe.dtype)
        if (start := self._series.dataoffset) is not None:
            dtype = np.dtype(self._series.dtype).newbyteorder(self._tiff.byteorder)
            row_bytes = width * samples * dtype.itemsize
            for plane, level in np.ndindex(planes, depth):
                first = ((number * planes + plane) * depth + level) * length + rows.start
                handle.seek(start + first * row_bytes)
                content = _whole(handle.read(size[0] * row_bytes), size[0] * row_bytes)
                found[plane, level] = np.frombuffer(content, dtype).reshape(size[0], width, samples)[:, columns]
        else:
            page = self._series.pages[number]
            if page is None:
                raise InputError(f"page {number} is missing")
            unit = (keyframe.tilelength, keyframe.tilewidth) if keyframe.is_tiled else (keyframe.rowsperstrip, width)
            across, down = -(-width // unit[1]), -(-length // unit[0])
            for index in np.ndindex(planes * depth, down, across):
                top, left = index[1] * unit[0], index[2] * unit[1]
                meets = top < rows.stop and top + unit[0] > rows.start
                if not meets or left >= columns.stop or left + unit[1] <= columns.start:
                    continue
                segment = int(np.ravel_multi_index(index, (planes * depth, down, across)))
                self._copy_segment(page, segment, found, rows.start, columns.start)
        shape = [dict(zip("YX", size, strict=True)).get(axis, self._sizes[axis]) for axis in keyframe.axes]
        return found.reshape(shape)

    def _copy_segment(
        self, page: Any, segment: int, found: Num[np.ndarray, "s d h w c"], first_row: int, first_column: int
    ) -> None:
        """Decode a tile or strip, and copy the part of it that lies in a window."""
        count = page.databytecounts[segment]
        if count == 0:  # tiles without content are black
            return
        self._tiff.filehandle.seek(page.dataoffsets[segment])
        content = _whole(self._tiff.filehandle.read(count), count)
        decoded, place, shape = self._page.decode(content, segment, jpegtables=page.jpegtables)
        if decoded is None:
            return
        plane, level, top, left = place[0], place[1], place[2] - first_row, place[3] - first_column
        height, width = found.shape[2:4]
        ys, xs = (max(0, top), min(height, top + shape[1])), (max(0, left), min(width, left + shape[2]))
        part = decoded[:, ys[0] - top : ys[1] - top, xs[0] - left : xs[1] - left]
        levels = slice(level, min(level + shape[0], found.shape[1]))
        found[plane, levels, ys[0] : ys[1], xs[0] : xs[1]] = part[: levels.stop - level]

    @property
    def _has_opacity(self) -> bool:
        extra = self._first.tags.get(_EXTRA_SAMPLES)
        kinds = () if extra is None else extra.value
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        return len(kinds) == 1 and int(kinds[0]) in _OPACITY

    @property
    def _orientation(self) -> int:
        tag = self._first.tags.get(_ORIENTATION)
        found = 1 if tag is None else int(tag.value)
        return found if found in pillow.ORIENTATIONS else 1

    def _shared_limits(self, values: Num[np.ndarray, "h w c"]) -> tuple[float, float] | None:
        """Return the values of black and white of all channels; None for 8 bits and types without a known range."""
        samples = self._samples
        if values.dtype.kind != "u" or values.dtype.itemsize != 2:
            return None
        largest = int(values.max())
        if samples.high is None or largest > samples.high:
            require_bright(largest, self._name, way="give --range LOW,HIGH, or 0,65535 if it is a dark picture")
            return 0, FULL
        return samples.low, samples.high

    def _in_8_bits(
        self, values: Num[np.ndarray, "h w"], limits: tuple[float, float] | None
    ) -> UInt8[np.ndarray, "h w"]:
        if values.dtype == np.bool_:
            return values.astype(np.uint8) * np.uint8(255)
        if values.dtype == np.uint8 and limits is None:
            return 255 - values if self._page.photometric == _WHITE_IS_ZERO else values
        return grey_to_8_bits(values, self._samples, limits, self._name)

    @property
    def _samples(self) -> Samples:
        """Bits and range of the values according to the header."""
        return samples_of_tiff(self._tags)

    @property
    def _nodata(self) -> float | None:
        return nodata_of_tiff(self._tags)

    @cached_property
    def _tags(self) -> dict[int, Any]:
        return {tag.code: tag.value for tag in self._first.tags}


def _whole(content: bytes, size: int) -> bytes:
    """Return what was read of a file; raise InputError if it ends before."""
    if len(content) < size:
        raise InputError("image file is truncated")
    return content
