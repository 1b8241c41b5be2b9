"""Reduction of JPEGs while they are decoded: crops of a reduced image, and how far it may be reduced."""

import torch

from cribo.data.reading import largest_factor
from cribo.method.views import Crops


def largest_reduction(crops: Crops, size: int) -> int:
    """Return the largest factor by which an image may be reduced before its views are cut: 8, 4, 2, or 1.

    Each crop keeps at least `size` pixels along both sides, so the reduction makes no view an upscaled one.

    Example:
        >>> crops = Crops(torch.tensor([[0, 0, 900, 1000], [0, 0, 1500, 2000]]), torch.tensor([False, True]))
        >>> largest_reduction(crops, 224), largest_reduction(crops, 256)
        (4, 2)
    """
    return largest_factor(lambda factor: int(reduced_crops(crops, factor).boxes[:, 2:].min()) >= size)


def reduced_crops(crops: Crops, reduction: int) -> Crops:
    """Return the crops in pixels of the reduced image: the reduced pixels that lie entirely inside each crop.

    Each side moves inwards by less than one reduced pixel. The boxes times `reduction` are the cropped areas in pixels
    of the source image, from which patch coordinates are computed.

    Example:
        >>> crops = Crops(torch.tensor([[3, 10, 902, 1000], [0, 0, 1500, 2000]]), torch.tensor([False, True]))
        >>> reduced_crops(crops, 4).boxes.tolist()
        [[1, 3, 225, 249], [0, 0, 375, 500]]
    """
    if reduction == 1:
        return crops
    top_left, height_width = crops.boxes.split(2, dim=-1)
    first = (top_left + reduction - 1) // reduction
    end = (top_left + height_width) // reduction
    return Crops(torch.cat((first, end - first), dim=-1), crops.flips)
