"""The nearest row of a memory bank, exactly, at little more than the price of a matrix product at low precision.

A first pass multiplies queries and rows at low precision and keeps, of every tile of consecutive rows, a number that
no product in it exceeds. The tile of the greatest one is compared exactly. Its best row tells which other tiles may
still hold a better one, for rounding turns a vector by a small angle that is known: mostly one or two do. Those are
compared exactly too. A query to which very many are left, because rows are nearly all alike, gets a second pass over
differences between rows (`cribo.method.alike`), which costs a product in float32.

Similarities that decide have no rounding (`cribo.method.rings`). A neighbour depends on the query and on the live
rows alone: not on where in the ring they lie, on how many queries are asked at once, on the precision of a pass, or on
whether the rows are held in one place or in several (`cribo.method.sharded`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from cribo.method.alike import Place, centred_ceilings, in_tiles, places
from cribo.method.kernels import Accelerated
from cribo.method.matching import NO_MATCH
from cribo.method.precision import float32_products
from cribo.method.products import multiplies_bfloat16, parts_on_grid, product, rows_on_grid
from cribo.method.rings import LONGEST, OwnRows, Ring, compare, untouched_zeros

_FEWEST = 2**30  # multiplications a view, below which a first pass in float32 is faster on a CPU


def tile_rows(device: torch.device) -> int:
    """Consecutive rows of which the first pass keeps one number; rings are allocated in whole tiles."""
    return 64 if device.type == "cuda" else 32


def _block_rows(queries: Float[Tensor, "r d"]) -> int:
    """Rows that are multiplied at once: their products stay in a processor's cache, or are enough work for a GPU."""
    most, products = (2**15, 2**26) if queries.device.type == "cuda" else (2**13, 2**20)
    return min(most, max(2**10, products // len(queries) // 2**10 * 2**10))


class FirstPass(ABC):
    """What the first pass multiplies: the stored rows themselves, or copies made for it."""

    nbytes: int = 0
    """Bytes of the copies."""

    @abstractmethod
    def write(self, target: slice, rows: Float[Tensor, "2 n d"], inverse_norms: Float[Tensor, "2 n"]) -> None:
        """Take note of rows that were stored in the slots `target`."""

    @abstractmethod
    def ceilings(
        self,
        view: int,
        tiles: range,
        queries: Float[Tensor, "r d"],
        images: Int[Tensor, " r"],
        into: Float[Tensor, "t r"],
    ) -> None:
        """For each of the tiles and every query, write a number that no product of the two exceeds.

        Products are those of `rounded` queries with what is held of the rows; those with rows of the query's own
        image do not count.
        """

    @abstractmethod
    def rounded(self, queries: Float[Tensor, "r d"]) -> Float[Tensor, "r d"]:
        """Queries at the precision of the first pass."""

    @abstractmethod
    def distortion(self, view: int) -> Float[Tensor, "2"]:
        """The largest angle, in radians, between a row and what is held of it, and largest relative change of norm."""


@torch.no_grad()
def nearest_in_rings(
    queries: Float[Tensor, "2 r d"], images: Int[Tensor, " r"], rings: tuple[Ring, Ring], first_pass: FirstPass
) -> Int[Tensor, "2 r"]:
    """The live row with the greatest cosine similarity to each query in its view's ring, counted from the oldest.

    Of equally similar rows the oldest wins; rows of the query's own image never match. The host reads the device once,
    and a few times more for queries that need a second pass.

    Args:
        queries: (2, R, D) float32, any scale.
        images: (R,) image of each query.
        rings: of both views, with live rows in the same slots.
        first_pass: over the rows of both rings.

    Returns:
        (2, R) int64; `NO_MATCH` where there is none.
    """
    similarity, ages = most_similar(F.normalize(queries.float(), dim=-1), images, rings, first_pass)
    return ages.where(similarity > -torch.inf, NO_MATCH)


@torch.no_grad()
def most_similar(
    queries: Float[Tensor, "2 r d"], images: Int[Tensor, " r"], rings: tuple[Ring, Ring], first_pass: FirstPass
) -> tuple[Float[Tensor, "2 r"], Int[Tensor, "2 r"]]:
    """The greatest cosine similarity of each query to a live row in its view's ring, and that row's age.

    The similarity of a query and a row is the same in whatever ring the row lies, beside whatever others.

    Args:
        queries: (2, R, D) float32, of unit length.
        images: (R,) image of each query.
        rings: of both views, with live rows in the same slots.
        first_pass: over the rows of both rings.

    Returns:
        (2, R) float64 similarities, -inf where no row may match; and (2, R) int64, how many live rows are older than
        the one found, which is the oldest of the most similar. Without a match an age means nothing.
    """
    if not queries.shape[1] or not rings[0].length:
        return queries.new_full(queries.shape[:2], -torch.inf, dtype=torch.float64), images.new_zeros(queries.shape[:2])
    if queries.device.type == "cpu" and queries[0].numel() * rings[0].length < _FEWEST:
        first_pass = UnroundedRows(rings)
    searches = [
        _Search(queries[view], images, ring, _first_tiles(queries[view], images, ring, first_pass, view))
        for view, ring in enumerate(rings)
    ]
    counts = torch.stack([count for search in searches for count in search.left()]).tolist()
    found = [search.finish(*counts[2 * view : 2 * view + 2]) for view, search in enumerate(searches)]
    similarity, ages = zip(*found, strict=True)
    return torch.stack(similarity), torch.stack(ages)


@dataclass(frozen=True)
class _Tiles:
    """What a pass tells of the rows.

    Attributes:
        slots: of each tile's rows.
        ceilings: for each tile and query, a number that no product of the two exceeds.
        least: the least product that the pass can give for a row of a given similarity (R,) to each query.
        most: how many tiles may be left to compare with a query.
    """

    slots: Int[Tensor, "t tile"]
    ceilings: Float[Tensor, "t r"]
    least: Callable[[Float[Tensor, " r"]], Float[Tensor, " r"]]
    most: int


def _first_tiles(
    queries: Float[Tensor, "r d"], images: Int[Tensor, " r"], ring: Ring, first_pass: FirstPass, view: int
) -> _Tiles:
    """The ring's own tiles, by the first pass."""
    rounded, first = first_pass.rounded(queries), 0
    tiles = torch.cat([torch.arange(part.start, part.stop, device=queries.device) for part in ring.tiles()])
    ceilings = torch.empty((len(tiles), len(queries)), device=queries.device)
    for part in ring.tiles():
        first_pass.ceilings(view, part, rounded, images, ceilings[first : first + len(part)])
        first += len(part)
    least = partial(_least_product, queries=queries, rounded=rounded, distortion=first_pass.distortion(view))
    slots = ring.tile * tiles[:, None] + torch.arange(ring.tile, device=tiles.device)
    # Of a query with very many tiles left all are multiplied once more: a product costs less a row than a comparison.
    return _Tiles(slots, ceilings, least, most=max(4, len(tiles) // 32))


def _centred_tiles(
    queries: Float[Tensor, "c d"], images: Int[Tensor, " c"], ring: Ring, place: Place, best: Float[Tensor, " c"]
) -> _Tiles:
    """Tiles of the rows near a place, given the similarity of a row that was found for each query."""
    slots = in_tiles(place.slots)
    ceilings, offsets = centred_ceilings(queries, images, ring, place, slots)

    def least(met: Float[Tensor, " c"]) -> Float[Tensor, " c"]:
        return torch.nextafter((torch.maximum(met, best) - offsets).float(), met.new_tensor(-torch.inf).float())

    return _Tiles(slots, ceilings, least, most=len(slots))


class _Search:
    """A search in one view's ring, up to where the host has to know how much is left to compare.

    Args:
        queries: (R, D) of unit length.
        images: (R,).
        ring: at least one live row.
        tiles: what a pass over its rows tells.
    """

    def __init__(self, queries: Float[Tensor, "r d"], images: Int[Tensor, " r"], ring: Ring, tiles: _Tiles) -> None:
        self.queries, self.images, self.ring, self.slots = queries, images, ring, tiles.slots
        highest = _highest(tiles.ceilings)
        own = torch.arange(len(queries), device=queries.device)
        self.best, self.age = compare(queries, images, ring, tiles.slots[highest], own)
        self.open = tiles.ceilings >= tiles.least(self.best)
        self.open[highest, own] = False
        self.counts = self.open.view(torch.uint8).sum(dim=0, dtype=torch.int32)
        self.crowded = self.counts > tiles.most
        self.open &= ~self.crowded

    def left(self) -> tuple[Int[Tensor, ""], Int[Tensor, ""]]:
        """How many pairs of a tile and a query are left to compare, and how many queries need a second pass."""
        return self.counts.where(~self.crowded, 0).sum(), self.crowded.sum()

    def finish(self, pairs: int, crowded: int) -> tuple[Float[Tensor, " r"], Int[Tensor, " r"]]:
        """Compare what is left, by the numbers of `left`: similarity and age of the rows found."""
        if pairs:
            tile, which = torch.nonzero_static(self.open, size=pairs).unbind(dim=1)
            value, age = compare(self.queries, self.images, self.ring, self.slots[tile], which)
            best = self.best.scatter_reduce(0, which, value, "amax")
            # Of the rows that are as good as the best, the oldest.
            age = age.where(value == best[which], self.ring.capacity)
            held = self.age.where(self.best == best, self.ring.capacity)
            self.best, self.age = best, held.scatter_reduce(0, which, age, "amin")
        if crowded:
            rest = torch.nonzero_static(self.crowded, size=crowded)[:, 0]
            self.best[rest], self.age[rest] = self._among_alike(rest)
        return self.best, self.age

    def _among_alike(self, rest: Int[Tensor, " c"]) -> tuple[Float[Tensor, " c"], Int[Tensor, " c"]]:
        """The second pass, for the queries that need it."""
        queries, images, best, age = (part[rest] for part in (self.queries, self.images, self.best, self.age))
        for place in places(queries, self.ring, best, age):
            own = place.which
            tiles = _centred_tiles(queries[own], images[own], self.ring, place, best[own])
            search = _Search(queries[own], images[own], self.ring, tiles)
            best[own], age[own] = search.finish(*torch.stack(search.left()).tolist())
        return best, age


def _highest(ceilings: Float[Tensor, "t r"]) -> Int[Tensor, " r"]:
    """Where the highest ceiling of each query stands, in two levels: arg-max is far slower than the maximum."""
    size = 32
    whole = len(ceilings) // size * size
    groups = [ceilings[:whole].view(-1, size, ceilings.shape[1]).amax(dim=1)] if whole else []
    rest = [ceilings[whole:].amax(dim=0, keepdim=True)] if len(ceilings) > whole else []
    group = torch.cat(groups + rest).argmax(dim=0)
    members = (size * group + torch.arange(size, device=group.device)[:, None]).clamp_max(len(ceilings) - 1)
    return members.gather(0, ceilings.gather(0, members).argmax(dim=0)[None])[0]


def _least_product(
    best: Float[Tensor, " r"],
    queries: Float[Tensor, "r d"],
    rounded: Float[Tensor, "r d"],
    distortion: Float[Tensor, "2"],
) -> Float[Tensor, " r"]:
    """The least product that the first pass can give for a row that is as similar to its query as the best one met.

    Rounding turns the query and the row by angles whose sum is d at most, so a row at angle a was seen at a + d at
    most: cos(a + d) = cos(a) cos(d) - sin(a) sin(d). Rows that are slightly longer than 1 take the place of 1.
    """
    best = best.float().clamp_min(-LONGEST)  # where no row of the first tile may match, any other may
    turned = _angle(queries, rounded.float()) + distortion[0]
    norms = rounded.float().norm(dim=-1)
    least = best * turned.cos() - turned.sin() * (LONGEST**2 - best.square()).clamp_min(0).sqrt()
    accumulated = (queries.shape[1] + 4) * 2**-22  # rounding of the sums, and of what is compared
    return (least - least.abs() * distortion[1] - accumulated) * norms


def _angle(a: Float[Tensor, "*n d"], b: Float[Tensor, "*n d"]) -> Float[Tensor, "*n"]:
    """Angles in radians between rows that point almost the same way, rounded up; 0 beside a zero row."""
    chord = (F.normalize(a, dim=-1) - F.normalize(b, dim=-1)).norm(dim=-1)
    angle = 2 * (chord / 2).clamp_max(1).asin() + 2**-20
    return angle.where((a != 0).any(dim=-1) & (b != 0).any(dim=-1), 0)


# ------------------------------------------------------------------ first pass on copies


class RoundedCopies(FirstPass):
    """First pass of a processor that multiplies bfloat16 fast: copies of the rows, of unit length, in bfloat16.

    Args:
        slots: C, in whole tiles.
        dim: D.
        images: (C,) the bank's own tensor.
        tile: rows of a tile.
    """

    def __init__(self, slots: int, dim: int, images: Int[Tensor, " c"], tile: int) -> None:
        self._copies = untouched_zeros((2, slots, dim), torch.bfloat16)
        self._distortion = untouched_zeros((2, 2, slots), torch.float32)
        self._images, self._tile = images, tile
        self.nbytes = self._copies.nbytes + self._distortion.nbytes

    def write(self, target: slice, rows: Float[Tensor, "2 n d"], inverse_norms: Float[Tensor, "2 n"]) -> None:
        """Copy rows."""
        unit = rows.float() * inverse_norms[..., None]
        copies = unit.bfloat16()
        self._copies[:, target] = copies
        norms, changed = unit.norm(dim=-1), copies.float().norm(dim=-1)
        self._distortion[:, 0, target] = _angle(unit, copies.float())
        self._distortion[:, 1, target] = torch.where(norms > 0, (changed / norms - 1).abs(), 0)

    def rounded(self, queries: Float[Tensor, "r d"]) -> Float[Tensor, "r d"]:
        """Queries in bfloat16."""
        return queries.bfloat16()

    def distortion(self, view: int) -> Float[Tensor, "2"]:
        """Of all copies, those of rows that have expired included."""
        return self._distortion[view].amax(dim=1)

    def ceilings(
        self,
        view: int,
        tiles: range,
        queries: Float[Tensor, "r d"],
        images: Int[Tensor, " r"],
        into: Float[Tensor, "t r"],
    ) -> None:
        """Tile maxima above a floor that rises from block to block.

        Sums are rounded to bfloat16 when they are written, so a little less than the best product met so far is taken
        off before: near the best, what is left is small, and so is its rounding. What is left of others is negative
        and does not matter. Floats that are not negative order as their bits do, and integers are compared faster.
        """
        tile, count = self._tile, len(queries)
        slots = slice(tile * tiles.start, tile * tiles.stop)
        keys, own = self._copies[view, slots], OwnRows(self._images[slots], images)
        queries, parts = rows_on_grid(queries), list(parts_on_grid(len(keys), _block_rows(queries)))
        floor = _below(own.without(product(keys[parts[0]], queries), 0).amax(dim=0))
        products = torch.empty((parts[0].stop, len(queries)), dtype=torch.bfloat16)
        for part in parts:
            above = torch.addmm(-floor, keys[part], queries.T, out=products[: part.stop - part.start])
            above = own.without(above, part.start).view(torch.int16).view(-1, tile, len(queries))
            highest = above.amax(dim=1).view(torch.bfloat16).float()
            found = torch.add(floor.float(), highest.clamp_min_(0), alpha=1 + 2**-8)
            into[part.start // tile : part.stop // tile] = found[:, :count]
            floor = torch.maximum(floor, _below(found.amax(dim=0)))


def _below(products: Float[Tensor, " r"]) -> Float[Tensor, " r"]:
    """A little less, in bfloat16: no row that is as similar as those is seen below it."""
    return (products.float() - 2**-6).clamp_min(-2).bfloat16()


# ------------------------------------------------------------------ first pass on the rows themselves


class StoredRows(FirstPass):
    """First pass on the stored rows, scaled by their inverse norms behind the product: no copy of anything.

    Args:
        rows: (2, C, D) the bank's own tensor, as the next two.
        inverse_norms: (2, C).
        images: (C,).
        tile: rows of a tile.
    """

    def __init__(
        self,
        rows: Float[Tensor, "2 c d"],
        inverse_norms: Float[Tensor, "2 c"],
        images: Int[Tensor, " c"],
        tile: int,
    ) -> None:
        self._rows, self._inverse_norms, self._images, self._tile = rows, inverse_norms, images, tile

    def write(self, target: slice, rows: Float[Tensor, "2 n d"], inverse_norms: Float[Tensor, "2 n"]) -> None:
        """Nothing: the rows are where they are looked for."""

    def rounded(self, queries: Float[Tensor, "r d"]) -> Float[Tensor, "r d"]:
        """Queries in the rows' type."""
        return queries.to(self._rows.dtype)

    def distortion(self, view: int) -> Float[Tensor, "2"]:
        """None."""
        return self._inverse_norms.new_zeros(2)

    def ceilings(
        self,
        view: int,
        tiles: range,
        queries: Float[Tensor, "r d"],
        images: Int[Tensor, " r"],
        into: Float[Tensor, "t r"],
    ) -> None:
        """The greatest products of tiles."""
        slots = slice(self._tile * tiles.start, self._tile * tiles.stop)
        # The fused version is for half precision.
        maxima = plain_tile_maxima if queries.dtype == torch.float32 else tile_maxima.on(queries.device)
        maxima(queries, self._rows[view, slots], self._inverse_norms[view, slots], images, self._images[slots], into)


class UnroundedRows(FirstPass):
    """First pass in float32, for few rows.

    Args:
        rings: of both views.
    """

    def __init__(self, rings: tuple[Ring, Ring]) -> None:
        self._rings = rings

    def write(self, target: slice, rows: Float[Tensor, "2 n d"], inverse_norms: Float[Tensor, "2 n"]) -> None:
        """Nothing: the rows are where they are looked for."""

    def rounded(self, queries: Float[Tensor, "r d"]) -> Float[Tensor, "r d"]:
        """Queries as they are."""
        return queries

    def distortion(self, view: int) -> Float[Tensor, "2"]:
        """None."""
        return self._rings[view].inverse_norms.new_zeros(2)

    def ceilings(
        self,
        view: int,
        tiles: range,
        queries: Float[Tensor, "r d"],
        images: Int[Tensor, " r"],
        into: Float[Tensor, "t r"],
    ) -> None:
        """The greatest products of tiles."""
        ring = self._rings[view]
        slots = slice(ring.tile * tiles.start, ring.tile * tiles.stop)
        plain_tile_maxima(queries, ring.rows[slots], ring.inverse_norms[slots], images, ring.images[slots], into)


@torch.no_grad()
def plain_tile_maxima(
    queries: Float[Tensor, "r d"],
    rows: Float[Tensor, "m d"],
    inverse_norms: Float[Tensor, " m"],
    images: Int[Tensor, " r"],
    row_images: Int[Tensor, " m"],
    into: Float[Tensor, "t r"],
) -> None:
    """The greatest product of each query with each tile's rows, which are scaled by their inverse norms.

    Args:
        queries: (R, D), of the rows' type.
        rows: (M, D), in T whole tiles.
        inverse_norms: (M,) float32.
        images: (R,).
        row_images: (M,); a query's products with rows of its own image do not count.
        into: (T, R) float32, where the maxima are written; -inf where a tile holds nothing but the own image.
    """
    own, tile, count = OwnRows(row_images, images), len(rows) // len(into), len(queries)
    queries = rows_on_grid(queries.float())
    with float32_products("highest"):
        for part in parts_on_grid(len(rows), _block_rows(queries)):
            products = product(rows[part].float(), queries).mul_(inverse_norms[part, None])
            maxima = own.without(products, part.start).view(-1, tile, len(queries)).amax(dim=1)
            into[part.start // tile : part.stop // tile] = maxima[:, :count]


def _fused_tile_maxima() -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    from cribo.method.kernels.search import tile_maxima as fused

    return fused


def _try_tile_maxima(
    fused: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None], device: torch.device
) -> None:
    """On sizes that fill no block, and with rows of own images."""
    generator, tile = torch.Generator().manual_seed(0), tile_rows(device)
    rows = torch.randn(5 * tile, 72, generator=generator)
    queries = F.normalize(torch.randn(70, 72, generator=generator), dim=-1)
    images = torch.arange(70) // 4, torch.arange(len(rows)) // 5
    given = [part.to(device) for part in (queries.half(), rows.half(), 1 / rows.norm(dim=-1), *images)]
    found, expected = (torch.empty((5, 70), device=device) for _ in range(2))
    fused(*[*given, found])
    plain_tile_maxima(*[*given, expected])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


tile_maxima = Accelerated(
    "search of the memory bank", plain=plain_tile_maxima, fused=_fused_tile_maxima, trial=_try_tile_maxima
)


def make_first_pass(
    rows: Float[Tensor, "2 c d"], inverse_norms: Float[Tensor, "2 c"], images: Int[Tensor, " c"], tile: int
) -> FirstPass:
    """The fastest first pass over a bank's tensors that their device allows."""
    if rows.device.type == "cpu" and multiplies_bfloat16():
        return RoundedCopies(rows.shape[1], rows.shape[2], images, tile)
    return StoredRows(rows, inverse_norms, images, tile)
