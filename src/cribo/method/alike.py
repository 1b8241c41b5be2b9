"""A second pass over the bank for queries to which very many rows are nearly equally similar, as in a collapsed run.

Rounding hides differences that are small beside 1. So what is multiplied are differences from a vector L in the
middle of the rows that were found: q·r = (q - L)·(r - L) + L·(r - L) + q·L. The first product is small, and so is its
rounding; the second is one exact number a row, and the last one a query. Then only how the distances of rows relate
matters, not how small they are, and a query has as few tiles left as among rows in random directions.

Rows that are equal bit for bit are multiplied once. Queries whose nearest rows lie in several places of the sphere (a
run that has collapsed to a few vectors) are answered place by place, each among the rows that are near enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cribo.method.precision import float32_products
from cribo.method.products import parts_on_grid, product, rows_on_grid
from cribo.method.rings import LONGEST, STEPS, OwnRows, Ring, steps_of

_MOST_PLACES = 8
_TILE = 32
_TILES_AT_ONCE = 2**5  # that a processor's cache holds, in float64 too


@dataclass(frozen=True)
class Place:
    """Queries whose nearest rows lie near one vector, and the rows that may be nearest to them.

    Attributes:
        which: (C,) the queries.
        middle: (D,) in whole steps, float64.
        slots: (N,) of the rows, the nearer ones first.
    """

    which: Int[Tensor, " c"]
    middle: Float[Tensor, " d"]
    slots: Int[Tensor, " n"]


# -------------------------------------------------------------------------------------------------------- places


def places(
    queries: Float[Tensor, "r d"], ring: Ring, best: Float[Tensor, " r"], ages: Int[Tensor, " r"]
) -> Iterator[Place]:
    """Divide queries by where the rows are that were found for them.

    Args:
        queries: (R, D) of unit length.
        ring: with at least one live row.
        best: (R,) similarity of a row that was found for each.
        ages: (R,) its age.
    """
    found = ring.steps((ages.clamp_max(ring.length - 1) + ring.oldest) % ring.capacity)
    place = _nearest_leader(found)
    slots = distinct_slots(ring)
    members = [part for number in range(_MOST_PLACES) if len(part := (place == number).nonzero()[:, 0])]
    middles = torch.stack([found[which].double().mean(dim=0).float().round() for which in members])
    least = [_least_with(middle, queries[own], best[own]) for middle, own in zip(middles, members, strict=True)]
    products = _products_with(middles, ring)[slots]
    for number, which in enumerate(members):
        near = products[:, number] >= least[number]
        yield Place(which, middles[number].double(), _by_distance(slots[near], products[near, number]))


def _by_distance(slots: Int[Tensor, " n"], products: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Slots in the order of their rows' distance from a place's middle, roughly: tiles have a bound for all their rows.

    Rows of about one distance stay in the order in which they lie, which is read faster.
    """
    octave = torch.frexp((1 - products).clamp_min(2**-12)).exponent
    return slots[octave.sort(stable=True).indices]


def _nearest_leader(found: Float[Tensor, "r d"]) -> Int[Tensor, " r"]:
    """For each row the nearest of a few of them; one for all where a few do not bring them much nearer."""
    leader = found.new_zeros(len(found), dtype=torch.long)
    distance = (found - found[0]).norm(dim=1)
    widest = distance.amax()
    for number in range(1, _MOST_PLACES):
        other = (found - found[distance.argmax()]).norm(dim=1)
        leader = leader.masked_fill(other < distance, number)
        distance = torch.minimum(distance, other)
    return leader.where(4 * distance.amax() < widest, 0)


def _least_with(
    middle: Float[Tensor, " d"], queries: Float[Tensor, "c d"], best: Float[Tensor, " c"]
) -> Float[Tensor, ""]:
    """The least product with the middle L of a row r as similar to one of the queries as the best one met.

    L·r = q·r - (q - L)·q - (q - L)·(r - q), and |r - q|² = |q|² + |r|² - 2 q·r.
    """
    aside = queries - middle / STEPS
    distance = (1 + LONGEST**2 - 2 * best.clamp_min(-LONGEST)).clamp_min(0).sqrt()
    least = best - (aside * queries).sum(dim=1) - aside.norm(dim=1) * distance
    return least.amin().float() - (queries.shape[1] + 4) * 2**-20


