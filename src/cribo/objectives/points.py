"""Points in the overlap of two views: the same points of the image in both."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cribo.data.samples import Batch
from cribo.method.precision import at_least_float32
from cribo.objectives.objects import RowPairs

GRID = 8
"""Default number of points along each side of the overlap."""


@dataclass
class Points(RowPairs):
    """Points of the images with overlapping views: P * P rows each.

    Attributes:
        rows: (I,) indices of these images within the batch.
        places: (I, 2, P * P, 2) points of each image in each view (`overlap_points`).
        grid: (h, w) patches of a view.
    """

    rows: Int[Tensor, " i"]
    places: Float[Tensor, "i 2 p 2"]
    grid: tuple[int, int]

    def features(self, tokens: Float[Tensor, "b 2 n d"]) -> Float[Tensor, "2 r d"]:
        """Interpolate another network's tokens at the points."""
        return _rows(tokens, self.rows, self.places, self.grid)

    def draw(self, count: int, generator: torch.Generator) -> RowPairs:
        """Draw `count` points, the same in each image, or all points if there are fewer."""
        points = self.places.shape[2]
        chosen = torch.randperm(points, generator=generator)[:count].to(self.rows.device)
        teacher = self.teacher.unflatten(1, (-1, points))[:, :, chosen].flatten(1, 2)
        images = self.images.view(-1, points)[:, : len(chosen)].flatten()
        return RowPairs(teacher, images, [rows // points * len(chosen) for rows in self.counts])


def find_points(tokens: Float[Tensor, "b 2 n d"], batch: Batch, *, grid: tuple[int, int], side: int) -> Points:
    """Sample the teacher's features at `side` x `side` points of the overlap of each image's views.

    Synchronises with the device to find overlapping views: the shapes of the result depend on the data.
    """
    places, overlapping = overlap_points(batch["coordinates"], side)
    counts = [side * side * overlaps for overlaps in overlapping.tolist()]
    rows = torch.nonzero_static(overlapping, size=sum(counts) // (side * side)).flatten()
    places = places[rows]
    images = batch.images[rows].repeat_interleave(side * side)
    return Points(_rows(tokens, rows, places, grid), images, counts, rows, places, grid)


def _rows(
    tokens: Float[Tensor, "b 2 n d"], rows: Int[Tensor, " i"], places: Float[Tensor, "i 2 p 2"], grid: tuple[int, int]
) -> Float[Tensor, "2 r d"]:
    return sample_tokens(at_least_float32(tokens[rows]), grid, places).transpose(0, 1).flatten(1, 2)


def overlap_points(
    coordinates: Float[Tensor, "b 2 n 2"], points: int
) -> tuple[Float[Tensor, "b 2 p 2"], Bool[Tensor, " b"]]:
    """Return the points of a regular grid over the overlap of two views.

    Args:
        coordinates: (B, 2, N, 2) centres (x, y) of the patches of both views in the source image, in row-major order.
        points: P, number of points along each side.

    Returns:
        (B, 2, P * P, 2) points in each view, from -1 to 1 between the centres of its outermost patches, as for
        `grid_sample` with `align_corners`; and (B,) whether the views of an image overlap.

    Example:
        >>> from cribo.method import patch_coordinates
        >>> boxes, flips = torch.tensor([[0, 0, 40, 40], [0, 10, 40, 40]]), torch.tensor([False, True])
        >>> points, overlapping = overlap_points(patch_coordinates(boxes, flips, (4, 4))[None], 1)
        >>> points[0, :, 0], overlapping
        (tensor([[0.3333, 0.0000],
                [0.3333, 0.0000]]), tensor([True]))
    """
    first, last = coordinates[:, :, 0], coordinates[:, :, -1]  # (B, 2, 2); x decreases in a mirrored view
    low = torch.minimum(first, last).amax(dim=1)
    high = torch.maximum(first, last).amin(dim=1)
    steps = (torch.arange(points, device=low.device, dtype=low.dtype) + 0.5) / points
    places = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), dim=-1).flatten(0, 1)
    places = low[:, None] + (high - low)[:, None] * places  # (B, P * P, 2) in the source image
    relative = (places[:, None] - first[:, :, None]) / (last - first)[:, :, None]
    return 2 * relative - 1, (high > low).all(dim=1)


def sample_tokens(
    tokens: Float[Tensor, "b 2 n d"], grid: tuple[int, int], places: Float[Tensor, "b 2 p 2"]
) -> Float[Tensor, "b 2 p d"]:
    """Return the features at points of each view, interpolated bilinearly between patches."""
    maps = tokens.flatten(0, 1).mT.unflatten(2, grid)
    sampled = F.grid_sample(maps, places.flatten(0, 1)[:, None].to(maps), align_corners=True, padding_mode="border")
    return sampled.squeeze(2).mT.unflatten(0, (-1, 2))
