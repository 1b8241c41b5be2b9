"""Class-agnostic regions of an image: proposals by selective search, jittered copies, and similar pairs (ORL)."""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from cribo.base.errors import MissingPackage
from cribo.base.packages import install_command
from cribo.base.painting import as_picture

SEARCH_SIDE = 512
"""Longest side in pixels of the image that selective search reads; larger images are reduced."""

_JITTER_ATTEMPTS = 200
_JITTER_AREA = (0.5, 2.0)
_JITTER_ASPECT = (0.5, 2.0)
_LEAST_IOU = 0.5
_PAIRED_SHARE = 0.1


def selective_search(
    pixels: UInt8[Tensor, "c h w"], *, generator: torch.Generator, side: int = SEARCH_SIDE
) -> Int[Tensor, "r 4"]:
    """Return the boxes (top, left, height, width) of selective search (Uijlings et al. 2013) in its fast mode.

    Small regions tend to come first, as in OpenCV, whose order is a product of a random number and the level of the
    hierarchy. Since OpenCV's random numbers depend on earlier calls, the order is drawn again here.

    Args:
        pixels: the image; of more than three channels, the first three are searched.
        generator: source of the order.
        side: longest side of the image to search, in pixels; larger images are reduced to it.

    Raises:
        MissingPackage: OpenCV is not installed with its contrib modules.
    """
    from torchvision.transforms.v2 import functional as TF

    lengths = torch.tensor(pixels.shape[1:])
    factor = min(1.0, side / max(pixels.shape[1:]))
    if factor < 1:
        pixels = TF.resize(pixels, [max(1, round(factor * length)) for length in pixels.shape[1:]], antialias=True)
    scale = (lengths / torch.tensor(pixels.shape[1:]).double())[:, None]  # exact: reduced sides are rounded
    search = _segmentation().createSelectiveSearchSegmentation()
    search.setBaseImage(np.ascontiguousarray(as_picture(pixels.numpy())[..., ::-1]))  # BGR
    search.switchToSelectiveSearchFast()
    left, top, width, height = torch.from_numpy(search.process()).double().unbind(dim=1)
    start, end = (
        (torch.stack(corner) * scale).round().long() for corner in ((top, left), (top + height, left + width))
    )
    boxes = torch.cat((start, end - start)).T
    boxes = torch.unique(boxes, dim=0)  # sorted
    boxes = boxes[boxes[:, 2:].prod(dim=1).argsort(stable=True)]
    ranks = torch.rand(len(boxes), dtype=torch.float64, generator=generator) * torch.arange(1, len(boxes) + 1)
    return boxes[ranks.argsort()]


def _segmentation() -> Any:
    """Import OpenCV's module of segmentation, which has no types."""
    try:
        import cv2

        return cv2.ximgproc.segmentation
    except (ImportError, AttributeError) as error:
        raise MissingPackage(
            f"the regions of ORL need OpenCV with its contributed modules ({error}): {install_command('regions')}"
        ) from error


def require_selective_search() -> None:
    """Raise an error if selective search is not installed.

    Raises:
        MissingPackage: OpenCV is not installed with its contrib modules.
    """
    _segmentation()


def select_regions(
    boxes: Int[Tensor, "r 4"], *, min_side: int, most: int, max_aspect: float = 3.0, max_iou: float = 0.5
) -> Int[Tensor, "k 4"]:
    """Return the regions that are large, compact, and differ from all earlier ones, in order; none may remain.

    Args:
        boxes: (R, 4) top, left, height, width.
        min_side: minimum height and width in pixels.
        most: maximum number of regions.
        max_aspect: maximum ratio of the longer and the shorter side.
        max_iou: maximum intersection over union with each earlier region.

    Source: ORL (Xie et al. 2021), with the values of the released code.
    """
    from torchvision.ops import nms

    sides = boxes[:, 2:]
    boxes = boxes[(sides.amin(dim=1) >= min_side) & (sides.amax(dim=1) <= max_aspect * sides.amin(dim=1))]
    if not len(boxes):
        return boxes
    order = -torch.arange(len(boxes), dtype=torch.float64)
    return boxes[nms(_corners(boxes), order, max_iou)[:most]]


def jitter_box(box: Int[Tensor, "4"], height: int, width: int, *, generator: torch.Generator) -> Int[Tensor, "4"]:
    """Draw a box near another one: centre within half a side, area .5 to 2 times as large, aspect .5 to 2.

    It overlaps the box by an intersection over union above .5. If 200 draws do not lie inside the image and overlap so
    much, the box is returned unchanged.

    Args:
        box: top, left, height, width in pixels.
        height: of the image.
        width: of the image.
        generator: source of the random numbers.

    Source: the released code of ORL; its aspect is absolute, not relative to the box.
    """
    from torchvision.ops import box_iou

    y, x, area, aspect = torch.rand((4, _JITTER_ATTEMPTS), dtype=torch.float64, generator=generator)
    sides, corner = box[2:].double(), box[:2].double()
    areas = sides.prod() * (_JITTER_AREA[0] + area * (_JITTER_AREA[1] - _JITTER_AREA[0]))
    low, high = (math.log(each) for each in _JITTER_ASPECT)
    aspects = (low + aspect * (high - low)).exp()
    drawn = torch.stack(((areas / aspects).sqrt(), (areas * aspects).sqrt()), dim=1).round()
    centres = corner + sides * torch.stack((y, x), dim=1)
    boxes = torch.cat(((centres - drawn / 2).round(), drawn), dim=1).long()
    inside = (boxes[:, :2] >= 0).all(dim=1) & (boxes[:, :2] + boxes[:, 2:] <= torch.tensor([height, width])).all(dim=1)
    similar = box_iou(_corners(boxes), _corners(box[None]))[:, 0] > _LEAST_IOU
    return next(iter(boxes[inside & similar]), box)


def pair_regions(own: Float[Tensor, "r d"], other: Float[Tensor, "q d"]) -> Int[Tensor, "k 2"]:
    """Return the pairs (own region, other region) of two images with the most similar features, most similar first.

    Args:
        own: (R, D) features of the regions of an image.
        other: (Q, D) features of the regions of another image.

    Returns:
        (K, 2) indices, with K = `number_of_pairs(R)`.

    Source: ORL.
    """
    similarity = F.normalize(own, dim=1) @ F.normalize(other, dim=1).T
    best = similarity.flatten().topk(number_of_pairs(len(own))).indices
    return torch.stack((best // len(other), best % len(other)), dim=1)


def number_of_pairs(regions: int) -> int:
    """Return the number of pairs of an image with each neighbour: a tenth of its regions, at least 1."""
    return max(1, int(_PAIRED_SHARE * regions))


def _corners(boxes: Int[Tensor, "r 4"]) -> Float[Tensor, "r 4"]:
    """Return (x1, y1, x2, y2)."""
    top, left, height, width = boxes.double().unbind(dim=1)
    return torch.stack((left, top, left + width, top + height), dim=1)
