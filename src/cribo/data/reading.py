"""Reading of image files as RGB tensors, with one error class for all invalid files; decoding imports torch."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageChops, UnidentifiedImageError

from cribo.base.errors import UnreadableImage
from cribo.base.wording import is_utf8
from cribo.data.channels import (
    Samples,
    colour_of_16_bits,
    grey_to_8_bits,
    require_one_picture,
    samples_of,
    why_no_tiff,
)
from cribo.data.config import DEFAULT_READING, Reading

if TYPE_CHECKING:
    from jaxtyping import UInt8
    from torch import Tensor

# Restricted, so that no file can reach Pillow's other plugins: the EPS plugin, for example, starts Ghostscript.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "JPEG2000")

_EXIF_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


# Pillow's warnings and messages, such as of a broken EXIF block, do not contain the name of the file. What affects the
# pixels is an error.
for _category in (UserWarning, Image.DecompressionBombWarning):
    warnings.filterwarnings("ignore", category=_category, module=r"PIL\.")
logging.getLogger("PIL").addHandler(logging.NullHandler())

# Errors of the path itself; all others may be temporary server or network failures.
_PERMANENT = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL}


class TooManyPixels(UnreadableImage):
    """An image has more pixels than allowed; the file itself may be intact."""


def temporary_errno(error: BaseException) -> int | None:
    """Return the `errno` of a reading error that may be temporary; None for broken files and permanent errors.

    >>> temporary_errno(OSError(errno.ESTALE, "stale handle")) == errno.ESTALE
    True
    >>> temporary_errno(OSError("image file is truncated")) is None
    True
    """
    cause = error.__cause__ if isinstance(error, UnreadableImage) else error
    return cause.errno if isinstance(cause, OSError) and cause.errno not in _PERMANENT else None


@dataclass(frozen=True)
class EncodedImage:
    """The bytes of an image file inside a larger file, and its name for messages."""

    name: str
    content: bytes = field(repr=False)

    def __fspath__(self) -> str:
        return self.name


class FileState(NamedTuple):
    """Size and modification time of an image, or of the file that contains it.

    Attributes:
        size_bytes: size in bytes.
        mtime_ns: nanoseconds since 1970; 0 if the storage does not report it.
    """

    size_bytes: int
    mtime_ns: int


def read_image(
    path: str | os.PathLike[str] | EncodedImage, *, reading: Reading = DEFAULT_READING
) -> UInt8[Tensor, "3 h w"]:
    """Read an image file, or the bytes of one, as upright RGB.

    Accepts `IMAGE_FORMATS`, and reads the first frame of an animation and the first picture of a phone's MPO.
    Transparent pixels are composited over white, since the colour stored under them is arbitrary. EXIF orientation is
    applied, embedded colour profiles are ignored. 9 to 16 bits per channel are scaled to 8: grey by
    `reading.range`, else by the range that the file states, else by 0 to 65535. The tensor is writable and
    channels-last in memory (strides (1, 3 w, 3)), the layout that torchvision resizes fastest.

    Raises UnreadableImage if the file is missing, empty, truncated or not an image, has a side shorter than
    2 pixels, is a TIFF of several pages or with more channels than RGB and transparency, has 16-bit values below
    2^13 of an unknown range, has 32-bit pixels without `reading.range`, or has more than `reading.max_pixels`
    pixels according to its header, in which case it is not decoded. Pillow's limit for the whole process,
    `PIL.Image.MAX_IMAGE_PIXELS`, is raised to `reading.max_pixels`.

    >>> read_image("street.jpg").shape  # doctest: +SKIP
    torch.Size([3, 360, 480])
    """
    # torchvision.io decodes JPEGs about 20 % faster, but is deprecated since torchvision 0.29 and will be removed.
    with open_header(path, reading=reading) as image:
        return decode(image, reading)


def read_reduced(
    path: str | os.PathLike[str] | EncodedImage,
    reduction: Callable[[int, int], int],
    *,
    reading: Reading = DEFAULT_READING,
) -> tuple[UInt8[Tensor, "3 h w"], int]:
    """Read an image as `read_image` does, reducing JPEGs while decoding.

    `reduction` is called once with height and width of the full-size upright image, and returns the factor by which
    it may be reduced: 8, 4 or 2; with any other number, it is not reduced. Each pixel of the result covers a square of
    that many pixels of the full-size image, starting at its upper left corner; squares of the last row and column
    may extend beyond its edge. The decoder omits the high frequencies of each block of 8 x 8 pixels, which
    is much faster; it still reads the whole file and detects damage.

    Returns the tensor and the factor. The factor is 1 for formats other than JPEG, for images with a side of fewer
    pixels than the square of the factor, and for a JPEG rotated by EXIF if the factor does not divide its sides, since
    the squares would then start outside the image.

    Raises UnreadableImage as `read_image` does.

    >>> pixels, reduction = read_reduced("street.jpg", lambda height, width: 2)  # doctest: +SKIP
    >>> pixels.shape, reduction  # doctest: +SKIP
    (torch.Size([3, 180, 240]), 2)
    """
    with open_header(path, reading=reading) as image:
        if image.format not in ("JPEG", "MPO"):
            pixels = decode(image, reading)
            reduction(pixels.shape[1], pixels.shape[2])
            return pixels, 1
        width, height = image.size
        orientation = _orientation(image)
        factor = reduction(*((width, height) if orientation >= 5 else (height, width)))
        whole = factor not in (2, 4, 8) or min(width, height) < factor**2
        outside = orientation in _UPRIGHT and (width % factor or height % factor)
        if whole or outside or image.draft(None, (width // factor, height // factor)) is None:
            return decode(image, reading), 1
        return decode(image, reading), factor


def image_size(path: str | os.PathLike[str] | EncodedImage, *, reading: Reading = DEFAULT_READING) -> tuple[int, int]:
    """Return height and width of the tensor that `read_image` would return, reading only the header.

    Raises UnreadableImage if the header is invalid; the rest of the file is not read, except that a TIFF is decoded.
    """
    with open_header(path, reading=reading) as image:
        if image.format == "TIFF":  # Pillow versions differ in whether they rotate its size before decoding
            image.load()
        width, height = image.size
        return (width, height) if _orientation(image) >= 5 else (height, width)


NOT_UTF8 = "its name is not valid UTF-8: rename it"
"""Why a file is not read whose name cannot be written to results."""


def require_utf8(name: str) -> None:
    """Raise UnreadableImage for a name that is not valid UTF-8, with which results could not be written."""
    if not is_utf8(name):
        raise UnreadableImage(name, NOT_UTF8)


@contextmanager
def open_header(
    path: str | os.PathLike[str] | EncodedImage, *, reading: Reading = DEFAULT_READING
) -> Iterator[Image.Image]:
    """Open an image file, check its header, and yield the Pillow image before decoding.

    All errors, here and inside the `with` block, are raised as UnreadableImage.
    """
    most = reading.max_pixels
    if Image.MAX_IMAGE_PIXELS is not None and most > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = most  # otherwise Pillow would refuse what `most` allows
    require_utf8(os.fspath(path))
    try:
        with _opened(path) as file:
            if file.seek(0, os.SEEK_END) == 0:
                raise UnreadableImage(path, "the file is empty")
            file.seek(0)
            try:
                image = Image.open(file, formats=IMAGE_FORMATS)
            except UnidentifiedImageError as error:
                unknown = f"not an image of a known format ({', '.join(IMAGE_FORMATS)})"
                raise UnreadableImage(path, why_no_tiff(file) or unknown) from error
            with image:
                width, height = image.size
                if width * height > most:
                    raise TooManyPixels(path, _too_many(f"{width} x {height} pixels", most))
                if min(width, height) < 2:
                    raise UnreadableImage(path, f"{width} x {height} pixels are too few: at least 2 x 2 are required")
                require_one_picture(image)
                image.filename = os.fspath(path)
                yield image
    except (UnreadableImage, MemoryError):
        raise
    except Image.DecompressionBombError as error:  # above twice Pillow's limit
        number = re.search(r"\d+", str(error))
        raise TooManyPixels(path, _too_many(f"{number[0] if number else 'its'} pixels", most)) from error
    except FileNotFoundError as error:
        raise UnreadableImage(path, "no such file") from error
    except Exception as error:  # decoders raise various errors: OSError, SyntaxError, struct.error, ...
        raise UnreadableImage(path, str(error) or type(error).__name__) from error


def _too_many(pixels: str, most: int) -> str:
    return f"{pixels} are more than max_pixels = {most}: not decoded; raise --max_pixels to read it"


def _opened(path: str | os.PathLike[str] | EncodedImage) -> BinaryIO:
    return io.BytesIO(path.content) if isinstance(path, EncodedImage) else Path(path).open("rb")


def decode(image: Image.Image, reading: Reading = DEFAULT_READING) -> UInt8[Tensor, "3 h w"]:
    """Return the tensor that `read_image` would return for the file of a Pillow image.

    Raises:
        ValueError: the range of its values is unknown.
    """
    import torch

    return torch.from_numpy(np.array(upright_rgb(image, reading))).permute(2, 0, 1)


def upright_rgb(image: Image.Image, reading: Reading = DEFAULT_READING) -> Image.Image:
    """Convert an opened image to upright RGB (see `read_image`).

    Raises:
        ValueError: the range of its values is unknown.
    """
    samples = samples_of(image)
    image.load()
    rgb = _to_rgb(image, samples, reading.range)
    turn = _UPRIGHT.get(_orientation(image))
    return rgb if turn is None else rgb.transpose(turn)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 if it is missing or invalid."""
    try:
        found = int(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:  # a broken EXIF block does not affect the pixels
        return 1
    return found if found in _UPRIGHT else 1


def _to_rgb(image: Image.Image, samples: Samples, limits: tuple[float, float] | None) -> Image.Image:
    if samples.bits == 16 and image.mode in ("RGB", "RGBA", "LA"):
        image = colour_of_16_bits(image, limits)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        return grey_to_8_bits(image, samples, limits).convert("RGB")
    if image.mode == "CMYK" and image.format in ("JPEG", "MPO") and "adobe" not in image.info:
        # Pillow inverts the inks of every CMYK JPEG; only files with Adobe's marker store them inverted.
        return ImageChops.invert(image).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")
