"""Sizes and places on the grid of patches; does not import torch."""

import math

import numpy as np
from jaxtyping import Int


def encoding_size(
    height: int,
    width: int,
    patch_size: int,
    *,
    fixed: int | None = None,
    scale: float = 1.0,
    patches: int | None = None,
    max_patches: int | None = None,
) -> tuple[int, int]:
    """Return the (height, width) in pixels at which an application encodes an image.

    This is the rule of cribo segment, index, search, embed, explore, figures and adapt; evaluations follow the rules of
    their protocols instead. A network with a fixed input size gets squares of that size. For others, the image is
    scaled to whole pixels, and each side is rounded to a multiple of the patch size (`grid_size`).

    Args:
        height: height of the image in pixels.
        width: width of the image in pixels.
        patch_size: patch size of the network in pixels.
        fixed: side of the images that the network accepts, such as a Swin's; None if it accepts any size.
        scale: factor by which both sides are resized.
        patches: approximate number of patches, which replaces `scale`; sides are not rounded to whole pixels before.
        max_patches: maximum number of patches; larger images are reduced.

    Example:
        >>> encoding_size(480, 640, 16, scale=0.5), encoding_size(480, 640, 14, patches=432)
        ((240, 320), (252, 336))
        >>> encoding_size(9000, 9000, 16, max_patches=4096), encoding_size(480, 640, 32, fixed=224)
        ((1024, 1024), (224, 224))
    """
    if fixed is not None:
        return fixed, fixed
    if patches is not None:
        scale = patch_size * math.sqrt(patches / (height * width))
        return grid_size(scale * height, scale * width, patch_size)
    if max_patches is None:
        return grid_size(round(scale * height), round(scale * width), patch_size)
    scale = min(scale, (max_patches * patch_size**2 / (height * width)) ** 0.5)
    size = grid_size(round(scale * height), round(scale * width), patch_size)
    rows, columns = (side // patch_size for side in size)
    # A long strip is at least one patch wide.
    return min(rows, max_patches // columns or 1) * patch_size, min(columns, max_patches) * patch_size


def grid_size(height: float, width: float, patch_size: int) -> tuple[int, int]:
    """Round each side to the nearest multiple of the patch size, at least one patch.

    Ties are rounded down, since the paper down-samples.

    Example:
        >>> grid_size(360, 480, 16)
        (352, 480)
    """
    return (
        max(1, math.ceil(height / patch_size - 0.5)) * patch_size,
        max(1, math.ceil(width / patch_size - 0.5)) * patch_size,
    )


def window_starts(length: int, side: int, step: int) -> list[int]:
    """Return the starts of windows that cover a length, with the last window aligned to its end.

    Args:
        length: length to cover, in pixels or patches; a single window suffices if it is not longer than `side`.
        side: length of a window, in the same unit.
        step: distance between the starts of consecutive windows, in the same unit.

    Example:
        >>> window_starts(10, 4, 3), window_starts(11, 4, 3), window_starts(3, 4, 3)
        ([0, 3, 6], [0, 3, 6, 7], [0])
    """
    return [*range(0, length - side, step), max(0, length - side)]


def patch_of_pixel(pixels: int, patches: int) -> Int[np.ndarray, " pixels"]:
    """Return the grid row (or column) that contains the centre of each pixel row (or column).

    Example:
        >>> patch_of_pixel(5, 2).tolist()
        [0, 0, 1, 1, 1]
    """
    return (2 * np.arange(pixels) + 1) * patches // (2 * pixels)
