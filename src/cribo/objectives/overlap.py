"""Overlap of the crops of an image, and features aligned to it."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cribo.method import Crops
from cribo.method.precision import at_least_float32


def overlap_boxes(crops: Crops) -> Float[Tensor, "v v 4"]:
    """Return the overlap of each pair of crops of an image, as a box in the first of them.

    Args:
        crops: V crops in pixels of the image.

    Returns:
        (V, V, 4): entry [a, b] is the box (x1, y1, x2, y2) of the overlap of crops a and b, in fractions of crop a,
        mirrored if crop a is. Where crops do not overlap, x2 <= x1 or y2 <= y1.

    Example:
        >>> boxes, flips = torch.tensor([[0, 0, 40, 40], [0, 10, 40, 40]]), torch.tensor([False, True])
        >>> overlap_boxes(Crops(boxes, flips))[[0, 1], [1, 0]]
        tensor([[0.2500, 0.0000, 1.0000, 1.0000],
                [0.2500, 0.0000, 1.0000, 1.0000]])
    """
    top, left, height, width = crops.boxes.double().unbind(dim=1)
    corner, size = torch.stack((left, top), dim=1), torch.stack((width, height), dim=1)
    low = torch.maximum(corner[:, None], corner)
    high = torch.minimum((corner + size)[:, None], corner + size)
    start, end = ((place - corner[:, None]) / size[:, None] for place in (low, high))
    mirror = torch.stack((crops.flips, torch.zeros_like(crops.flips)), dim=1)[:, None]
    start, end = torch.where(mirror, 1 - end, start), torch.where(mirror, 1 - start, end)
    return torch.cat((start, end), dim=2).float()


def overlap_area(crops: Crops) -> Float[Tensor, "v v"]:
    """Return the area of the overlap of each pair of crops, in pixels of the image; 0 without overlap."""
    boxes = overlap_boxes(crops)
    sides = (boxes[..., 2:] - boxes[..., :2]).clamp_min(0)
    return sides.prod(dim=-1) * crops.boxes[:, 2:].prod(dim=1)[:, None]


def align(maps: Float[Tensor, "b c h w"], boxes: Float[Tensor, "b 4"], side: int) -> Float[Tensor, "b c s s"]:
    """Average a map over a grid of `side` x `side` bins in a box of each image (RoIAlign; He et al. 2017).

    Args:
        maps: (B, C, h, w) features or scores.
        boxes: (B, 4) a box (x1, y1, x2, y2) in each map, in positions of the map: from 0 to w and 0 to h.
        side: number of bins along each side.
    """
    from torchvision.ops import roi_align

    maps = at_least_float32(maps)
    images = torch.arange(len(maps), device=maps.device, dtype=maps.dtype)[:, None]
    return roi_align(maps, torch.cat((images, boxes.to(maps)), dim=1), side, aligned=True)


def align_overlap(
    maps: Float[Tensor, "b d h w"], boxes: Float[Tensor, "b 4"], flips: Bool[Tensor, " b"], side: int
) -> Float[Tensor, "b n d"]:
    """Average each map over a grid in the overlap of its crop with another one, in the orientation of the image.

    Rows of two crops of an image, aligned to the same overlap, are of the same places.

    Args:
        maps: (B, D, h, w) features of a crop of each image.
        boxes: (B, 4) the overlap in each crop, in fractions of the crop (`overlap_boxes`).
        flips: (B,) whether the crop is mirrored.
        side: the overlap is divided into side x side bins.

    Returns:
        (B, side * side, D), row after row.
    """
    height, width = maps.shape[2:]
    x, y = boxes.unflatten(1, (2, 2)).unbind(dim=2)
    low, high = torch.stack((x * width, y * height), dim=2).unbind(dim=1)
    found = align(maps, torch.cat((low, torch.maximum(low, high)), dim=1), side)
    return torch.where(flips[:, None, None, None], found.flip(-1), found).flatten(2).transpose(1, 2)
