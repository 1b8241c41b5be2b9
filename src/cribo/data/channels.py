"""Channels and bits of images: what can be read as grey or RGB, and the range of values of 9 to 32 bits."""

from __future__ import annotations

import contextlib
import io
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from threading import Lock
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2, TiffImageFile

from cribo.base.errors import InputError
from cribo.base.wording import counted

_CODESTREAM = b"\xff\x4f\xff\x51"  # the markers that start JPEG 2000 data
_FULL = 2**16 - 1
_LEAST = 2**13  # of the brightest value of 16 bits; below, an image is nearly black
_DIM = 2**15

# Channels of each photometric interpretation of TIFF, without alpha.
_COLOURS = {0: 1, 1: 1, 2: 3, 3: 1, 5: 4, 6: 3, 8: 3}
_KINDS = {1: "unsigned integers", 2: "signed integers", 3: "floating-point numbers", 5: "complex", 6: "complex"}
_BITS, _PHOTOMETRIC, _DESCRIPTION, _SAMPLES, _PLANAR, _EXTRA, _SAMPLE_FORMAT = 258, 262, 270, 277, 284, 338, 339
_SUBFILE, _LOWEST, _HIGHEST, _DEPTH = 254, 340, 341, 32997
_REDUCED_OR_MASK = 0b101  # bits of NewSubfileType
_SUPPORTED_KINDS = {(1, bits) for bits in (1, 2, 4, 8, 12, 16, 32)} | {(2, 8), (2, 16), (2, 32), (3, 32)}
_ONLY = "only grey and RGB can be read, so save each channel, or each three of them, as an image of its own"


class Samples(NamedTuple):
    """The values of an image in its file.

    Attributes:
        bits: bits of a value.
        low: the value of black.
        high: the value of white, if the file states it.
        scale: factor from a decoded value to that in the file.
        white_is_zero: whether 0 is white.
    """

    bits: int = 8
    low: float = 0.0
    high: float | None = None
    scale: float = 1.0
    white_is_zero: bool = False


# ------------------------------------------------------------------------------------------------------------- TIFF


def require_one_picture(image: Image.Image) -> None:
    """Check that an opened image is one picture of grey or RGB; of other formats than TIFF, the first frame is read.

    Raises:
        InputError: a TIFF or JPEG 2000 has more channels or pages than would be read, or values of an unsupported type.
    """
    if image.format == "JPEG2000" and image.mode in ("LA", "RGBA") and not _has_opacity(image):
        what, channels = {"LA": ("grey", 2), "RGBA": ("RGB", 4)}[image.mode]
        raise InputError(f"{channels} channels per pixel, {what} and 1 more: {_ONLY}")
    if not isinstance(image, TiffImageFile):
        return
    if fault := _fault_of(image.tag_v2):
        raise InputError(fault)
    if image.is_animated and (pages := _pages(image)) > 1:
        raise InputError(f"a stack of {pages} pages, of which one would be read: save each page as a file of its own")


def why_no_tiff(file: BinaryIO) -> str | None:
    """Return why Pillow cannot identify a TIFF, or None if it is not a TIFF."""
    try:
        file.seek(0)
        header = file.read(8)
        if header[2:3] == b"\x2b" or header[3:4] == b"\x2b":
            header += file.read(8)
        tags = ImageFileDirectory_v2(header)
        file.seek(tags.next)
        tags.load(file)
        if not tags:
            return None
        return _fault_of(tags) or f"a TIFF of {_described(tags)} that cannot be read: convert it to PNG"
    except Exception:  # another format, or a damaged file
        return None


def _fault_of(tags: Mapping[int, Any]) -> str | None:
    """Return why the first page of a TIFF would not be read completely and correctly."""
    photometric, samples, bits = tags.get(_PHOTOMETRIC, 0), tags.get(_SAMPLES, 1), _first(tags.get(_BITS, 1))
    extra = tags.get(_EXTRA, ())
    extra = extra if isinstance(extra, tuple) else (extra,)
    colours = _COLOURS.get(photometric, 1)
    others = max(samples - colours, len(extra))
    if others > 1 or extra[:1] == (0,):
        what = {1: "grey", 3: "RGB", 4: "CMYK"}[colours]
        return f"{samples} channels per pixel, {what} and {others} more: {_ONLY}"
    kind = _first(tags.get(_SAMPLE_FORMAT, 1))
    if (kind, bits) not in _SUPPORTED_KINDS:
        return f"{_described(tags)} cannot be read: convert the file to 8 or 16 bits per channel"
    if tags.get(_PLANAR, 1) == 2 and samples > 1 and bits != 8:
        return (
            f"{_described(tags)}, stored one channel after the other, cannot be read: save it with interleaved channels"
        )
    description = tags.get(_DESCRIPTION, "")
    images = re.search(r"^images=(\d+)", description, re.MULTILINE) if isinstance(description, str) else None
    pages = int(images[1]) if images and description.startswith("ImageJ=") else tags.get(_DEPTH, 1)
    if pages > 1:
        return f"a stack of {pages} pages, of which one would be read: save each page as a file of its own"
    return None


