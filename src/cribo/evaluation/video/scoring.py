"""Region similarity J and boundary accuracy F, as in the evaluation of DAVIS 2017."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

TOLERANCE = 0.008
"""Maximum distance of matching boundary pixels relative to the image diagonal, rounded up to pixels."""


def score_frame(
    found: UInt8[Tensor, "h w"], true: UInt8[Tensor, "h w"], objects: int
) -> tuple[Float[Tensor, " objects"], Float[Tensor, " objects"]]:
    """Return J and F of the objects 1 to `objects` in a frame."""
    pairs = [(found == number, true == number) for number in range(1, objects + 1)]
    return (
        torch.tensor([region_similarity(*pair) for pair in pairs], dtype=torch.float64),
        torch.tensor([boundary_accuracy(*pair) for pair in pairs], dtype=torch.float64),
    )


def region_similarity(found: Bool[Tensor, "h w"], true: Bool[Tensor, "h w"]) -> float:
    """Return J, the IoU of two regions; 1 if both are empty."""
    union = int((found | true).sum())
    return int((found & true).sum()) / union if union else 1.0


def boundary_accuracy(found: Bool[Tensor, "h w"], true: Bool[Tensor, "h w"]) -> float:
    """Return F, the harmonic mean of precision and recall of boundary pixels.

    A boundary pixel is matched if the other boundary has a pixel within the tolerance.
    """
    boundaries = torch.stack([boundary(found), boundary(true)])
    counts = boundaries.sum(dim=(1, 2)).tolist()
    if not all(counts):
        return 1.0 if not any(counts) else 0.0
    radius = math.ceil(TOLERANCE * math.hypot(*found.shape))
    matched = boundaries & dilate(boundaries, radius).flip(0)
    precision, recall = (int(part.sum()) / count for part, count in zip(matched, counts, strict=True))
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def boundary(region: Bool[Tensor, "h w"]) -> Bool[Tensor, "h w"]:
    """Return the mask of pixels that differ from their right, lower or lower right neighbour."""
    padded = F.pad(region[None].byte(), (0, 1, 0, 1), mode="replicate")[0].bool()
    return (region ^ padded[:-1, 1:]) | (region ^ padded[1:, :-1]) | (region ^ padded[1:, 1:])


def dilate(regions: Bool[Tensor, "n h w"], radius: int) -> Bool[Tensor, "n h w"]:
    """Return the regions dilated by a disk of `radius` pixels."""
    height, width = regions.shape[1:]
    sums = F.pad(regions.int(), (radius + 1, radius, radius, radius)).cumsum(dim=2, dtype=torch.int32)
    grown = torch.zeros_like(regions)
    for down in range(2 * radius + 1):  # rows of the disk, counted by differences of cumulative sums
        half, rows = math.isqrt(radius**2 - (down - radius) ** 2), sums[:, down : down + height]
        right, left = radius + half + 1, radius - half
        grown |= rows[..., right : right + width] > rows[..., left : left + width]
    return grown
