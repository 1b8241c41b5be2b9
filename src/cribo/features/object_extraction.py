"""Extraction of the objects of an image: clusters of patches with vector, mask, box and area.

Follows section 3.2.1 of the paper with one view instead of two: the tokens of an image are clustered by similarity and
position, and an object is represented by the mean of its tokens.
"""

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from faster_coco_eval.core import mask as coco_mask
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from cribo.base.errors import InputError, TooManyPixels
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.randomness import keyed_generator
from cribo.data.reading import ImageContent, largest_factor, read_reduced
from cribo.data.windows import LargeImage, open_large
from cribo.features.config import ObjectSettings
from cribo.features.encoder import Encoder, map_by_size
from cribo.features.grid import patch_of_pixel
from cribo.features.objects import Box, GridMask, ImageObject
from cribo.features.patches import resize_image
from cribo.method import cluster_tokens, draw_initial_tokens

_INITIAL_TOKENS = 0x6F626A  # separates these draws from others with the same image key
MAX_PATCHES = 4096  # per image: clustering compares all pairs of patches
_PATCHES_AT_ONCE = 16_384  # maximum per encoded batch


@dataclass(frozen=True, eq=False)
class ImageObjects:
    """The objects of one image, and its patch features for queries with other regions.

    Attributes:
        height: height of the image in pixels.
        width: width of the image in pixels.
        objects: objects in descending order of area.
        tokens: (N, D) patch features of the backbone in row-major order.
        grid: number of rows and columns of patches.
    """

    height: int
    width: int
    objects: tuple[ImageObject, ...]
    tokens: Float[Tensor, "n d"]
    grid: tuple[int, int]

    def box_vector(self, box: Box) -> Float[np.ndarray, " d"]:
        """Return the normalised mean (D,) of the tokens, weighted by their overlap with a box."""
        down = _overlap(box[1], box[3], self.height, self.grid[0])
        across = _overlap(box[0], box[2], self.width, self.grid[1])
        weight = (down[:, None] * across).flatten()
        return F.normalize(weight @ self.tokens.double(), dim=0).float().numpy()


class PreparedImage(NamedTuple):
    """An image resized for the encoder.

    Attributes:
        pixels: pixels of the resized image.
        height: original height in pixels.
        width: original width in pixels.
        key: hash of the pixels, the key of the image's random draws.
    """

    pixels: UInt8[Tensor, "c h w"]
    height: int
    width: int
    key: int

    @property
    def nbytes(self) -> int:
        """Size of the pixels in bytes."""
        return self.pixels.nbytes


def read_prepared(
    path: str | os.PathLike[str] | ImageContent,
    encoder: Encoder,
    settings: ObjectSettings,
    *,
    reading: Reading = DEFAULT_READING,
) -> PreparedImage:
    """Read and resize an image; a large JPEG is decoded at reduced size.

    Raises:
        UnreadableImage: under the conditions of `read_image`.
    """
    whole = (0, 0)

    def reduction(height: int, width: int) -> int:
        nonlocal whole
        whole = height, width
        rows, columns = _size(encoder, height, width, settings)
        # A reduction that does not divide the size would shift pixels. Decode at least twice the final size, because
        # the resize in `prepare_image` filters better.
        most = min(height / rows, width / columns) / 2
        return largest_factor(lambda factor: not (height % factor or width % factor) and factor <= most)

    pixels, _ = read_reduced(path, reduction, reading=reading)
    return prepare_image(pixels, encoder, settings, whole)


def read_prepared_or_open(
    file: ImageContent, encoder: Encoder, settings: ObjectSettings, *, reading: Reading
) -> PreparedImage | LargeImage:
    """Read and resize an image; one above the limit of pixels whose kind has windows is returned unread.

    Raises:
        UnreadableImage: under the conditions of `read_image`.
    """
    try:
        return read_prepared(file, encoder, settings, reading=reading)
    except TooManyPixels:
        if (large := open_large(file, reading)) is None:
            raise
        return large


def prepare_image(
    image: UInt8[Tensor, "c h w"], encoder: Encoder, settings: ObjectSettings, whole: tuple[int, int] | None = None
) -> PreparedImage:
    """Resize an image for `extract_prepared`; can run in threads ahead of the encoder.

    Args:
        image: RGB image.
        encoder: encoder that determines the size.
        settings: settings that define objects.
        whole: (height, width) of the image before a reduction by the decoder.
    """
    height, width = whole or image.shape[1:]
    pixels = resize_image(image, _size(encoder, height, width, settings), "bicubic").contiguous()
    digest = hashlib.sha256(f"{tuple(pixels.shape)}".encode() + pixels.numpy().tobytes()).digest()
    return PreparedImage(pixels, height, width, int.from_bytes(digest[:8], "little"))


def _size(encoder: Encoder, height: int, width: int, settings: ObjectSettings) -> tuple[int, int]:
    scale = 1.0 if settings.size is None else settings.size / min(height, width)
    return encoder.size(height, width, scale=scale, max_patches=MAX_PATCHES)


def extract_objects(
    encoder: Encoder,
    images: Sequence[UInt8[Tensor, "c h w"]],
    settings: ObjectSettings | None = None,
) -> list[ImageObjects]:
    """Extract the objects of images, independently for each image.

    Args:
        encoder: the encoder.
        images: RGB images of any sizes.
        settings: settings that define objects.

    Raises:
        ValueError: the encoder's features do not match the number of patches, or are not finite.

    Example:
        >>> from cribo.features import mean_colour_encoder
        >>> image = torch.zeros(3, 64, 64, dtype=torch.uint8)
        >>> image[:, :, 40:] = 200
        >>> settings = ObjectSettings(num_objects=2, size=None)
        >>> [found] = extract_objects(mean_colour_encoder(8), [image], settings)
        >>> [(each.box, each.area) for each in found.objects]
        [((0, 0, 40, 64), 2560), ((40, 0, 64, 64), 1536)]
    """
    settings = settings or ObjectSettings()
    prepared = [prepare_image(image, encoder, settings) for image in images]
    return extract_prepared(encoder, prepared, settings)