def _described(tags: Mapping[int, Any]) -> str:
    kind = _KINDS.get(_first(tags.get(_SAMPLE_FORMAT, 1)), "values of an unknown type")
    channels = counted(tags.get(_SAMPLES, 1), "channel")
    return f"{channels} of {_first(tags.get(_BITS, 1))}-bit {kind}"


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, tuple) else value)


def _pages(image: TiffImageFile) -> int:
    """Return the number of pages that are pictures of their own, not reduced copies or masks of another."""
    pages, number = 1, 1
    try:
        while True:
            try:
                image.seek(number)
            except EOFError:
                break
            except Exception:  # an unsupported page, of which the tags are read
                pass
            pages += not _first(image.tag_v2.get(_SUBFILE, 0)) & _REDUCED_OR_MASK
            number += 1
    finally:
        image.seek(0)
    return pages


# ------------------------------------------------------------------------------------------------------------- bits


def samples_of(image: Image.Image) -> Samples:
    """Return bits and range of the values of an opened image, before it is decoded."""
    if isinstance(image, TiffImageFile):
        return _samples_of_tiff(image.tag_v2)
    if image.format == "PNG" and "16B" in str(_decoder_arguments(image)):
        significant = _significant_bits(image)
        return Samples(16, high=2**significant - 1 if significant < 16 else None)
    if image.format == "PPM" and isinstance(maxval := _decoder_arguments(image), tuple) and isinstance(maxval[-1], int):
        if maxval[-1] > 255:  # Pillow scales to 65535
            highest = maxval[-1]
            return Samples(16, high=highest if highest < _FULL else None, scale=highest / _FULL)
    elif image.format == "PPM" and image.mode == "I":
        return Samples(16)
    if image.format == "JPEG2000" and (bits := _precision(image)) > 8:  # Pillow shifts to 16 bits
        return Samples(16, high=2**bits - 1 if bits < 16 else None, scale=2.0 ** (bits - 16))
    return Samples(32 if image.mode in ("I", "F") else 8)


def _samples_of_tiff(tags: Mapping[int, Any]) -> Samples:
    bits, white_is_zero = _first(tags.get(_BITS, 1)), tags.get(_PHOTOMETRIC) == 0
    if _first(tags.get(_SAMPLE_FORMAT, 1)) != 1:
        return Samples(32, white_is_zero=white_is_zero)
    if not 8 < bits <= 16:
        return Samples(bits, white_is_zero=white_is_zero)
    low, high = (tags.get(tag) for tag in (_LOWEST, _HIGHEST))
    low, high = (value[0] if isinstance(value, tuple) else value for value in (low, high))
    if high is None and bits < 16:
        high = 2**bits - 1
    if high is None or not (low or 0) < high or high == _FULL:
        return Samples(16, white_is_zero=white_is_zero)
    return Samples(16, float(low or 0), float(high), white_is_zero=white_is_zero)


def _decoder_arguments(image: Image.Image) -> Any:
    tiles = getattr(image, "tile", None)
    return tiles[0][3] if tiles else None


