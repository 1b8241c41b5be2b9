"""Images above the limit of pixels, which are decoded in bands of rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cribo.base.errors import TooManyPixels
from cribo.data.config import Reading
from cribo.data.readers import Window
from cribo.data.reading import ImageContent, open_windows, read_image

if TYPE_CHECKING:
    from jaxtyping import Bool, UInt8
    from torch import Tensor

    from cribo.data.readers import WindowedPicture
    from cribo.data.readers.map_tags import ExtraTag
    from cribo.data.readers.scale import PixelSize


class LargeImage:
    """An image with more pixels than `Reading.max_pixels`, decoded in parts when they are needed.

    Args:
        file: its file.
        size: height and width in pixels.
        reading: how it is read; `max_pixels` limits what is decoded at once.
        pixel_size: size of its pixels as it is read; None if it is unknown.
        map_tags: TIFF tags of its place on the map, as it is read.
    """

    nbytes = 0  # in the queue of images that have been read

    def __init__(
        self,
        file: str | os.PathLike[str] | ImageContent,
        size: tuple[int, int],
        reading: Reading,
        pixel_size: PixelSize | None = None,
        map_tags: tuple[ExtraTag, ...] = (),
    ) -> None:
        self.file, self.size, self.reading, self.pixel_size, self.map_tags = file, size, reading, pixel_size, map_tags

    @contextmanager
    def open(self) -> Iterator[Bands]:
        """Open the file, to read bands of rows within the `with` block.

        All errors are raised as UnreadableImage.
        """
        with open_windows(self.file, reading=self.reading) as picture:
            assert picture is not None  # checked by `read_or_open`
            yield Bands(picture, self)


class Rows(NamedTuple):
    """Rows of a large image.

    Attributes:
        pixels: their pixels.
        valid: which of them have data (`cribo.data.reading.read_valid`); None if all have.
    """

    pixels: UInt8[Tensor, "c h w"]
    valid: Bool[Tensor, "h w"] | None = None


class Bands:
    """Reads bands of rows of an open image, from top to bottom; rows that the last band had are not decoded again."""

    def __init__(self, picture: WindowedPicture, image: LargeImage) -> None:
        self._picture, self._image = picture, image
        self._top, self._rows = 0, Window(np.zeros((0, 0, 0), np.uint8))

    def __call__(self, top: int, height: int) -> Rows:
        """Decode rows of the image.

        Raises:
            TooManyPixels: they have more pixels than the limit.
        """
        import torch

        image, width = self._image, self._image.size[1]
        if height * width > image.reading.max_pixels:
            raise TooManyPixels(image.file, f"{height} rows of {width} pixels", image.reading.max_pixels)
        rows, start = self._rows, top
        kept: list[Window] = []
        if self._top <= top < self._top + len(rows.pixels):
            within = slice(top - self._top, top - self._top + height)
            kept = [Window(rows.pixels[within], None if rows.valid is None else rows.valid[within])]
            start = self._top + len(rows.pixels)
        if start < top + height:
            kept.append(self._picture.window(start, 0, top + height - start, width))
        self._top, self._rows = top, _joined(kept)
        pixels, valid = self._rows
        return Rows(torch.from_numpy(pixels).permute(2, 0, 1), None if valid is None else torch.from_numpy(valid))


def _joined(parts: Sequence[Window]) -> Window:
    """Concatenate windows from top to bottom."""
    if len(parts) == 1:
        return parts[0]
    pixels, valid = zip(*parts, strict=True)
    if all(each is None for each in valid):
        return Window(np.concatenate(pixels))
    known = [np.ones(part.pixels.shape[:2], bool) if part.valid is None else part.valid for part in parts]
    return Window(np.concatenate(pixels), np.concatenate(known))


def read_or_open(file: ImageContent, reading: Reading) -> UInt8[Tensor, "c h w"] | LargeImage:
    """Read an image; if it has too many pixels and its kind has windows, return it unread.

    Raises:
        UnreadableImage: see `read_image`.
    """
    try:
        return read_image(file, reading=reading)
    except TooManyPixels:
        if (large := open_large(file, reading)) is None:
            raise
        return large


def open_large(file: str | os.PathLike[str] | ImageContent, reading: Reading) -> LargeImage | None:
    """Return an image with too many pixels, of which only the header is read; None if its kind has no windows.

    Raises:
        UnreadableImage: see `open_windows`.
    """
    with open_windows(file, reading=reading) as picture:
        if picture is None:
            return None
        return LargeImage(file, picture.size(), reading, picture.pixel_size, picture.map_tags)
