"""Propagation of labels between the frames of a video by nearest features."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class LabelledFrame(NamedTuple):
    """Labelled frames of B videos, as a source of propagation.

    Attributes:
        features: (B, h, w, D) patch features of unit length.
        labels: (B, h, w, C) soft labels of each patch.
    """

    features: Float[Tensor, "b rows columns d"]
    labels: Float[Tensor, "b rows columns c"]


def label_frame(
    features: Float[Tensor, "b rows columns d"],
    sources: Sequence[LabelledFrame],
    *,
    neighbours: int,
    radius: int,
    temperature: float,
) -> Float[Tensor, "b rows columns c"]:
    """Label the patches of a frame by the most similar patches of other frames of its video within a radius.

    The label of a patch is the mean over its nearest patches in all sources, weighted by exp(cosine / temperature).

    Args:
        features: (B, h, w, D) patch features of unit length of a frame of each video.
        sources: labelled frames of the same videos.
        neighbours: number of nearest patches.
        radius: maximum distance of a nearest patch in rows and in columns.
        temperature: of the weights.

    Returns:
        (B, h, w, C) soft labels.

    Source: Jabri et al. 2020, as in DINO's `eval_video_segmentation.py`.

    Example:
        >>> features = torch.nn.functional.normalize(torch.randn(2, 4, 4, 8), dim=-1)
        >>> source = LabelledFrame(features, torch.rand(2, 4, 4, 3))
        >>> label_frame(features, [source], neighbours=5, radius=2, temperature=0.1).shape
        torch.Size([2, 4, 4, 3])
    """
    # (B, rows, sources, columns, ...)
    keys, labels = (torch.stack(parts, dim=2) for parts in zip(*sources, strict=True))
    columns = torch.arange(features.shape[2], device=features.device)
    is_far = (columns[:, None] - columns).abs() > radius
    labelled = []
    for row, queries in enumerate(features.unbind(1)):  # by rows: similarities of all patches can take gigabytes
        near = slice(max(0, row - radius), row + radius + 1)
        cosines = (queries @ keys[:, near].flatten(1, 3).mT).unflatten(2, (-1, len(columns)))
        cosines = cosines.masked_fill(is_far[:, None], -torch.inf).flatten(2)
        best = cosines.topk(min(neighbours, cosines.shape[2]), dim=2)
        weights = (best.values / temperature).softmax(dim=2)
        of_near = labels[:, near].flatten(1, 3)
        rows = best.indices.flatten(1)[..., None].expand(-1, -1, of_near.shape[2])
        labelled.append(torch.einsum("bqk,bqkc->bqc", weights, of_near.gather(1, rows).unflatten(1, weights.shape[1:])))
    return torch.stack(labelled, dim=1)