def _products_with(middles: Float[Tensor, "k d"], ring: Ring) -> Float[Tensor, "c k"]:
    """Products of all unit rows with some vectors that are given in steps, rounded."""
    others = rows_on_grid(middles / STEPS)
    found = others.new_empty((len(ring.rows), len(others)))
    with float32_products("highest"):
        for part in parts_on_grid(len(ring.rows), 2**13):
            torch.mul(product(ring.rows[part].float(), others), ring.inverse_norms[part, None], out=found[part])
    return found[:, : len(middles)]


# ------------------------------------------------------------------------------------------------- rows and tiles


def distinct_slots(ring: Ring) -> Int[Tensor, " n"]:
    """Slots of the live rows, but of rows that are equal bit for bit those of two alone.

    These are the oldest, and the oldest of another image, which serves the queries of the first one's image.
    """
    slots = torch.cat([torch.arange(part.start, part.stop, device=ring.rows.device) for part in ring.live()])
    keys, order = _keys(ring, slots).sort(stable=True)  # of equal rows the oldest comes first
    slots = slots[order]
    alike = (keys[1:] == keys[:-1]).nonzero()[:, 0]
    starts = torch.ones(len(slots), dtype=torch.bool, device=slots.device)
    starts[alike + 1] = ~_are_equal(ring, slots[alike], slots[alike + 1])
    first = torch.arange(len(slots), device=slots.device).where(starts, 0).cummax(dim=0).values
    is_other = ring.images[slots] != ring.images[slots[first]]
    others = is_other.cumsum(dim=0)
    return slots[starts | (is_other & (others - others[first] == 1))].sort().values


def _keys(ring: Ring, slots: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Numbers that are equal for equal rows and for few others: from some channels, for all would take much longer."""
    channels = ring.rows[:, :: max(1, ring.rows.shape[1] // 16)][slots].float()
    bits = torch.cat((channels, ring.inverse_norms[slots, None]), dim=1).view(torch.int32).long()
    factors = torch.arange(bits.shape[1], device=bits.device) * 0x9E3779B97F4A7C + 0x5851F42D4C957F2D
    return (bits * factors).sum(dim=1)


def _are_equal(ring: Ring, slots: Int[Tensor, " n"], others: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
    equal = ring.inverse_norms[slots] == ring.inverse_norms[others]
    for part in parts_on_grid(len(slots), 2**12):
        equal[part] &= (ring.rows[slots[part]] == ring.rows[others[part]]).all(dim=1)
    return equal


def in_tiles(slots: Int[Tensor, " n"]) -> Int[Tensor, "t tile"]:
    """Slots in tiles, of which the last repeats one."""
    return torch.cat((slots, slots[-1:].expand(-len(slots) % _TILE))).view(-1, _TILE)


def centred_ceilings(
    queries: Float[Tensor, "c d"], images: Int[Tensor, " c"], ring: Ring, place: Place, tiles: Int[Tensor, "t tile"]
) -> tuple[Float[Tensor, "t c"], Float[Tensor, " c"]]:
    """For each tile and query of a place, a number that no similarity exceeds by more than the query's own offset.

    Args:
        queries: (C, D) the place's, of unit length.
        images: (C,); rows of a query's own image do not count.
        ring: that the slots are of.
        place: its middle.
        tiles: of the place's slots.

    Returns:
        float32 ceilings, and the float64 number that is to be added for each query.
    """
    middle, steps = place.middle.float(), steps_of(queries)
    offsets = steps.double() @ place.middle * STEPS**-2
    aside = rows_on_grid((steps - middle) * STEPS**-2)
    own = OwnRows(ring.images[tiles.flatten()], images)
    error = (queries.shape[1] + 8) * 2**-23
    squared = place.middle.square().sum()
    ceilings = queries.new_empty((len(tiles), len(queries)))
    with float32_products("highest"):
        for part in parts_on_grid(len(tiles), _TILES_AT_ONCE if queries.device.type == "cpu" else 2**10):
            rows = ring.steps(tiles[part].flatten())
            along = ((rows.double() @ place.middle - squared) * STEPS**-2).float()
            rows -= middle
            products = product(rows, aside).add_((along + error * along.abs())[:, None])
            maxima = own.without(products, _TILE * part.start).view(len(tiles[part]), _TILE, -1).amax(dim=1)
            maxima += error * rows.norm(dim=1).view(-1, _TILE).amax(dim=1)[:, None] * aside.norm(dim=1)
            ceilings[part] = maxima[:, : len(queries)]
    return ceilings, offsets
