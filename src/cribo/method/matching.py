"""Matching objects across images: nearest neighbour, jump, cycle consistency (paper section 3.2.2)."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cribo.errors import InputError
from cribo.method.blocks import rows_per_block
from cribo.method.precision import in_float32, inner_products

NO_MATCH = -1
"""Index that marks a query without a match in the bank."""


@torch.no_grad()
@in_float32
def match_objects(
    objects: Float[Tensor, "2 r d"], bank: Float[Tensor, "2 m d"]
) -> tuple[Int[Tensor, "2 r"], Bool[Tensor, "2 r"]]:
    """Find each object's nearest neighbour in its view's bank, and whether the match is cycle-consistent.

    Args:
        objects: (2, R, D) the batch's objects; row r of view 1 and row r of view 2 are one object.
        bank: (2, M, D) the two memory banks, row-aligned in the same way; any scale.

    Returns:
        nearest: (2, R) row of the bank with the greatest cosine similarity; `NO_MATCH` (-1) if M = 0.
        consistent: (2, R), true where the cycle closes (see `cycle_consistency`).

    Raises:
        ValueError: shapes do not agree.

    Source: paper equations 2 to 4.

    Example:
        >>> nearest, consistent = match_objects(torch.randn(2, 12, 8), torch.randn(2, 40, 8))
        >>> nearest.shape, consistent.shape
        (torch.Size([2, 12]), torch.Size([2, 12]))
    """
    if objects.ndim != 3 or objects.shape[0] != 2:
        raise InputError(f"objects must have the shape (2, R, D), got {tuple(objects.shape)}")
    if bank.ndim != 3 or bank.shape[0] != 2 or bank.shape[2] != objects.shape[2]:
        raise InputError(f"bank must have the shape (2, M, {objects.shape[2]}), got {tuple(bank.shape)}")
    rows = F.normalize(bank, dim=-1)
    nearest = torch.stack([nearest_rows(objects[view], rows[view]) for view in (0, 1)])
    if bank.shape[1] == 0:
        return nearest, torch.zeros_like(nearest, dtype=torch.bool)
    jumped = torch.stack([rows[1 - view, nearest[view]] for view in (0, 1)])
    return nearest, cycle_consistency(objects, jumped)


@torch.no_grad()
@in_float32
def cycle_consistency(
    objects: Float[Tensor, "2 r d"], jumped: Float[Tensor, "2 r d"], group_rows: Sequence[int] | None = None
) -> Bool[Tensor, "2 r"]:
    """Return whether the cycle of each object closes: neighbour, jump, neighbour in the batch's other view, jump.

    Args:
        objects: (2, R, D) the batch's objects, group after group.
        jumped: (2, R, D) for view i, the other view's row of the neighbour found in view i.
        group_rows: rows of each group of images; the last search stays inside the query's group. One group by default.

    Returns:
        (2, R) booleans.

    Raises:
        ValueError: the groups' rows do not sum to R.

    Source: paper equation 4, "Cycle-consistent matchings".
    """
    sizes = [objects.shape[1]] if group_rows is None else list(group_rows)
    if sum(sizes) != objects.shape[1]:
        raise InputError(f"group_rows must sum to {objects.shape[1]} objects, got {sizes}")
    queries, targets = F.normalize(jumped, dim=-1), F.normalize(objects.flip(0), dim=-1)
    closed = [
        (query @ target.mT).argmax(dim=2) == torch.arange(size, device=objects.device)
        for size, query, target in zip(sizes, queries.split(sizes, dim=1), targets.split(sizes, dim=1), strict=True)
        if size
    ]
    return torch.cat(closed, dim=1) if closed else objects.new_zeros(objects.shape[:2], dtype=torch.bool)


def nearest_rows(
    queries: Float[Tensor, "r d"],
    rows: Float[Tensor, "m d"],
    *,
    parts: Sequence[slice] | None = None,
    query_images: Int[Tensor, " r"] | None = None,
    row_images: Int[Tensor, " m"] | None = None,
) -> Int[Tensor, " r"]:
    """Find the row with the greatest cosine similarity to each query (paper equation 2).

    A running maximum over blocks of rows: only the similarities of one block are in memory. Ties go to the first row.

    Args:
        queries: (R, D), any scale.
        rows: (M, D) of unit length.
        parts: slices of the rows to search, in this order; all rows by default.
        query_images: (R,) image of each query; requires `row_images`. Rows of the query's image never match.
        row_images: (M,) image of each row.

    Returns:
        (R,) int64 indices of rows; `NO_MATCH` if there is none.
    """
    queries = F.normalize(queries, dim=-1)
    best = queries.new_full(queries.shape[:1], -torch.inf)
    nearest = torch.full_like(best, NO_MATCH, dtype=torch.long)
    for start, similarity in _similarities(queries, rows, parts, query_images, row_images):
        value, row = similarity.max(dim=1)
        better = value > best
        best, nearest = best.where(~better, value), nearest.where(~better, row + start)
    return nearest


def top_rows(
    queries: Float[Tensor, "r d"],
    rows: Float[Tensor, "m d"],
    count: int,
    *,
    parts: Sequence[slice] | None = None,
    query_images: Int[Tensor, " r"] | None = None,
    row_images: Int[Tensor, " m"] | None = None,
) -> tuple[Float[Tensor, "r k"], Int[Tensor, "r k"]]:
    """Find the `count` rows with the greatest cosine similarity to each query; arguments as for `nearest_rows`.

    Returns:
        (R, count) similarities, descending, and (R, count) indices of rows. If there are fewer rows, the remaining
        similarities are -inf and their indices `NO_MATCH`.
    """
    queries = F.normalize(queries, dim=-1)
    best = queries.new_full((len(queries), count), -torch.inf)
    nearest = torch.full_like(best, NO_MATCH, dtype=torch.long)
    for start, similarity in _similarities(queries, rows, parts, query_images, row_images):
        values, found = similarity.topk(min(count, similarity.shape[1]), dim=1)
        best, places = torch.cat((best, values), dim=1).topk(count, dim=1)
        nearest = torch.cat((nearest, found + start), dim=1).gather(1, places)
    return best, nearest.where(best > -torch.inf, NO_MATCH)


def _similarities(
    queries: Float[Tensor, "r d"],
    rows: Float[Tensor, "m d"],
    parts: Sequence[slice] | None,
    query_images: Int[Tensor, " r"] | None,
    row_images: Int[Tensor, " m"] | None,
) -> Iterator[tuple[int, Float[Tensor, "r c"]]]:
    """Yield the index of a block's first row and the cosine similarities to its rows; -inf where masked."""
    size = rows_per_block(len(queries), queries.device)
    for part in [slice(0, len(rows))] if parts is None else parts:
        for start in range(part.start, part.stop, size):
            block = slice(start, min(start + size, part.stop))
            similarity = inner_products(queries, rows[block])
            if query_images is not None and row_images is not None:
                similarity.masked_fill_(query_images[:, None] == row_images[block], -torch.inf)
            yield start, similarity
