"""Headers of TIFF, PNG, PPM and JPEG 2000: channels, pages and range of values, which Pillow does not report."""

from __future__ import annotations

import contextlib
import io
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2, TiffImageFile

from cribo.base.errors import InputError
from cribo.base.wording import counted
from cribo.data.channels import FULL, Samples

_CODESTREAM = b"\xff\x4f\xff\x51"  # the markers that start JPEG 2000 data

NODATA = 42113
"""GDAL's tag of the value of pixels without data."""

# Channels of each photometric interpretation of TIFF, without alpha.
_COLOURS = {0: 1, 1: 1, 2: 3, 3: 1, 5: 4, 6: 3, 8: 3}
_KINDS = {1: "unsigned integers", 2: "signed integers", 3: "floating-point numbers", 5: "complex", 6: "complex"}
_BITS, _PHOTOMETRIC, _DESCRIPTION, _SAMPLES, _PLANAR, _EXTRA, _SAMPLE_FORMAT = 258, 262, 270, 277, 284, 338, 339
_SUBFILE, _LOWEST, _HIGHEST, _DEPTH = 254, 340, 341, 32997
_REDUCED_OR_MASK = 0b101  # bits of NewSubfileType
_SUPPORTED_KINDS = {(1, bits) for bits in (1, 2, 4, 8, 12, 16, 32)} | {(2, 8), (2, 16), (2, 32), (3, 32)}
_ONLY = "only grey and RGB can be read, so save each channel, or each three of them, as an image of its own"


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


def may_have_pages(file: BinaryIO) -> bool:
    """Whether a file may have several pages; a TIFF has them if it has several directories or was saved by ImageJ."""
    try:
        tags = _first_directory(file)
    except Exception:  # another format, or a damaged file
        return True
    description = tags.get(_DESCRIPTION, "")
    return bool(tags.next) or tags.get(_DEPTH, 1) > 1 or "images=" in str(description)


def _first_directory(file: BinaryIO) -> ImageFileDirectory_v2:
    """Read the tags of the first page of a TIFF; raise various errors for other files."""
    file.seek(0)
    header = file.read(8)
    if header[2:3] == b"\x2b" or header[3:4] == b"\x2b":
        header += file.read(8)
    tags = ImageFileDirectory_v2(header)
    file.seek(tags.next)
    tags.load(file)
    return tags


def why_no_tiff(file: BinaryIO) -> str | None:
    """Return why Pillow cannot identify a TIFF, or None if it is not a TIFF."""
    try:
        tags = _first_directory(file)
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
        return samples_of_tiff(image.tag_v2)
    if image.format == "PNG" and "16B" in str(_decoder_arguments(image)):
        significant = _significant_bits(image)
        return Samples(16, high=2**significant - 1 if significant < 16 else None)
    if image.format == "PPM" and isinstance(maxval := _decoder_arguments(image), tuple) and isinstance(maxval[-1], int):
        if maxval[-1] > 255:  # Pillow scales to 65535
            highest = maxval[-1]
            return Samples(16, high=highest if highest < FULL else None, scale=highest / FULL)
    elif image.format == "PPM" and image.mode == "I":
        return Samples(16)
    if image.format == "JPEG2000" and (bits := _precision(image)) > 8:  # Pillow shifts to 16 bits
        return Samples(16, high=2**bits - 1 if bits < 16 else None, scale=2.0 ** (bits - 16))
    return Samples(32 if image.mode in ("I", "F") else 8)


def samples_of_tiff(tags: Mapping[int, Any]) -> Samples:
    """Return bits and range of the values of a page of a TIFF, given its tags."""
    bits, white_is_zero = _first(tags.get(_BITS, 1)), tags.get(_PHOTOMETRIC) == 0
    if _first(tags.get(_SAMPLE_FORMAT, 1)) != 1:
        return Samples(32, white_is_zero=white_is_zero)
    if not 8 < bits <= 16:
        return Samples(bits, white_is_zero=white_is_zero)
    low, high = (tags.get(tag) for tag in (_LOWEST, _HIGHEST))
    low, high = (value[0] if isinstance(value, tuple) else value for value in (low, high))
    if high is None and bits < 16:
        high = 2**bits - 1
    if high is None or not (low or 0) < high or high == FULL:
        return Samples(16, white_is_zero=white_is_zero)
    return Samples(16, float(low or 0), float(high), white_is_zero=white_is_zero)


def nodata_of(image: Image.Image) -> float | None:
    """Return the value of pixels without data of an opened image; None if it has none."""
    return nodata_of_tiff(image.tag_v2) if isinstance(image, TiffImageFile) else None


def nodata_of_tiff(tags: Mapping[int, Any]) -> float | None:
    """Return the value of pixels without data of a page of a TIFF, which GDAL writes as text."""
    try:
        return float(str(tags.get(NODATA, "")).rstrip("\0"))
    except ValueError:
        return None


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
