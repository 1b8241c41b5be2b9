"""Matching objects across images: nearest neighbour, jump, cycle consistency (paper section 3.2.2)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cribo.base.errors import InputError
from cribo.method.blocks import rows_per_block
from cribo.method.config import Criterion
from cribo.method.precision import in_float32, inner_products

NO_MATCH = -1
"""Index that marks a query without a match in the bank."""


@dataclass(frozen=True)
class Rows:
    """Unit-length rows to search, of both views.

    Attributes:
        values: (2, M, D), row-aligned.
        parts: slices of the rows to search, in this order.
        images: (M,) image of each row; None if rows of all images may match.
    """

    values: Float[Tensor, "2 m d"]
    parts: Sequence[slice]
    images: Int[Tensor, " m"] | None = None


@torch.no_grad()
@in_float32
def match_objects(
    objects: Float[Tensor, "2 r d"], bank: Float[Tensor, "2 m d"]
) -> tuple[Int[Tensor, "2 r"], Bool[Tensor, "2 r"]]:
    """Find each object's nearest neighbour in its view's bank, and whether the match is cycle-consistent.

    Args:
        objects: (2, R, D) the objects of one group of images; row r of view 1 and row r of view 2 are one object.
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
    return match_rows(objects, Rows(F.normalize(bank, dim=-1), [slice(0, bank.shape[1])]))


def match_rows(
    objects: Float[Tensor, "2 r d"],
    rows: Rows,
    images: Int[Tensor, " r"] | None = None,
    criterion: Criterion | Callable[..., Bool[Tensor, "2 r"]] = "cycle",
    groups: Sequence[slice] | None = None,
) -> tuple[Int[Tensor, "2 r"], Bool[Tensor, "2 r"]]:
    """Find each object's nearest row in its view, and whether both form a positive pair; see `MemoryBank.match`."""
    if not callable(criterion) and criterion not in get_args(Criterion):
        raise InputError(f"criterion must be one of {', '.join(get_args(Criterion))}, got {criterion!r}")
    nearest = torch.stack([nearest_rows(objects[view], rows, view, images) for view in (0, 1)])  # equation 2
    matched = nearest != NO_MATCH
    if criterion == "none" or not any(part.stop > part.start for part in rows.parts):
        return nearest, matched
    searched = nearest.where(matched, rows.parts[0].start)  # any row of the bank if there is no neighbour
    jumped = torch.stack([rows.values[1 - view, searched[view]] for view in (0, 1)])  # equation 3
    is_valid = criterion if callable(criterion) else cycle_consistency
    parts = [slice(0, objects.shape[1])] if groups is None else groups
    valid = torch.cat([is_valid(objects[:, part], jumped[:, part]) for part in parts], dim=1)  # equation 4
    return nearest, matched & valid


@torch.no_grad()
@in_float32
def cycle_consistency(objects: Float[Tensor, "2 r d"], jumped: Float[Tensor, "2 r d"]) -> Bool[Tensor, "2 r"]:
    """Return whether the cycle of each object closes: neighbour, jump, neighbour in the batch's other view, jump.

    Args:
        objects: (2, R, D) the objects of one group of images.
        jumped: (2, R, D) for view i, the other view's row of the neighbour found in view i.

    Source: paper equation 4, "Cycle-consistent matchings".
    """
    if not objects.shape[1]:  # no largest value
        return objects.new_zeros(objects.shape[:2], dtype=torch.bool)
    similarity = F.normalize(jumped, dim=-1) @ F.normalize(objects.flip(0), dim=-1).mT  # (2, R, R)
    return similarity.argmax(dim=2) == torch.arange(objects.shape[1], device=objects.device)


def nearest_rows(
    queries: Float[Tensor, "r d"], rows: Rows, view: int, images: Int[Tensor, " r"] | None = None
) -> Int[Tensor, " r"]:
    """Find the row of a view with the greatest cosine similarity to each query (paper equation 2).

    A running maximum over blocks of rows: only the similarities of one block are in memory. Ties go to the first row.

    Args:
        queries: (R, D), any scale.
        rows: the rows to search.
        view: view of the rows, 0 or 1.
        images: (R,) image of each query; rows of the same image never match.

    Returns:
        (R,) int64 indices of rows; `NO_MATCH` if there is none.
    """
    best = queries.new_full(queries.shape[:1], -torch.inf)
    nearest = torch.full_like(best, NO_MATCH, dtype=torch.long)
    for start, similarity in similarities(queries, rows, view, images):
        value, row = similarity.max(dim=1)
        better = value > best
        best, nearest = best.where(~better, value), nearest.where(~better, row + start)
    return nearest


def similarities(
    queries: Float[Tensor, "r d"], rows: Rows, view: int, images: Int[Tensor, " r"] | None
) -> Iterator[tuple[int, Float[Tensor, "r c"]]]:
    """Yield the index of a block's first row and the cosine similarities to its rows; -inf in the query's image."""
    queries = F.normalize(queries, dim=-1)
    size = rows_per_block(len(queries), queries.device)
    for part in rows.parts:
        for start in range(part.start, part.stop, size):
            block = slice(start, min(start + size, part.stop))
            similarity = inner_products(queries, rows.values[view, block])
            if images is not None and rows.images is not None:
                similarity.masked_fill_(images[:, None] == rows.images[block], -torch.inf)
            yield start, similarity