@torch.no_grad()
def extract_prepared(
    encoder: Encoder,
    prepared: Sequence[PreparedImage],
    settings: ObjectSettings,
) -> list[ImageObjects]:
    """Extract the objects of prepared images; images of equal size are encoded as batches."""
    return map_by_size(
        lambda batch: _extract_batch(encoder, batch, settings),
        prepared,
        lambda image: tuple(image.pixels.shape[1:]),
        lambda size: max(1, _PATCHES_AT_ONCE * encoder.patch_size**2 // math.prod(size)),
    )


def _extract_batch(encoder: Encoder, batch: list[PreparedImage], settings: ObjectSettings) -> list[ImageObjects]:
    """Extract the objects of images of equal size."""
    grids = encoder.grids(torch.stack([image.pixels for image in batch]))
    grid, tokens = (grids.shape[1], grids.shape[2]), grids.flatten(1, 2)
    patches = tokens.shape[1]
    if not tokens.isfinite().all():
        raise InputError("the encoder's features are not finite: check its weights, or use a higher precision")
    num_objects = min(settings.num_objects, patches)
    initial = [
        draw_initial_tokens(patches, num_objects, generator=keyed_generator(_INITIAL_TOKENS, image.key))
        for image in batch
    ]
    centres = torch.stack([_patch_centres(image, grid) for image in batch])
    labels = cluster_tokens(
        tokens,
        centres.to(grids.device),
        num_objects=num_objects,
        position_weight=settings.position_weight,
        marginals=settings.marginals,
        initial_tokens=torch.stack(initial).to(grids.device),
    )
    vectors = _mean_tokens(tokens, labels, num_objects).cpu().numpy()
    return [
        ImageObjects(image.height, image.width, _objects(image, own.numpy(), mine, grid, settings), kept, grid)
        for image, own, mine, kept in zip(batch, labels.cpu(), vectors, tokens.cpu(), strict=True)
    ]


def _patch_centres(image: PreparedImage, grid: tuple[int, int]) -> Float[Tensor, "n 2"]:
    """Return (x, y) of the centre of each patch in pixels of the original image."""
    x = (torch.arange(grid[1]) + 0.5) * (image.width / grid[1])
    y = (torch.arange(grid[0]) + 0.5) * (image.height / grid[0])
    return torch.stack((x.repeat(grid[0]), y.repeat_interleave(grid[1])), dim=1)


def _mean_tokens(
    tokens: Float[Tensor, "b n d"], labels: Int[Tensor, "b n"], num_objects: int
) -> Float[Tensor, "b k d"]:
    """Return the normalised mean of each cluster's tokens, which equals their normalised sum."""
    sums = tokens.new_zeros(len(tokens), num_objects, tokens.shape[2])
    sums.scatter_add_(1, labels[..., None].expand_as(tokens), tokens)
    return F.normalize(sums, dim=-1)


def _objects(
    image: PreparedImage,
    labels: Int[np.ndarray, " n"],
    vectors: Float[np.ndarray, "k d"],
    grid: tuple[int, int],
    settings: ObjectSettings,
) -> tuple[ImageObject, ...]:
    """Return the clusters of at least the minimum area, in descending order of area."""
    size = (image.height, image.width)
    rows, columns = (np.bincount(patch_of_pixel(*sides), minlength=sides[1]) for sides in zip(size, grid, strict=True))
    pixels = (rows[:, None] * columns).flatten()
    areas = np.bincount(labels, weights=pixels, minlength=len(vectors)).astype(np.int64)
    order = np.argsort(-areas, kind="stable")
    large = [k for k in order if areas[k] > 0 and areas[k] >= settings.min_share * image.height * image.width]
    masks = np.asfortranarray((labels[:, None] == np.array(large, dtype=np.int64)).reshape(*grid, -1), dtype=np.uint8)
    return tuple(
        ImageObject(
            number,
            vectors[k].copy(),  # a view would keep the whole batch in memory
            GridMask(grid, encoded["counts"], size),
            _box(masks[..., number], rows, columns),
            int(areas[k]),
        )
        for number, (k, encoded) in enumerate(zip(large, coco_mask.encode(masks) if large else [], strict=True))
    )


def _box(mask: UInt8[np.ndarray, "gh gw"], rows: Int[np.ndarray, " gh"], columns: Int[np.ndarray, " gw"]) -> Box:
    """Return the bounding box of a mask, given the pixels of each row and column of patches."""
    y = np.repeat(mask.any(axis=1), rows).nonzero()[0]
    x = np.repeat(mask.any(axis=0), columns).nonzero()[0]
    return int(x[0]), int(y[0]), int(x[-1]) + 1, int(y[-1]) + 1


def _overlap(start: float, end: float, pixels: int, patches: int) -> Float[Tensor, " patches"]:
    """Return the overlap in pixels of each row (or column) of patches with an interval."""
    edges = torch.arange(patches + 1, dtype=torch.double) * (pixels / patches)
    return (edges[1:].clamp(max=end) - edges[:-1].clamp(min=start)).clamp(min=0)
