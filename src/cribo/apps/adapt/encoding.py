"""Encoding of images at a moderate size, for statistics and verdicts."""

from jaxtyping import UInt8
from torch import Tensor

from cribo.features.grid import encoding_size
from cribo.features.patches import resize_image
from cribo.models import Backbone, Features
from cribo.pretraining.agreement import encode_pixels

PATCHES = 432
"""Approximate number of patches per encoded image, such as 24 x 18 for an aspect ratio of 4:3."""


def encode(backbone: Backbone, image: UInt8[Tensor, "c h w"], *, layers: int = 1) -> Features:
    """Encode one image in evaluation mode, on the backbone's device, resized to about `PATCHES` patches."""
    size = encoding_size(
        image.shape[1], image.shape[2], backbone.patch_size, fixed=backbone.fixed_size, patches=PATCHES
    )
    return encode_pixels(backbone, resize_image(image, size, "bicubic")[None].float() / 255, layers=layers)
