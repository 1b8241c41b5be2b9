"""The rows of a memory bank as its search reads them, and how similar a query is to some of them, exactly.

Similarities that decide are inner products of unit vectors whose coordinates are whole steps of 2^-26. Then every
product is a whole number of steps of 2^-52, and so is every sum of some of them, none of which is above 2 in size: in
float64 nothing is ever rounded. So whatever library, device, order or blocks they are summed in, a query and a row
have one similarity, and equal rows have equal ones. It differs from the cosine of the float32 vectors by about 1e-8.
"""

import math
import mmap
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

STEPS = 2.0**26
"""Steps of a coordinate in 1: the most of which no inner product needs more than the 53 bits of float64."""

LONGEST = 1 + 2**-8
"""Norm of a row by its inverse norm, which may be older than its rounding to half precision; never more than 2."""


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Zeros that a host commits memory for only where they are written.

    Most of a bank is never written where images have fewer objects than they could have; and what is written before
    the loader's processes are forked is copied, page by page, when it is written again.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    # A mapping of its own: memory that the heap has used before would have to be cleared, and so committed.
    options = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    return torch.frombuffer(mmap.mmap(-1, size, **options), dtype=dtype).view(shape)


def ring_slices(start: int, length: int, capacity: int) -> list[slice]:
    """Slices of so many consecutive slots of a ring: one, or two where it closes behind its last slot, or none.

    Example:
        >>> ring_slices(7, 5, capacity=10)
        [slice(7, 10, None), slice(0, 2, None)]
    """
    end = start + length
    parts = [slice(start, min(end, capacity)), slice(0, max(0, end - capacity))]
    return [part for part in parts if part.stop > part.start]


