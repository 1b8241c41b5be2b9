"""8-bit pictures for the page: resizing, heat maps, boxes and numbers."""

from collections.abc import Mapping

import matplotlib as mpl
import numpy as np
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from cribo.base.colours import Colour
from cribo.base.painting import MARK, as_picture, region_places

SHOWN = 768
"""Longer side of a picture on the page, in pixels."""

_DARK: Colour = (20, 20, 20)


def shown_size(height: int, width: int, longest: int = SHOWN) -> tuple[int, int]:
    """Return the (height, width) of an image on the page: at most `longest`, and enlarged at most four times.

    Example:
        >>> shown_size(1536, 3072), shown_size(32, 48)
        ((384, 768), (128, 192))
    """
    scale = min(4.0, longest / max(height, width))
    return max(1, round(scale * height)), max(1, round(scale * width))


def as_shown(image: UInt8[Tensor, "c h w"], longest: int = SHOWN) -> UInt8[np.ndarray, "new_h new_w 3"]:
    """Resize an image to the shown size."""
    size = shown_size(image.shape[1], image.shape[2], longest)
    return np.ascontiguousarray(as_picture(TF.resize(image, list(size), antialias=True).numpy()))


def heat_picture(
    picture: UInt8[np.ndarray, "height width 3"], values: Float[Tensor, "h w"], *, low: float, high: float
) -> UInt8[np.ndarray, "height width 3"]:
    """Draw one value per patch over a picture, from dark (low) to bright (high).

    Args:
        picture: background, which is dimmed.
        values: one value per patch.
        low: value of the darkest colour.
        high: value of the brightest colour.
    """
    height, width = picture.shape[:2]
    smooth = F.interpolate(values[None, None].float(), size=(height, width), mode="bilinear", align_corners=False)[0, 0]
    scaled = ((smooth - low) / max(high - low, 1e-6)).clamp(0, 1).numpy()
    heat = mpl.colormaps["inferno"](scaled)[..., :3]
    grey = picture.mean(axis=2, keepdims=True) / 255
    return np.rint(255 * (0.75 * heat + 0.25 * grey)).clip(0, 255).astype(np.uint8)


def box_of_patch(grid: tuple[int, int], row: int, column: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) in pixels of a patch in a picture of `size` (height, width)."""
    top, bottom = (round(edge * size[0] / grid[0]) for edge in (row, row + 1))
    left, right = (round(edge * size[1] / grid[1]) for edge in (column, column + 1))
    return left, top, max(right, left + 1), max(bottom, top + 1)


def with_box(picture: UInt8[np.ndarray, "h w 3"], box: tuple[int, int, int, int]) -> UInt8[np.ndarray, "h w 3"]:
    """Return a copy of a picture with a frame around (left, top, right, bottom), visible on any background."""
    image = Image.fromarray(picture)
    left, top, right, bottom = box
    width = max(1, min(picture.shape[:2]) // 120)
    for margin, colour in ((2 * width, _DARK), (width, MARK)):
        outside = (left - margin, top - margin, right + margin - 1, bottom + margin - 1)
        ImageDraw.Draw(image).rectangle(outside, outline=colour, width=width)
    return np.array(image)


def with_numbers(
    picture: UInt8[np.ndarray, "height width 3"], labels: Int[Tensor, "h w"], numbers: Mapping[int, int]
) -> UInt8[np.ndarray, "height width 3"]:
    """Return a copy of a picture with a number in each region; labels may be of another resolution."""
    image = Image.fromarray(picture)
    down, across = picture.shape[0] / labels.shape[0], picture.shape[1] / labels.shape[1]
    font = ImageFont.load_default(max(10, picture.shape[1] // 20))
    for region, (x, y, _) in region_places(labels.numpy()).items():
        if region in numbers:
            place = (across * (x + 0.5), down * (y + 0.5))
            ImageDraw.Draw(image).text(
                place, str(numbers[region]), "white", font, anchor="mm", stroke_width=2, stroke_fill="black"
            )
    return np.array(image)
