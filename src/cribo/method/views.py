"""Two views of an image, with the position of every patch in the source image.

Source: docs/method.md, "Views"; their photometric operations are in `cribo.data.photometric`.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from cribo.method.config import Interpolation, ViewRecipe

_CROP_ATTEMPTS = 10


@dataclass(frozen=True)
class Crops:
    """Crop boxes and flips of the V views of one image; V = 2 for a pair.

    Attributes:
        boxes: (V, 4) top, left, height, width in integer pixels of the source image.
        flips: (V,) whether the view is mirrored left to right.
    """

    boxes: Int[Tensor, "v 4"]
    flips: Bool[Tensor, " v"]


def sample_crops(height: int, width: int, recipe: ViewRecipe, *, generator: torch.Generator) -> Crops:
    """Draw the crops of both views of an image: random area and aspect ratio, then position, then flip.

    If none of ten random shapes fits, the crop is the largest centred one with an allowed aspect ratio.

    Example:
        >>> crops = sample_crops(480, 640, ViewRecipe(), generator=torch.Generator().manual_seed(0))
        >>> crops.boxes.shape
        torch.Size([2, 4])
    """
    boxes, flips = [], []
    for _ in range(2):
        draws = torch.rand(2 * _CROP_ATTEMPTS + 3, dtype=torch.float64, generator=generator).tolist()
        size = _crop_size(height, width, recipe, draws)
        if size is None:
            boxes.append(_central_crop(height, width, recipe))
        else:
            top, left = int(draws[-3] * (height - size[0] + 1)), int(draws[-2] * (width - size[1] + 1))
            boxes.append((top, left, *size))
        flips.append(draws[-1] < recipe.flip)
    return Crops(torch.tensor(boxes), torch.tensor(flips))


def cut_views(
    image: UInt8[Tensor, "c h w"], crops: Crops, size: int, *, interpolation: Interpolation = "bicubic"
) -> UInt8[Tensor, "v c s s"]:
    """Cut the views from an image: crop, resize (antialiased), flip; 8 bits per channel."""
    # Importing torchvision takes as long as importing PyTorch, and only this function needs it.
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as TF

    # Resizing a strided crop is several times slower: the kernel unpacks it channel by channel.
    layout = torch.channels_last if image.stride(0) == 1 else torch.contiguous_format
    views = []
    for (top, left, height, width), flip in zip(crops.boxes.tolist(), crops.flips.tolist(), strict=True):
        crop = image[None, :, top : top + height, left : left + width].contiguous(memory_format=layout)
        view = TF.resize(crop, [size, size], interpolation=InterpolationMode(interpolation), antialias=True)
        views.append(view.flip(-1) if flip else view)
    return torch.cat(views)


def patch_coordinates(
    boxes: Int[Tensor, "*views 4"], flips: Bool[Tensor, "*views"], grid: tuple[int, int]
) -> Float[Tensor, "*views n 2"]:
    """Return the centres (x, y) of a view's patches in pixels of the source image, in row-major order.

    A closed-form function of crop box and flip. Pixel i covers [i, i + 1), so its centre lies at i + 0.5.

    Args:
        boxes: (..., 4) top, left, height, width of the crops.
        flips: (...) whether the view is mirrored.
        grid: (h, w) patches of a view; N = h * w.

    Returns:
        (..., N, 2) float32.

    Example:
        >>> box, flip = torch.tensor([10, 20, 64, 64]), torch.tensor(False)
        >>> patch_coordinates(box, flip, (2, 2)).tolist()
        [[36.0, 26.0], [68.0, 26.0], [36.0, 58.0], [68.0, 58.0]]
    """
    rows, columns = grid
    top, left, height, width = boxes.float()[..., None].unbind(dim=-2)
    y = (torch.arange(rows, device=boxes.device) + 0.5) / rows
    x = (torch.arange(columns, device=boxes.device) + 0.5) / columns
    x = torch.where(flips[..., None], 1 - x, x)
    x, y = left + x * width, top + y * height
    x = x[..., None, :].expand(*x.shape[:-1], rows, columns)
    y = y[..., :, None].expand(*y.shape[:-1], rows, columns)
    return torch.stack((x, y), dim=-1).flatten(-3, -2)


def _crop_size(height: int, width: int, recipe: ViewRecipe, draws: list[float]) -> tuple[int, int] | None:
    low, high = (math.log(ratio) for ratio in recipe.aspect)
    for attempt in range(_CROP_ATTEMPTS):
        area = height * width * (recipe.area[0] + draws[2 * attempt] * (recipe.area[1] - recipe.area[0]))
        aspect = math.exp(low + draws[2 * attempt + 1] * (high - low))
        crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            return crop_height, crop_width
    return None


def _central_crop(height: int, width: int, recipe: ViewRecipe) -> tuple[int, int, int, int]:
    aspect = min(max(width / height, recipe.aspect[0]), recipe.aspect[1])
    crop_width = max(1, min(width, round(height * aspect)))
    crop_height = max(1, min(height, round(width / aspect)))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width
