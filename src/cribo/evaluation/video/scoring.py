"""Region similarity J and boundary accuracy F, as in the evaluation of DAVIS 2017."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

TOLERANCE = 0.008
"""Maximum distance of matching boundary pixels relative to the image diagonal, rounded up to pixels."""

_RECALLED = 0.5


@dataclass(frozen=True)
class VideoScore:
    """Scores of a video.

    Attributes:
        name: name of the video.
        regions: J of each object in each scored frame.
        boundaries: F of each object in each scored frame.
    """

    name: str
    regions: Float[Tensor, "objects frames"]
    boundaries: Float[Tensor, "objects frames"]


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


def row(neighbours: int, scores: Sequence[VideoScore]) -> dict[str, Any]:
    """Return the row of a result: means over all objects of all videos, and J&F of each video and object.

    Recall is the fraction of frames above 0.5. J&F is the mean of J and F.
    """
    regions, boundaries = ([getattr(score, name) for score in scores] for name in ("regions", "boundaries"))

    def mean(parts: Sequence[Tensor]) -> float:
        return float(torch.cat([part.double().mean(dim=1) for part in parts]).mean())

    j_mean, f_mean = mean(regions), mean(boundaries)
    return {
        "neighbours": neighbours,
        "j_and_f": (j_mean + f_mean) / 2,
        "j_mean": j_mean,
        "j_recall": mean([part > _RECALLED for part in regions]),
        "f_mean": f_mean,
        "f_recall": mean([part > _RECALLED for part in boundaries]),
        "objects": sum(map(len, regions)),
        "per_class": {score.name: float((score.regions + score.boundaries).mean() / 2) for score in scores},
        "per_object": {
            f"{score.name}_{number}": {"j": float(j), "f": float(f)}
            for score in scores
            for number, (j, f) in enumerate(
                zip(score.regions.mean(dim=1), score.boundaries.mean(dim=1), strict=True), start=1
            )
        },
    }
