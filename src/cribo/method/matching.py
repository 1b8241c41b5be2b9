"""Matching objects across images: nearest neighbours, jump, cycle consistency (paper section 3.2.2)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cribo.method.products import parts_on_grid, product

NO_MATCH = -1
"""What stands in the place of a row's index when the bank holds nothing that the query may match."""

_TINY = 1e-12


@torch.no_grad()
def match_objects(
    objects: Float[Tensor, "2 r d"], bank: Float[Tensor, "2 m d"]
) -> tuple[Int[Tensor, "2 r"], Bool[Tensor, "2 r"]]:
    """Find each object's nearest neighbour in its view's bank, and whether the match is cycle-consistent.

    Args:
        objects: (2, R, D) the batch's objects; row r of view 1 and row r of view 2 are one object.
        bank: (2, M, D) the two memory banks, row-aligned in the same way; any scale.

    Returns:
        nearest: (2, R) row of the bank with the greatest cosine similarity; `NO_MATCH` (-1) if M = 0.
        consistent: (2, R), true where the criterion holds (see `cycle_consistency`).

    Raises:
        ValueError: shapes do not agree.

    Source: paper equations of `nn`, `jump` and the cycle condition O.

    Example:
        >>> nearest, consistent = match_objects(torch.randn(2, 12, 8), torch.randn(2, 40, 8))
        >>> nearest.shape, consistent.shape
        (torch.Size([2, 12]), torch.Size([2, 12]))
    """
    if objects.ndim != 3 or objects.shape[0] != 2:
        raise ValueError(f"objects must have the shape (2, R, D), got {tuple(objects.shape)}")
    if bank.ndim != 3 or bank.shape[0] != 2 or bank.shape[2] != objects.shape[2]:
        raise ValueError(f"bank must have the shape (2, M, {objects.shape[2]}), got {tuple(bank.shape)}")
    with torch.autocast(objects.device.type, enabled=False):
        nearest = torch.stack(
            [nearest_rows(objects[view], [bank[view]], [inverse_norms(bank[view])]) for view in (0, 1)]
        )
        if bank.shape[1] == 0:
            return nearest, torch.zeros_like(nearest, dtype=torch.bool)
        jumped = torch.stack([bank[1][nearest[0]], bank[0][nearest[1]]])
        return nearest, cycle_consistency(objects, jumped, [objects.shape[1]])


@torch.no_grad()
def cycle_consistency(
    objects: Float[Tensor, "2 r d"], jumped: Float[Tensor, "2 r d"], group_rows: Sequence[int]
) -> Bool[Tensor, "2 r"]:
    """Whether each object comes back to itself: neighbour, jump, neighbour in the batch's other view, jump.

    Args:
        objects: (2, R, D) the batch's objects, group after group.
        jumped: (2, R, D) for view i, the other view's row of the neighbour found for view i.
        group_rows: rows of each group of images; the last search stays inside the query's group.

    Returns:
        (2, R) booleans.

    Raises:
        ValueError: the groups' rows do not sum to R.

    Source: paper section 3.2.2, "Cycle-consistent matchings".
    """
    if sum(group_rows) != objects.shape[1]:
        raise ValueError(f"group_rows must sum to {objects.shape[1]} objects, got {list(group_rows)}")
    if not objects.shape[1]:
        return torch.zeros(objects.shape[:2], dtype=torch.bool, device=objects.device)
    queries, targets = F.normalize(jumped.float(), dim=-1), objects.float().flip(0)
    norms = inverse_norms(targets)
    return torch.cat(
        [
            _nearest_is_own(query, target, norm)
            for query, target, norm in zip(
                queries.split(list(group_rows), dim=1),
                targets.split(list(group_rows), dim=1),
                norms.split(list(group_rows), dim=1),
                strict=True,
            )
            if query.shape[1]
        ],
        dim=1,
    )


def _nearest_is_own(
    queries: Float[Tensor, "2 n d"], targets: Float[Tensor, "2 n d"], norms: Float[Tensor, "2 n"]
) -> Bool[Tensor, "2 n"]:
    """Whether of all targets, scaled by `norms`, the one in the query's own place is the first of the most similar."""
    similarity = torch.stack([product(query, target) for query, target in zip(queries, targets, strict=True)])
    similarity *= norms[:, None]
    own = similarity.diagonal(dim1=1, dim2=2)
    earlier_is_equal = (similarity == own[..., None]).tril_(-1).any(dim=2)
    return (own >= similarity.amax(dim=2)) & ~earlier_is_equal


@torch.no_grad()
def nearest_rows(
    queries: Float[Tensor, "r d"],
    segments: Sequence[Float[Tensor, "_ d"]],
    inverse_norms: Sequence[Float[Tensor, "_"]],
    *,
    query_images: Int[Tensor, " r"] | None = None,
    segment_images: Sequence[Int[Tensor, "_"]] | None = None,
    block_rows: int = 4096,
) -> Int[Tensor, " r"]:
    """Row with the greatest cosine similarity to each query, counted through all segments.

    The rows are visited in blocks with a running maximum: never more than (R, block_rows) similarities
    live at once. Of equally similar rows the first wins.

    Args:
        queries: (R, D), any scale, float32.
        segments: blocks of rows (M_i, D), any scale and float type, in the order of their row numbers.
        inverse_norms: 1 / norm of each segment's rows, float32.
        query_images: (R,) image of each query; with `segment_images`, rows of its own image never match.
        segment_images: (M_i,) image of each segment's rows.
        block_rows: rows per block.

    Returns:
        (R,) int64 rows; `NO_MATCH` where there is none.
    """
    queries = F.normalize(queries.float(), dim=-1)
    best = queries.new_full((queries.shape[0],), -torch.inf)
    nearest = torch.full_like(best, NO_MATCH, dtype=torch.long)
    if queries.shape[0] == 0:
        return nearest
    first = 0
    for number, (segment, norms) in enumerate(zip(segments, inverse_norms, strict=True)):
        for block in parts_on_grid(segment.shape[0], block_rows):
            similarity = product(queries, segment[block].float())
            similarity *= norms[block]
            if query_images is not None and segment_images is not None:
                own = query_images[:, None] == segment_images[number][None, block]
                similarity.masked_fill_(own, -torch.inf)
            value, row = similarity.max(dim=1)
            better = value > best
            best = torch.where(better, value, best)
            nearest = torch.where(better, row + (first + block.start), nearest)
        first += segment.shape[0]
    return nearest


def inverse_norms(rows: Float[Tensor, "*m d"]) -> Float[Tensor, "*m"]:
    """1 / Euclidean norm of each row, in float32; finite for a zero row."""
    return rows.float().norm(dim=-1).clamp_min(_TINY).reciprocal()
