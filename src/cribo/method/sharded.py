"""The pair of memory banks held in shares, one on each device: queries travel, and the neighbours that are found."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from cribo.method.matching import NO_MATCH
from cribo.method.memory import MemoryBank, Share
from cribo.method.precision import at_least_float32
from cribo.method.rings import ring_slices
from cribo.method.search import most_similar

_SLOTS_AT_ONCE = 2**14  # that are collected for a checkpoint: 50 MB of 768 channels in half precision


@dataclass(frozen=True)
class _Neighbours:
    """What the last match found for this device's queries.

    Attributes:
        slots: of the neighbours, `NO_MATCH` where there is none.
        rows: of the query's view; zeros where there is none.
        opposite: of the other view.
        images: image of each neighbour.
    """

    slots: Int[Tensor, "2 r"]
    rows: Float[Tensor, "2 r d"]
    opposite: Float[Tensor, "2 r d"]
    images: Int[Tensor, "2 r"]


class ShardedMemoryBank(MemoryBank):
    """A memory bank of which each of P processes holds every P-th slot: memory falls with their number.

    It is the ring of `MemoryBank`, slot for slot, with the same bookkeeping in every process; process p holds slots
    p, p + P, p + 2P, ... So whatever part of it is live, each holds a P-th of the rows, give or take one, and has a
    P-th of the search. Slots, neighbours and validity of a match are bit for bit those of a `MemoryBank`.

    `match` and `state_dict` are collective: all processes of the group call them, those without objects too, one as
    often as the other. `objects` and `image_ids` are not; they know the neighbours of the last `match` and no others.
    `push` is not either: it is given the whole batch, the same in every process.

    Args:
        num_images: S, how many images the bank remembers, all shares together.
        num_objects: K, the most objects an image can have.
        dim: D, channels of an object representation.
        dtype: of the stored rows.
        device: where this process's rows live; one that the group's backend can send from.
        group: the processes that hold a share; all when not given.

    Raises:
        ValueError: a size below 1.
        RuntimeError: `torch.distributed` is not initialised.
    """

    def __init__(
        self,
        *,
        num_images: int,
        num_objects: int,
        dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "a bank in shares needs the processes of torch.distributed, which is not initialised: use MemoryBank, "
                "or call torch.distributed.init_process_group before"
            )
        self._group = group
        self._share = Share(dist.get_rank(group), dist.get_world_size(group))
        super().__init__(num_images=num_images, num_objects=num_objects, dim=dim, dtype=dtype, device=device)
        self._neighbours = self._no_neighbours(0)

    # ------------------------------------------------------------------------------------------- neighbours found

    def objects(self, view: int, slots: Int[Tensor, " r"]) -> Float[Tensor, "r d"]:
        """Unnormalised object representations (R, D) of neighbours that the last match found in a view.

        In float32; in float64 where that is what is stored. Rows of any other slot are not here to be read: they come
        as NaN.

        Raises:
            ValueError: the last match had no queries, or there was none.
        """
        place, is_here = _places(self._neighbours.slots[view], slots)
        return at_least_float32(self._neighbours.rows[view, place]).where(is_here[:, None], torch.nan)

    def image_ids(self, slots: Int[Tensor, " r"]) -> Int[Tensor, " r"]:
        """Image of neighbours that the last match found in either view; -1 for any other slot.

        Raises:
            ValueError: the last match had no queries, or there was none.
        """
        place, is_here = _places(self._neighbours.slots.flatten(), slots)
        return self._neighbours.images.flatten()[place].where(is_here, -1)

    def _find(self, objects: Float[Tensor, "2 r d"], images: Int[Tensor, " r"]) -> Int[Tensor, "2 r"]:
        """Slot of each object's nearest neighbour among all shares; the neighbours' rows come with it."""
        self._neighbours = self._no_neighbours(objects.shape[1])
        if self._length:
            # Normalised where they are from: how a GPU sums up a norm may depend on how many rows there are.
            queries, all_images, counts = self._gather_queries(F.normalize(objects.float(), dim=-1), images)
            if queries.shape[1]:
                self._neighbours = self._fetch(self._best_slots(queries, all_images), counts)
        return self._neighbours.slots

    def _jump(self, slots: Int[Tensor, "2 r"]) -> Float[Tensor, "2 r d"]:
        """The other view's rows of the neighbours just found; zeros where there is none."""
        return at_least_float32(self._neighbours.opposite)

    def _no_neighbours(self, queries: int) -> _Neighbours:
        slots = torch.full((2, queries), NO_MATCH, device=self._rows.device)
        rows = self._rows.new_zeros((2, queries, self._rows.shape[2]))
        return _Neighbours(slots, rows, torch.zeros_like(rows), slots)

    # --------------------------------------------------------------------------------------------------- exchange

    def _gather_queries(
        self, queries: Float[Tensor, "2 r d"], images: Int[Tensor, " r"]
    ) -> tuple[Float[Tensor, "2 t d"], Int[Tensor, " t"], list[int]]:
        """Queries and images of all processes, one process after the other, and how many are of each."""
        counts: list[int] = self._all_gather(images.new_full((1,), len(images))).flatten().tolist()
        missing = max(counts) - len(images)
        all_queries = self._all_gather(F.pad(queries, (0, 0, 0, missing)))
        all_images = self._all_gather(F.pad(images, (0, missing)))
        return (
            torch.cat([part[:, :count] for part, count in zip(all_queries, counts, strict=True)], dim=1),
            torch.cat([part[:count] for part, count in zip(all_images, counts, strict=True)]),
            counts,
        )

    def _all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, which have one shape, stacked."""
        gathered = tensor.new_empty((self._share.count, *tensor.shape))
        dist.all_gather_into_tensor(gathered.flatten(0, 1), tensor.contiguous(), group=self._group)
        return gathered

    def _best_slots(self, queries: Float[Tensor, "2 t d"], images: Int[Tensor, " t"]) -> Int[Tensor, "t 2"]:
        """Slot of the nearest row in any share to every process's queries, or `NO_MATCH`."""
        ring = self._ring(0)
        similarity, ages = most_similar(queries, images, (ring, self._ring(1)), self._first_pass)
        slots = (ring.oldest + ages) % max(1, ring.capacity) * self._share.count + self._share.number
        best = similarity.T.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(best, dist.ReduceOp.MAX, group=self._group)
        is_best = (best == similarity.T) & (best > -torch.inf)
        ages = ((slots.T - self._oldest) % self.capacity).where(is_best, self.capacity).contiguous()
        dist.all_reduce(ages, dist.ReduceOp.MIN, group=self._group)
        return ((ages + self._oldest) % self.capacity).where(ages < self.capacity, NO_MATCH)

    def _fetch(self, slots: Int[Tensor, "t 2"], counts: Sequence[int]) -> _Neighbours:
        """Send the neighbours held here to the processes that asked, and receive those of this process's queries."""
        number, processes, dim = self._share.number, self._share.count, self._rows.shape[2]
        first = sum(counts[:number])
        mine, flat = slots[first : first + counts[number]], slots.flatten()
        of_mine = (mine % processes).where(mine != NO_MATCH, processes).flatten()  # the share that has each
        is_here = (flat % processes == number) & (flat != NO_MATCH)
        leaving = torch.stack([part.sum() for part in is_here.split([2 * count for count in counts])])
        coming = (of_mine == torch.arange(processes, device=flat.device)[:, None]).sum(dim=1)
        sent, received = torch.stack((leaving, coming)).tolist()

        which = torch.nonzero_static(is_here, size=sum(sent))[:, 0]
        held, view = flat[which] // processes, which % 2
        parcels = _as_bytes(self._images[held, None], self._rows[view, held], self._rows[1 - view, held])
        arrived = parcels.new_empty((sum(received), parcels.shape[1]))
        dist.all_to_all_single(arrived, parcels, received, sent, group=self._group)

        # They come share by share, and from each in the order of the queries.
        order = of_mine.sort(stable=True).indices[: len(arrived)]
        images, *rows = _from_bytes(arrived, (1, torch.long), (dim, self._rows.dtype), (dim, self._rows.dtype))
        images = torch.full_like(of_mine, -1).index_copy(0, order, images[:, 0])
        places = self._rows.new_zeros((len(of_mine), dim))
        own, opposite = (places.index_copy(0, order, part).view(-1, 2, dim).transpose(0, 1) for part in rows)
        return _Neighbours(mine.T, own, opposite, images.view(-1, 2).T)

    # ------------------------------------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What a `MemoryBank` gives, all shares together, on the host of the group's first process; else nothing.

        Collective. It takes the memory of the whole bank in the first process's host, and on devices that of some
        thousand rows.
        """
        parts = [
            slice(start, min(start + _SLOTS_AT_ONCE, part.stop))
            for part in ring_slices(self._oldest, self._length, self.capacity)
            for start in range(part.start, part.stop, _SLOTS_AT_ONCE)
        ]
        if self._share.number:
            for part in parts:
                self._collect(part)
            return {}
        state = {
            "rows": torch.empty((2, self._length, self._rows.shape[2]), dtype=self._rows.dtype),
            "inverse_norms": torch.empty((2, self._length)),
            "images": torch.empty(self._length, dtype=torch.long),
            "counts": torch.tensor(list(self._counts), dtype=torch.long),
            "oldest": self._oldest,
        }
        first = 0
        for part in parts:
            behind = first + part.stop - part.start
            for number, arrived in enumerate(self._collect(part)):
                own = slice(first + Share(number, self._share.count).taken(part).start, behind, self._share.count)
                state["rows"][0, own], state["rows"][1, own], norms, state["images"][own, None] = arrived
                state["inverse_norms"][:, own] = norms.T
            first = behind
        return state

    def _collect(self, part: slice) -> list[list[Tensor]]:
        """Rows of both views, inverse norms (N, 2) and images (N, 1) of a slice of the ring, share by share.

        In the group's first process only, on the host.
        """
        here, processes = self._share.held(part), self._share.count
        parcels = _as_bytes(
            self._rows[0, here], self._rows[1, here], self._inverse_norms[:, here].T, self._images[here, None]
        )
        most = -(-(part.stop - part.start) // processes)
        parcels = F.pad(parcels, (0, 0, 0, most - len(parcels)))
        is_first = self._share.number == 0
        arrived = [torch.empty_like(parcels) for _ in range(processes)] if is_first else None
        dist.gather(parcels, arrived, group=self._group, group_dst=0)
        row = (self._rows.shape[2], self._rows.dtype)
        found = []
        for number, share in enumerate(arrived or []):
            held = Share(number, processes).held(part)
            found.append(
                _from_bytes(share[: held.stop - held.start].cpu(), row, row, (2, torch.float32), (1, torch.long))
            )
        return found


def _places(held: Int[Tensor, " n"], wanted: Int[Tensor, " m"]) -> tuple[Int[Tensor, " m"], Tensor]:
    """Where in `held` each wanted slot is, and whether it is."""
    if len(wanted) and not len(held):
        raise ValueError("a bank in shares has the neighbours of its last match at hand, and that had no queries")
    in_order, order = held.sort()
    place = torch.searchsorted(in_order, wanted).clamp_max(len(held) - 1)
    return order[place], in_order[place] == wanted


def _as_bytes(*columns: Tensor) -> UInt8[Tensor, "n bytes"]:
    """Columns (N, _) of any types, side by side: one message instead of several."""
    # Copied even where there is nothing to copy: an empty part may have strides that no other type can take.
    return torch.cat([c.clone(memory_format=torch.contiguous_format).view(torch.uint8) for c in columns], dim=1)


def _from_bytes(parcels: UInt8[Tensor, "n bytes"], *columns: tuple[int, torch.dtype]) -> list[Tensor]:
    """The columns that `_as_bytes` was given, of so many numbers of such a type each."""
    parts = parcels.split([size * dtype.itemsize for size, dtype in columns], dim=1)
    copies = [part.clone(memory_format=torch.contiguous_format) for part in parts]
    return [part.view(dtype) for part, (_, dtype) in zip(copies, columns, strict=True)]