@dataclass(frozen=True)
class Ring:
    """The bank of one view, as the search reads it.

    Attributes:
        rows: of any scale, C slots in whole tiles.
        inverse_norms: 1 / norm of each row, float32.
        images: image of each row.
        capacity: slots in use; those behind only fill the last tile.
        oldest: slot of the oldest live row. The others follow it, and the ring closes behind the last slot.
        length: number of live rows.
        tile: rows of a tile.
    """

    rows: Float[Tensor, "c d"]
    inverse_norms: Float[Tensor, " c"]
    images: Int[Tensor, " c"]
    capacity: int
    oldest: int
    length: int
    tile: int

    def live(self) -> list[slice]:
        """Slices of the live slots, oldest first: one, or two when the ring wraps, or none."""
        return ring_slices(self.oldest, self.length, self.capacity)

    def tiles(self) -> list[range]:
        """Numbers of the tiles with live rows, each once."""
        ranges = [range(part.start // self.tile, -(-part.stop // self.tile)) for part in self.live()]
        if len(ranges) == 2:  # the oldest and the newest rows may share a tile
            ranges[1] = range(min(ranges[1].stop, ranges[0].start))
        return [tiles for tiles in ranges if tiles]

    def ages(self, slots: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """How many live rows are older than that of each slot; `length` or more for a slot that holds no live row."""
        return ((slots - self.oldest) % self.capacity).where(slots < self.capacity, self.capacity)

    def steps(self, slots: Int[Tensor, " n"], into: Float[Tensor, "n d"] | None = None) -> Float[Tensor, "n d"]:
        """Unit rows of some slots in whole steps, float32, which holds them exactly.

        Args:
            slots: which.
            into: memory of the rows' type, which is overwritten.
        """
        rows = torch.index_select(self.rows, 0, slots, out=into).float()
        return rows.mul_((self.inverse_norms[slots] * STEPS)[:, None]).round_()


def steps_of(queries: Float[Tensor, "r d"]) -> Float[Tensor, "r d"]:
    """Unit vectors in whole steps, float32, which holds them exactly."""
    return (queries * STEPS).round_()


def compare(
    queries: Float[Tensor, "r d"],
    images: Int[Tensor, " r"],
    ring: Ring,
    slots: Int[Tensor, "p n"],
    which: Int[Tensor, " p"],
) -> tuple[Float[Tensor, " p"], Int[Tensor, " p"]]:
    """The greatest similarity of each pair's query to the live rows of its slots, and the age of the oldest such row.

    Args:
        queries: (R, D) float32, of unit length.
        images: (R,); rows of a query's own image do not count.
        ring: whose rows are compared.
        slots: (P, N) of each pair.
        which: (P,) query of each pair.

    Returns:
        (P,) float64 similarities, exact, -inf where no row may match; and (P,) ages, which then mean nothing.
    """
    if not len(which):
        return queries.new_empty(0, dtype=torch.float64), which
    count = _PAIRS_AT_ONCE // slots.shape[1]
    parts = zip(slots.split(count), which.split(count), strict=True)
    values, ages = zip(*(_compare_part(queries, images, ring, *part) for part in parts), strict=True)
    return torch.cat(values), torch.cat(ages)


_PAIRS_AT_ONCE = 2**20  # pairs of a query and a row


def _compare_part(
    queries: Float[Tensor, "r d"],
    images: Int[Tensor, " r"],
    ring: Ring,
    slots: Int[Tensor, "p n"],
    which: Int[Tensor, " p"],
) -> tuple[Float[Tensor, " p"], Int[Tensor, " p"]]:
    ages = ring.ages(slots)
    barred = (ring.images[slots] == images[which, None]) | (ages >= ring.length)
    if queries.device.type == "cpu":
        similarity = _of_the_nearest(queries, ring, slots, which, barred)
    else:  # which would have to wait until it is known how many are near
        similarity = _exact_products(steps_of(queries), ring, slots, which).masked_fill_(barred, -torch.inf)
    best = similarity.amax(dim=1)
    return best, ages.where(similarity == best[:, None], ring.capacity).amin(dim=1)


def _of_the_nearest(
    queries: Float[Tensor, "r d"],
    ring: Ring,
    slots: Int[Tensor, "p n"],
    which: Int[Tensor, " p"],
    barred: Bool[Tensor, "p n"],
) -> Float[Tensor, "p n"]:
    """Exact products where rounded ones leave open which row is the nearest, and -inf elsewhere.

    Exact ones take more than twice as long, and mostly one row of a tile needs them.
    """
    rounded = _rounded_products(queries, ring, slots, which).masked_fill_(barred, -torch.inf)
    error = (queries.shape[1] + 8) * 2**-22  # of both that are compared, and of the steps
    near = (rounded >= rounded.amax(dim=1, keepdim=True) - error) & ~barred
    pair, place = near.nonzero().unbind(dim=1)
    similarity = rounded.new_full(rounded.shape, -torch.inf, dtype=torch.float64)
    similarity[pair, place] = _exact_products(steps_of(queries), ring, slots[pair, place, None], which[pair])[:, 0]
    return similarity


def _rounded_products(
    queries: Float[Tensor, "r d"], ring: Ring, slots: Int[Tensor, "p n"], which: Int[Tensor, " p"]
) -> Float[Tensor, "p n"]:
    """Similarity of each pair's query to the rows of its slots, in float32."""
    dim = queries.shape[1]
    found = queries.new_empty(slots.shape)
    gathered = ring.rows.new_empty((min(slots.numel(), _at_once(slots, dim)), dim))
    parts = _at_once(slots, dim) // slots.shape[1]
    for part, query, products in zip(slots.split(parts), which.split(parts), found.split(parts), strict=True):
        rows = torch.index_select(ring.rows, 0, part.flatten(), out=gathered[: part.numel()])
        torch.sum(rows.float().view(*part.shape, dim).mul_(queries[query, None]), dim=2, out=products)
    return found.mul_(ring.inverse_norms[slots])


def _exact_products(
    asked: Float[Tensor, "r d"], ring: Ring, slots: Int[Tensor, "p n"], which: Int[Tensor, " p"]
) -> Float[Tensor, "p n"]:
    """The same in float64 and without rounding, for queries in whole steps."""
    dim = asked.shape[1]
    found = asked.new_empty(slots.shape, dtype=torch.float64)
    count = min(slots.numel(), _at_once(slots, dim))
    gathered, exact = ring.rows.new_empty((count, dim)), found.new_empty((count, dim))
    parts = _at_once(slots, dim) // slots.shape[1]
    for part, query, products in zip(slots.split(parts), which.split(parts), found.split(parts), strict=True):
        rows = ring.steps(part.flatten(), gathered[: part.numel()])
        rows = exact[: part.numel()].copy_(rows).view(*part.shape, dim)
        torch.sum(rows.mul_(asked[query].double()[:, None]), dim=2, out=products)
    return found.mul_(STEPS**-2)


def _at_once(slots: Int[Tensor, "p n"], dim: int) -> int:
    """Rows of whole pairs that a processor's cache holds, or that are enough work for a GPU."""
    values = 2**18 if slots.device.type == "cpu" else 2**25
    return max(1, values // (slots.shape[1] * dim)) * slots.shape[1]


class OwnRows:
    """The rows that belong to the images of some queries; mostly there are none.

    Args:
        row_images: (M,) image of each row.
        images: (R,) image of each query; there may be more queries, of no image.
    """

    def __init__(self, row_images: Int[Tensor, " m"], images: Int[Tensor, " r"]) -> None:
        self._row_images, self._images = row_images, images
        self._rows = torch.isin(row_images, images.unique()).nonzero()[:, 0]

    def without(self, products: Float[Tensor, "b r"], start: int) -> Float[Tensor, "b r"]:
        """Products of rows from `start` on with all queries, those of one image set to -inf in place."""
        if not len(self._rows):
            return products
        rows = self._rows[(self._rows >= start) & (self._rows < start + len(products))]
        own = self._row_images[rows, None] == self._images
        own_products = products[:, : own.shape[1]]
        own_products[rows - start] = own_products[rows - start].masked_fill(own, -torch.inf)
        return products
