"""Readers of image files, one module per library; rows of the table in `cribo.data.reading` name them.

A reader has a function `open_picture(file, name, kind, reading)`, a context manager that yields a `Picture`; and
`open_windows` with the same arguments, which yields a `WindowedPicture`, if its files are stored in tiles or strips.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from cribo.base.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool, Real, UInt8
    from PIL import Image

    from cribo.data.readers.map_tags import ExtraTag
    from cribo.data.readers.scale import PixelSize


@dataclass(frozen=True)
class ImageKind:
    """A row of the table of image kinds.

    Attributes:
        name: for messages; for Pillow, also the name of its format.
        extensions: of file names, in lower case with the dot, the usual one first.
        signature: pattern of the first bytes of a file.
        reader: module in `cribo.data.readers`; None if files of this kind are recognised and refused.
        channels: what is read, besides transparency.
        bits: maximum bits per channel.
        pages: `first` reads the first frame of an animation; `one` reads the page `Reading.page`, which is
            required for files of several pages.
        packages: import names of the optional packages of the reader.
        extra: extra of cribo that installs them.
        has_windows: whether parts of an image can be decoded, by `open_windows` of the reader; only then, it can be
            read at a pixel size.
        on_disk: whether the reader needs a file on disk, because the image may consist of several files.
    """

    name: str
    extensions: tuple[str, ...]
    signature: re.Pattern[bytes]
    reader: str | None = None
    channels: str = "grey, RGB"
    bits: int = 8
    pages: Literal["first", "one"] = "first"
    packages: tuple[str, ...] = ()
    extra: str = ""
    has_windows: bool = False
    on_disk: bool = False


class Picture(ABC):
    """An open image file of which only the header has been read. Its methods raise any error for damaged files.

    Attributes:
        kind: its row in the table of image kinds.
        header_size: height and width in the header, in which the image may lie on its side; at `Reading.pixel_size`
            if it is given.
    """

    def __init__(self, kind: ImageKind, header_size: tuple[int, int]) -> None:
        self.kind, self.header_size = kind, header_size

    @abstractmethod
    def require_whole(self) -> None:
        """Check that `pixels` would omit nothing.

        Raises:
            InputError: the file has further channels or pages, or values of an unsupported type.
        """

    @abstractmethod
    def pixels(self) -> UInt8[np.ndarray, "h w c"]:
        """Decode the image, upright: as RGB, or the channels of `Reading.channels` if they are not one or three.

        Raises:
            InputError: the range of its values is unknown.
        """

    def unscaled(self) -> Real[np.ndarray, "h w c"] | None:
        """Decode values, upright, whose black and white nothing states; None if the file or its type states them."""
        return None

    def valid(self) -> Bool[np.ndarray, "h w"] | None:
        """Return which pixels of the upright image have data in a channel; None if all have.

        NaN, infinity and the nodata value of the file (GDAL's) are no data.
        """
        return None

    def size(self) -> tuple[int, int]:
        """Return height and width of the upright image."""
        return self.header_size

    @property
    def pages(self) -> int:
        """Number of pages that are images of their own."""
        return 1

    def reduced_pixels(self, reduction: Callable[[int, int], int]) -> tuple[UInt8[np.ndarray, "h w c"], int]:
        """Decode the image at a fraction of its size if that is faster (see `cribo.data.reading.read_reduced`)."""
        pixels = self.pixels()
        reduction(pixels.shape[0], pixels.shape[1])
        return pixels, 1

    def values(self) -> Image.Image:
        """Decode the values as they are stored, such as the classes of a label map.

        Raises:
            InputError: files of this kind contain pictures only.
        """
        raise InputError(f"values of pixels are not read from {self.kind.name} files: save them as PNG")


class Window(NamedTuple):
    """A part of an image.

    Attributes:
        pixels: its pixels.
        valid: which of them have data (`Picture.valid`); None if all have.
    """

    pixels: UInt8[np.ndarray, "h w c"]
    valid: Bool[np.ndarray, "h w"] | None = None


class WindowedPicture(Picture):
    """An open image of which windows can be decoded, and which can be read at a pixel size."""

    @property
    @abstractmethod
    def unit_pixels(self) -> int:
        """Number of pixels of the largest unit of the file that is decoded at once, such as a tile."""

    @property
    @abstractmethod
    def pixel_size(self) -> PixelSize | None:
        """Pixel size at which the image is read; None if the file states none."""

    @property
    def map_tags(self) -> tuple[ExtraTag, ...]:
        """TIFF tags with the map coordinates of the image as it is read; empty if the file has no coordinates."""
        return ()

    @abstractmethod
    def window(self, top: int, left: int, height: int, width: int) -> Window:
        """Decode a window that lies within the upright image, as `pixels` and `valid` do.

        Raises:
            InputError: the range of its values is unknown, or the orientation is not upright.
        """

    def unscaled_window(self, top: int, left: int, height: int, width: int) -> Real[np.ndarray, "n c"] | None:
        """Decode the values of a window, except nodata, if their range is unknown; else return None."""
        return None
