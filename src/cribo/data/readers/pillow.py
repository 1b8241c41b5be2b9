"""Reader of image kinds that Pillow decodes."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from PIL import Image, ImageChops, UnidentifiedImageError

from cribo.base.errors import InputError, TooManyPixels
from cribo.data.channels import Samples, grey_to_8_bits, has_data, require_bright, require_high_bits, scaled
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.readers import ImageKind, Picture
from cribo.data.readers.headers import nodata_of, require_one_picture, samples_of, why_no_tiff

if TYPE_CHECKING:
    from jaxtyping import Bool, Real, Shaped, UInt8

_EXIF_ORIENTATION = 0x0112
ORIENTATIONS = range(1, 9)
"""The orientations of EXIF; 1 is upright, and 5 to 8 lie on their side."""

# Pillow's warnings and messages, such as of a broken EXIF block, do not contain the name of the file. What affects the
# pixels is an error.
for _category in (UserWarning, Image.DecompressionBombWarning):
    warnings.filterwarnings("ignore", category=_category, module=r"PIL\.")
logging.getLogger("PIL").addHandler(logging.NullHandler())


@contextmanager
def open_picture(file: BinaryIO, name: str, kind: ImageKind, reading: Reading) -> Iterator[_PillowPicture]:
    """Open an image file; the other plugins of Pillow are not tried, since that of EPS starts Ghostscript.

    Raises:
        InputError: the header is damaged.
        TooManyPixels: Pillow refuses the number of pixels.
    """
    if Image.MAX_IMAGE_PIXELS is not None and reading.max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = reading.max_pixels  # otherwise Pillow would refuse what is allowed
    try:
        image = Image.open(file, formats=[kind.name])
    except UnidentifiedImageError as error:
        raise InputError(
            why_no_tiff(file) or f"not an image of a known format: it begins as {kind.name}, but its header is damaged"
        ) from error
    except Image.DecompressionBombError as error:  # above twice Pillow's limit
        number = re.search(r"\d+", str(error))
        raise TooManyPixels(name, f"{number[0] if number else 'its'} pixels", reading.max_pixels) from error
    with image:
        image.filename = name
        yield _PillowPicture(kind, image, reading)


class _PillowPicture(Picture):
    """An image that Pillow has opened."""

    def __init__(self, kind: ImageKind, image: Image.Image, reading: Reading) -> None:
        super().__init__(kind, (image.height, image.width))
        self._image, self._reading = image, reading

    @property
    def is_deep_colour(self) -> bool:
        """Whether the image has 16 bits per colour channel, of which Pillow decodes the 8 high ones."""
        return self._image.mode in ("RGB", "RGBA", "LA") and samples_of(self._image).bits == 16

    def require_whole(self) -> None:
        require_one_picture(self._image)

    def pixels(self) -> UInt8[np.ndarray, "h w c"]:
        require_plain(f"{self.kind.name} images", self._reading)
        return chosen_channels(upright_rgb(self._image, self._reading), self._reading)

    def unscaled(self) -> Real[np.ndarray, "h w 1"] | None:
        samples = samples_of(self._image)
        if self._reading.range is not None or samples.bits <= 8 or self.is_deep_colour:
            return None
        self._image.load()
        values = np.asarray(self._image)
        if values.ndim > 2 or (samples.high is not None and values.max() * samples.scale <= samples.high):
            return None
        values = values * samples.scale if samples.scale != 1 else values
        return upright(values[..., None], _orientation(self._image))

    def valid(self) -> Bool[np.ndarray, "h w"] | None:
        nodata = nodata_of(self._image)
        if nodata is None and self._image.mode != "F":
            return None
        self._image.load()
        values = np.asarray(self._image)
        return upright(has_data(values if values.ndim == 3 else values[..., None], nodata), _orientation(self._image))

    def size(self) -> tuple[int, int]:
        image = self._image
        if self.kind.name == "TIFF":  # Pillow versions differ in whether they rotate its size before decoding
            image.load()
        return (image.width, image.height) if _orientation(image) >= 5 else (image.height, image.width)

    def reduced_pixels(self, reduction: Callable[[int, int], int]) -> tuple[UInt8[np.ndarray, "h w c"], int]:
        if self.kind.name != "JPEG":
            return super().reduced_pixels(reduction)
        image = self._image
        width, height = image.size
        factor = reduction(*self.size())
        whole = factor not in (2, 4, 8) or min(width, height) < factor**2
        outside = _orientation(image) > 1 and (width % factor or height % factor)
        if whole or outside or image.draft(None, (width // factor, height // factor)) is None:
            factor = 1
        return self.pixels(), factor

    def values(self) -> Image.Image:
        self._image.load()
        return self._image


def require_plain(what: str, reading: Reading) -> None:
    """Check the reading options for images of one page and RGB.

    Args:
        what: the images in messages, such as `JPEG images`.
        reading: the options.

    Raises:
        InputError: another page, a range for each channel, or a channel that does not exist.
    """
    if reading.page:
        raise InputError(f"{what} have one page, 0, got --page {reading.page}")
    if reading.range is not None and len(reading.range) > 2:
        raise InputError(f"a range for each channel is for TIFF, not {what}: give one --range LOW,HIGH")
    if max(reading.channel_numbers or (0,)) > 2:
        raise InputError(f"{what} have the channels 0 to 2, got --channels with {max(reading.channel_numbers or ())}")


def chosen_channels(pixels: UInt8[np.ndarray, "h w 3"], reading: Reading) -> UInt8[np.ndarray, "h w c"]:
    """Return the channels of `Reading.channels` of RGB, which `require_plain` has checked."""
    if (channels := reading.channel_numbers) is None:
        return pixels
    return np.ascontiguousarray(pixels[..., list(channels if len(channels) > 1 else 3 * channels)])


def upright_rgb(image: Image.Image, reading: Reading = DEFAULT_READING) -> UInt8[np.ndarray, "h w 3"]:
    """Decode a Pillow image as upright RGB (see `cribo.data.reading.read_image`).

    Raises:
        InputError: the range of its values is unknown.
    """
    samples = samples_of(image)
    image.load()
    return upright(np.array(_to_rgb(image, samples, reading.limits())), _orientation(image))


def upright(pixels: Shaped[np.ndarray, "h w *c"], orientation: int) -> Shaped[np.ndarray, "new_h new_w *c"]:
    """Turn and flip pixels that are stored in one of `ORIENTATIONS`."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    down, right = (-1 if orientation in each else 1 for each in ((3, 4, 7, 8), (2, 3, 6, 7)))
    return np.ascontiguousarray(pixels[::down, ::right])


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 if it is missing or invalid."""
    try:
        found = int(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:  # a broken EXIF block does not affect the pixels
        return 1
    return found if found in ORIENTATIONS else 1


def _to_rgb(image: Image.Image, samples: Samples, limits: tuple[float, float] | None) -> Image.Image:
    if samples.bits == 16 and image.mode in ("RGB", "RGBA", "LA"):
        image = _colour_of_16_bits(image, limits)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        grey = grey_to_8_bits(np.asarray(image), samples, limits, _name(image))
        return Image.fromarray(grey).convert("RGB")
    if image.mode == "CMYK" and image.format in ("JPEG", "MPO") and "adobe" not in image.info:
        # Pillow inverts the inks of every CMYK JPEG; only files with Adobe's marker store them inverted.
        return ImageChops.invert(image).convert("RGB")
    if image.has_transparency_data:
        return over_white(image)
    return image.convert("RGB")


def over_white(image: Image.Image) -> Image.Image:
    """Return an image with transparency as RGB over white."""
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _colour_of_16_bits(image: Image.Image, limits: tuple[float, float] | None) -> Image.Image:
    """Return an RGB, RGBA or LA image that Pillow has reduced from 16 to 8 bits, with its range of values."""
    bands = image.split()
    colours = bands[: len(bands) - (image.mode in ("RGBA", "LA"))]
    if limits is None:
        largest = max(int(band.getextrema()[1]) for band in colours) * 257  # pyright: ignore[reportArgumentType]
        way = "convert the file to 8 bits per channel, or give --range 0,65535 if it is a dark picture"
        require_bright(largest, _name(image), way=way)
        return image
    require_high_bits(limits)
    table = scaled(np.arange(256) * 257, *limits).tolist()
    return Image.merge(image.mode, [band.point(table) for band in colours] + list(bands[len(colours) :]))


def _name(image: Image.Image) -> str:
    return str(getattr(image, "filename", ""))