def _significant_bits(image: Image.Image) -> int:
    """Return the smallest number of bits in the chunk sBIT of a PNG of 16 bits, or 16."""
    with _rewound(image) as file:
        file.seek(8)
        while len(start := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", start)
            if kind == b"sBIT" and 1 <= length <= 4:
                return min(16, max(file.read(length)))
            if kind in (b"IDAT", b"IEND"):
                break
            file.seek(length + 4, 1)
    return 16


def _precision(image: Image.Image) -> int:
    """Return the bits per channel in the header of a JPEG 2000 codestream."""
    with _rewound(image) as file:
        is_bare = file.read(4) == _CODESTREAM
        file.seek(0)
        if not is_bare and not any(kind == b"jp2c" for kind, _ in _boxes(file)):
            return 8
        header = file.read(2**8)
    start = header.find(_CODESTREAM)
    return (header[start + 42] & 0x7F) + 1 if 0 <= start < len(header) - 42 else 8


def _has_opacity(image: Image.Image) -> bool:
    """Whether a JPEG 2000 file defines a channel as opacity, premultiplied or not."""
    with _rewound(image) as file:
        for kind, size in _boxes(file):
            if kind == b"cdef":
                definitions = file.read(min(size, 2**10))[2:]
                whole = len(definitions) // 6 * 6
                return any(use in (1, 2) for _, use, _ in struct.iter_unpack(">HHH", definitions[:whole]))
    return False


def _boxes(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield type and size of each box of a JPEG 2000 file up to the codestream; the file is at the box's content."""
    while len(start := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", start)
        place = file.tell()
        yield kind, max(length - 8, 0)
        if kind == b"jp2c" or length < 8:
            return
        file.seek(place if kind == b"jp2h" else place + length - 8)  # jp2h contains boxes


@contextlib.contextmanager
def _rewound(image: Image.Image) -> Iterator[BinaryIO]:
    """Yield the file of an opened image at its start, and restore its position; empty if the file is closed."""
    file: Any = getattr(image, "fp", None) or io.BytesIO()
    position = file.tell()
    try:
        file.seek(0)
        yield file
    finally:
        file.seek(position)


def grey_to_8_bits(image: Image.Image, samples: Samples, limits: tuple[float, float] | None) -> Image.Image:
    """Scale a grey image of 9 to 32 bits per pixel to 8 bits.

    Args:
        image: a decoded image of the mode I;16, I or F.
        samples: its values in the file.
        limits: the values of black and white; by default, those that the file states.

    Raises:
        InputError: the range of the values is unknown.
    """
    values = np.asarray(image)
    if samples.bits > 16:
        if limits is None:
            raise InputError(
                "signed or 32-bit pixels have no defined value range: give it with --range LOW,HIGH, or convert the "
                "file to 8 or 16 bits per channel"
            )
        grey = _scaled(values, *limits)
    else:
        low, high = limits or (samples.low, samples.high)
        largest = float(values.max()) * samples.scale
        if high is None or (limits is None and largest > high):
            require_bright(image, round(largest))
            low, high = 0, _FULL * samples.scale
        if (low, high) == (0, _FULL * samples.scale):
            grey = (values >> 8).astype(np.uint8)  # as Pillow reads 16 bits per channel of RGB
        else:
            grey = _scaled(np.arange(2**16) * samples.scale, low, high)[values]
    return Image.fromarray(255 - grey if samples.white_is_zero else grey)


def colour_of_16_bits(image: Image.Image, limits: tuple[float, float] | None) -> Image.Image:
    """Return an RGB, RGBA or LA image that Pillow has reduced from 16 to 8 bits, with its range of values.

    Raises:
        InputError: it is nearly black.
    """
    bands = image.split()
    colours = bands[: len(bands) - (image.mode in ("RGBA", "LA"))]
    largest = max(int(band.getextrema()[1]) for band in colours) * 257  # pyright: ignore[reportArgumentType]
    if limits is None:
        require_bright(image, largest)
        return image
    if limits[1] < _LEAST:
        raise InputError(
            f"only the 8 high bits of colour with 16 bits can be read, not values up to {limits[1]:g}: convert the "
            "file to 8 bits per channel, or give --range for grey images only"
        )
    table = _scaled(np.arange(256) * 257, *limits).tolist()
    return Image.merge(image.mode, [band.point(table) for band in colours] + list(bands[len(colours) :]))


def require_bright(image: Image.Image, largest: int) -> None:
    """Refuse an image of 16 bits that is nearly black, and count it if it is dark.

    Raises:
        InputError: no value reaches 2^13.
    """
    bits = max(9, largest.bit_length())
    if largest >= _LEAST:
        if largest < _DIM:
            DIM_IMAGES.add(str(getattr(image, "filename", "")), largest)
        return
    if image.mode in ("RGB", "RGBA", "LA"):
        way = "convert the file to 8 bits per channel, or give --range 0,65535 if it is a dark picture"
    else:
        way = (
            f"give the range of its values with --range LOW,HIGH, such as --range 0,{2**bits - 1} for {bits} bits, or "
            "--range 0,65535 if it is a dark picture"
        )
    raise InputError(f"nearly black: the largest of its 16-bit values is {largest} of {_FULL}; {way}")


def _scaled(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return values from `low` to `high` as 0 to 255."""
    grey = (values.astype(np.float32) - np.float32(low)) * np.float32(255 / (high - low))
    return np.nan_to_num(grey.clip(0, 255)).round().astype(np.uint8)


class DimImages:
    """Counts the images of 16 bits that look dark because they may use fewer bits; one message reports them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._found: dict[str, int] = {}  # an image may be read repeatedly

    def add(self, name: str, largest: int) -> None:
        """Count an image whose largest value is below 2^15."""
        with self._lock:
            self._found[name] = largest

    def extend(self, found: Iterable[tuple[str, int]]) -> None:
        """Count the images that another process has taken."""
        for name, largest in found:
            self.add(name, largest)

    def take(self) -> list[tuple[str, int]]:
        """Return name and largest value of each image since the last call."""
        with self._lock:
            found, self._found = list(self._found.items()), {}
        return found

    def message(self) -> str | None:
        """Return the message about the images since the last call, or None without any."""
        if not (found := self.take()):
            return None
        largest = max(value for _, value in found)
        return (
            f"{counted(len(found), 'image')} with 16-bit values, such as {found[0][0]}, look dark: the largest value "
            f"is {largest} of {_FULL}. If the values have fewer bits, give their range with --range LOW,HIGH, such as "
            f"--range 0,{2 ** largest.bit_length() - 1}"
        )


DIM_IMAGES = DimImages()
"""The dark images of this process."""
