"""Encoding of images at a moderate size, for statistics and verdicts."""

import logging
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.data import DataError, ImageSource, UnreadableImage
from cribo.models import Backbone, Features, evaluation_mode, normalise
from cribo.retrieval.grid import encoding_size
from cribo.retrieval.patches import resize_image

log = logging.getLogger("cribo")

PATCHES = 432
"""Approximate number of patches per encoded image, such as 24 x 18 for an aspect ratio of 4:3."""


def encode(backbone: Backbone, image: UInt8[Tensor, "3 h w"], *, layers: int = 1) -> Features:
    """Encode one image in evaluation mode, on the backbone's device, resized to about `PATCHES` patches."""
    size = encoding_size(
        image.shape[1], image.shape[2], backbone.patch_size, fixed=backbone.fixed_size, patches=PATCHES
    )
    return encode_pixels(backbone, resize_image(image, size, "bicubic")[None].float() / 255, layers=layers)


@torch.inference_mode()
def encode_pixels(backbone: Backbone, images: Float[Tensor, "b 3 h w"], *, layers: int = 1) -> Features:
    """Encode images with values in [0, 1], in evaluation mode and on the backbone's device."""
    pixels = images.to(next(backbone.parameters()).device)
    with evaluation_mode(backbone):
        return backbone.encode(normalise(pixels, mean=backbone.mean, std=backbone.std), layers)


def readable(images: ImageSource, indices: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield index and pixels of each readable image; log the others.

    Raises:
        DataError: no image can be read.
    """
    first: UnreadableImage | None = None
    found = 0
    for index in indices:
        try:
            pixels = images.load(index)
        except UnreadableImage as error:
            first = first or error
            log.warning("skipping %s", error)
            continue
        found += 1
        yield index, pixels
    if not found:
        raise DataError(f"none of {len(indices)} images can be read: {first}")
