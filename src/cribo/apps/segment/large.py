"""Results of large images: label map and confidence as tiled TIFF, written while the image is read, and a picture."""

import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import tifffile
import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor

from cribo.base.colours import Colour
from cribo.data.labelled.label_maps import IGNORE_INDEX
from cribo.data.readers.map_tags import ExtraTag, nodata_tag
from cribo.data.readers.scale import MICROMETRES, PixelSize
from cribo.data.windows import LargeImage
from cribo.features.memory.large import LabelledRows, label_rows
from cribo.features.memory.memory import SegmentationMemory

LARGE_SUFFIX = ".tif"
"""Suffix of the label maps and confidences of large images."""

TILE = 256
"""Side of the tiles in pixels."""

_PREVIEW = 2048  # limit on the longer side of the reduced picture in pixels; a divisor of TILE reduces


class Tiles:
    """A grey picture of 8 bits as compressed tiles in a temporary file, from which a TIFF is written.

    Args:
        size: height and width in pixels.
        pixel_size: size of a pixel, which is written if it is in micrometres.
        map_tags: tags of the place on the map, which are written.
    """

    def __init__(
        self, size: tuple[int, int], pixel_size: PixelSize | None = None, map_tags: tuple[ExtraTag, ...] = ()
    ) -> None:
        self.size, self.pixel_size, self.map_tags = size, pixel_size, map_tags
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (removed with the object)
        self._lengths: list[int] = []

    def add(self, rows: UInt8[np.ndarray, "h w"]) -> None:
        """Add rows of the picture: a multiple of the height of a tile, or the last ones."""
        height, width = (-(-side // TILE) * TILE for side in rows.shape)
        padded = np.zeros((height, width), np.uint8)
        padded[: rows.shape[0], : rows.shape[1]] = rows
        for top in range(0, height, TILE):
            for left in range(0, width, TILE):
                content = zlib.compress(np.ascontiguousarray(padded[top : top + TILE, left : left + TILE]).tobytes())
                self._lengths.append(self._file.write(content))

    def write(self, file: Path | IO[bytes], palette: Sequence[Colour] | None = None) -> None:
        """Write the picture as a tiled TIFF with deflate compression: grey, or class indices with a palette."""
        colours = None
        if palette is not None:
            colours = np.zeros((3, 256), np.uint16)
            colours[:, : len(palette)] = np.array(palette, np.uint16).T * 257
        # On a map, pixels without a class are no data.
        nodata = [nodata_tag(IGNORE_INDEX)] if self.map_tags and palette is not None else []
        resolution: dict[str, Any] = {}
        if self.pixel_size is not None and self.pixel_size.unit == MICROMETRES:
            per_centimetre = 10_000 / self.pixel_size.width, 10_000 / self.pixel_size.height
            resolution = {"resolution": per_centimetre, "resolutionunit": "CENTIMETER"}
        tifffile.imwrite(
            file,
            self._tiles(),
            shape=self.size,
            dtype=np.uint8,
            tile=(TILE, TILE),
            compression="adobe_deflate",
            photometric="minisblack" if colours is None else "palette",
            colormap=colours,
            metadata=None,
            extratags=[*self.map_tags, *nodata],
            **resolution,
        )

    def _tiles(self) -> Iterator[bytes]:
        self._file.seek(0)
        for length in self._lengths:
            yield self._file.read(length)


@dataclass(frozen=True)
class LabelledLargeImage:
    """A large image with its labels.

    Attributes:
        labels: class of each pixel, 255 for none.
        confidence: 255 times the probability of the class.
        shares: share of the pixels of each class that occurs, by name, in descending order.
        mean_confidence: mean probability of the classes.
        picture: the image, reduced.
        picture_labels: the labels, reduced.
    """

    labels: Tiles
    confidence: Tiles
    shares: dict[str, float]
    mean_confidence: float
    picture: UInt8[Tensor, "c h w"]
    picture_labels: UInt8[Tensor, "h w"]

    nbytes = 0  # in the queue of results: its pixels are in files


def label_large(memory: SegmentationMemory, image: LargeImage) -> LabelledLargeImage:
    """Label a large image in windows.

    Raises:
        UnreadableImage: pixels cannot be decoded.
    """
    labels, confidence = (Tiles(image.size, image.pixel_size, image.map_tags) for _ in range(2))
    counts, total = torch.zeros(IGNORE_INDEX + 1, dtype=torch.long), 0.0
    pictures, maps = [], []
    step = preview_step(image.size)
    for rows in _in_tiles(label_rows(memory, image)):
        labels.add(rows.labels.numpy())
        confidence.add((rows.confidence * 255).round().byte().numpy())
        counts += rows.labels.flatten().bincount(minlength=len(counts))
        total += float(rows.confidence.sum(dtype=torch.double))
        pictures.append(reduced(rows.image, step))
        maps.append(rows.labels[::step, ::step].clone())
    pixels, classes = image.size[0] * image.size[1], memory.classes
    shares = {classes[c]: count / pixels for c, count in enumerate(counts[:IGNORE_INDEX].tolist()) if count}
    shares = dict(sorted(shares.items(), key=lambda share: -share[1]))
    return LabelledLargeImage(labels, confidence, shares, total / pixels, torch.cat(pictures, dim=1), torch.cat(maps))


def _in_tiles(bands: Iterator[LabelledRows]) -> Iterator[LabelledRows]:
    """Yield the same rows in bands as high as whole tiles; the last one may be lower."""
    held: list[LabelledRows] = []
    for band in bands:
        held.append(band)
        height = sum(len(each.labels) for each in held) // TILE * TILE
        if height:
            rows = _joined(held)
            yield LabelledRows(rows.image[:, :height], rows.labels[:height], rows.confidence[:height])
            held = [LabelledRows(rows.image[:, height:], rows.labels[height:], rows.confidence[height:])]
    if held and len((rows := _joined(held)).labels):
        yield rows


def _joined(bands: Sequence[LabelledRows]) -> LabelledRows:
    images, labels, confidence = zip(*bands, strict=True)
    return LabelledRows(torch.cat(images, dim=1), torch.cat(labels), torch.cat(confidence))


# ---------------------------------------------------------------------------------------------------------- pictures


def preview_step(size: tuple[int, int], most: int = _PREVIEW) -> int:
    """Return the power of two by which a picture is reduced to a limit of its sides, at most a tile.

    >>> preview_step((20_000, 20_000)), preview_step((1_000, 900))
    (16, 1)
    """
    step = 1
    while step < TILE and max(size) > most * step:
        step *= 2
    return step


def reduced(image: UInt8[Tensor, "c h w"], step: int) -> UInt8[Tensor, "c h_small w_small"]:
    """Return the mean of each square of pixels; of incomplete ones at the edges, of the pixels that exist."""
    small = F.avg_pool2d(image[None].float(), step, ceil_mode=True, count_include_pad=False)
    return small[0].round().byte()


def read_reduced_image(image: LargeImage, step: int) -> UInt8[Tensor, "c h w"]:
    """Read a large image, reduced by a divisor of the side of a tile.

    Raises:
        UnreadableImage: pixels cannot be decoded.
    """
    height = image.size[0]
    with image.open() as read:
        parts = [reduced(read(top, min(TILE, height - top)).pixels, step) for top in range(0, height, TILE)]
    return torch.cat(parts, dim=1)


def read_reduced_tiles(path: Path, step: int) -> UInt8[Tensor, "h w"]:
    """Read every `step`-th row and column of a picture that `Tiles.write` has written."""
    with tifffile.TiffFile(path) as tiff:
        page: tifffile.TiffPage = tiff.pages.first
        height, width = page.shape
        found = np.zeros((-(-height // step), -(-width // step)), np.uint8)
        for tile, place, _ in page.segments():
            if tile is not None:
                part = tile[0, ::step, ::step, 0]
                top, left = place[2] // step, place[3] // step
                target = found[top : top + part.shape[0], left : left + part.shape[1]]
                target[:] = part[: target.shape[0], : target.shape[1]]
    return torch.from_numpy(found)


def read_tiles(path: Path) -> UInt8[Tensor, "h w"]:
    """Read a picture that `Tiles.write` has written as a whole."""
    return torch.from_numpy(tifffile.imread(path))
