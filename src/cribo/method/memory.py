"""The pair of memory banks M_1 and M_2 (paper section 3.2.2)."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cribo.method.matching import NO_MATCH, cycle_consistency, inverse_norms
from cribo.method.precision import at_least_float32
from cribo.method.rings import Ring, ring_slices, untouched_zeros
from cribo.method.search import make_first_pass, nearest_in_rings, tile_rows

_LARGEST_HALF = torch.finfo(torch.float16).max

Criterion = Literal["cycle", "none"]


@dataclass(frozen=True)
class Matches:
    """Matches of a batch's objects: `nearest` (2, R) slots of the bank, and `valid` (2, R) positive pairs."""

    nearest: Int[Tensor, "2 r"]
    valid: Bool[Tensor, "2 r"]


@dataclass(frozen=True)
class Share:
    """Every `count`-th slot of a ring, from slot `number` on: what one of `count` devices holds.

    Whatever part of the ring is live, no share has more than one row more than another, and in each the rows keep
    their order of age.
    """

    number: int
    count: int

    def held(self, part: slice) -> slice:
        """Where the share holds its slots of a slice of the ring.

        Example:
            >>> Share(number=1, count=3).held(slice(2, 8))  # of slots 1, 4, 7, 10, ... those from 2 to 7
            slice(1, 3, None)
        """
        return slice(*((bound - self.number + self.count - 1) // self.count for bound in (part.start, part.stop)))

    def taken(self, part: slice) -> slice:
        """Which rows of those that are to be written to a slice of the ring, one after the other, are the share's.

        Example:
            >>> list(range(2, 8))[Share(number=1, count=3).taken(slice(2, 8))]
            [4, 7]
        """
        return slice((self.number - part.start) % self.count, None, self.count)


class MemoryBank:
    """The teacher's object representations of the last images, of both views, row-aligned.

    One fixed allocation, a ring: objects are written in place and expire by image count. Rows stay as they
    were given (unnormalised) beside their inverse norm, so that a neighbour can go through the head. What else the
    search may want to hold of them (`cribo.method.search`) is made from those and never saved.

    It is no `nn.Module` and registers no buffer: distributed wrappers would overwrite one process's bank with
    another's, or save only one. It saves and restores itself.

    Args:
        num_images: S, how many images the bank remembers.
        num_objects: K, the most objects an image can have.
        dim: D, channels of an object representation.
        dtype: of the stored rows; half precision halves the memory and is searched in float32.
        device: where the rows live.

    Raises:
        ValueError: a size below 1.

    Example:
        >>> bank = MemoryBank(num_images=100, num_objects=4, dim=16)
        >>> objects, images = torch.randn(2, 3, 16), torch.tensor([7, 7, 9])
        >>> bank.push(objects, images, counts=[2, 1])
        >>> matches = bank.match(torch.randn(2, 5, 16), torch.arange(5))
        >>> bank.objects(0, matches.nearest[0]).shape
        torch.Size([5, 16])
    """

    _share = Share(number=0, count=1)
    """Of the ring's slots, those that are held here: all."""

    def __init__(
        self,
        *,
        num_images: int,
        num_objects: int,
        dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("num_images", num_images), ("num_objects", num_objects), ("dim", dim)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        self.num_images = num_images
        self.capacity = num_images * num_objects
        self._tile = tile_rows(torch.device(device))
        self._held = self._share.held(slice(0, self.capacity)).stop
        slots = max(1, -(-self._held // self._tile)) * self._tile
        # The search reads whole tiles: slots that were never written must not hold NaN.
        self._rows = untouched_zeros((2, slots, dim), dtype, device)
        self._inverse_norms = untouched_zeros((2, slots), torch.float32, device)
        self._images = untouched_zeros((slots,), torch.long, device)
        self._first_pass = make_first_pass(self._rows, self._inverse_norms, self._images, self._tile)
        self._counts: deque[int] = deque()  # objects of each remembered image, oldest first
        self._oldest = 0  # slot of the oldest live row
        self._length = 0  # live rows

    def __len__(self) -> int:
        """How many objects the bank holds."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes that a full bank holds, copies for the search included."""
        return sum(t.nbytes for t in (self._rows, self._inverse_norms, self._images)) + self._first_pass.nbytes

    @property
    def images_held(self) -> int:
        """How many images the bank remembers now, those without objects included."""
        return len(self._counts)

    def objects(self, view: int, slots: Int[Tensor, " r"]) -> Float[Tensor, "r d"]:
        """Unnormalised object representations (R, D) at the given slots of one view's bank.

        In float32; in float64 where that is what is stored.
        """
        return at_least_float32(self._rows[view, slots])

    def image_ids(self, slots: Int[Tensor, " r"]) -> Int[Tensor, " r"]:
        """Image of each of the given slots."""
        return self._images[slots]

    @torch.no_grad()
    def match(
        self,
        objects: Float[Tensor, "2 r d"],
        images: Int[Tensor, " r"],
        *,
        group_rows: Sequence[int] | None = None,
        criterion: Criterion = "cycle",
    ) -> Matches:
        """Find each object's nearest neighbour in the bank of its view, and which pairs are to be used.

        Args:
            objects: (2, R, D) the batch's teacher objects, any scale.
            images: (R,) image of each object; the bank's rows of the same image never match.
            group_rows: objects of each group of images, in order; one group when not given.
            criterion: `cycle` keeps cycle-consistent matches, `none` keeps every match.

        Returns:
            slots of the neighbours (`NO_MATCH` if there is none) and the validity of each pair.

        Raises:
            ValueError: an unknown criterion.
        """
        if criterion not in get_args(Criterion):
            raise ValueError(f"criterion must be one of {', '.join(get_args(Criterion))}, got {criterion!r}")
        with torch.autocast(objects.device.type, enabled=False):
            slots = self._find(objects, images)
            matched = slots != NO_MATCH
            if criterion == "none" or not self._length:
                return Matches(slots, matched)
            groups = [objects.shape[1]] if group_rows is None else group_rows
            return Matches(slots, matched & cycle_consistency(objects, self._jump(slots), groups))

    def _find(self, objects: Float[Tensor, "2 r d"], images: Int[Tensor, " r"]) -> Int[Tensor, "2 r"]:
        """Slot of each object's nearest neighbour, or `NO_MATCH`."""
        ages = nearest_in_rings(objects, images, (self._ring(0), self._ring(1)), self._first_pass)
        return torch.where(ages != NO_MATCH, (ages + self._oldest) % self.capacity, NO_MATCH)

    def _jump(self, slots: Int[Tensor, "2 r"]) -> Float[Tensor, "2 r d"]:
        """The other view's rows of the neighbours just found; any row where there is none."""
        reachable = slots.clamp_min(0)
        return torch.stack([self.objects(1 - view, reachable[view]) for view in (0, 1)])

    @torch.no_grad()
    def push(self, objects: Float[Tensor, "2 r d"], images: Int[Tensor, " r"], counts: Sequence[int]) -> None:
        """Remember a batch's objects, forgetting the oldest images beyond `num_images`.

        Objects that are not finite are remembered as zeros.

        Args:
            objects: (2, R, D) unnormalised, image after image.
            images: (R,) image of each object.
            counts: objects of each of the batch's images, 0 included; they sum to R.

        Raises:
            ValueError: counts do not sum to R, or the batch holds more images or objects than the bank can.
        """
        rows = objects.shape[1]
        if sum(counts) != rows:
            raise ValueError(f"counts must sum to the {rows} objects given, got {sum(counts)}")
        if len(counts) > self.num_images or rows > self.capacity:
            raise ValueError(
                f"a batch of {len(counts)} images with {rows} objects does not fit a bank of "
                f"{self.num_images} images and {self.capacity} objects: use a larger bank or a smaller batch"
            )
        while len(self._counts) + len(counts) > self.num_images or self._length + rows > self.capacity:
            expired = self._counts.popleft()
            self._oldest = (self._oldest + expired) % self.capacity
            self._length -= expired
        # An object that is not finite, of a step that will be left out, is remembered as one that resembles nothing.
        finite = objects.isfinite().all(dim=-1, keepdim=True)
        stored = self._in_range(objects.where(finite, 0)).to(self._rows.dtype)
        norms = torch.stack([inverse_norms(view) for view in stored])
        self._append(stored, norms, images, counts)

    def _in_range(self, objects: Float[Tensor, "2 r d"]) -> Float[Tensor, "2 r d"]:
        """Objects without what is too large for the stored rows: it would be infinite, and match everything."""
        if self._rows.dtype != torch.float16 or objects.dtype == torch.float16:
            return objects
        return objects.clamp(-_LARGEST_HALF, _LARGEST_HALF)

    def _append(
        self,
        rows: Float[Tensor, "2 r d"],
        norms: Float[Tensor, "2 r"],
        images: Int[Tensor, " r"],
        counts: Sequence[int],
    ) -> None:
        """Write rows behind the newest, for which there is room; of whatever type, on whatever device."""
        first, end = 0, (self._oldest + self._length) % self.capacity
        for part in ring_slices(end, rows.shape[1], self.capacity):
            behind = first + part.stop - part.start
            self._write(part, rows[:, first:behind], norms[:, first:behind], images[first:behind])
            first = behind
        self._counts.extend(counts)
        self._length += rows.shape[1]

    def _write(
        self, part: slice, rows: Float[Tensor, "2 n d"], norms: Float[Tensor, "2 n"], images: Int[Tensor, " n"]
    ) -> None:
        """Of the rows for a slice of the ring, write those that are held here."""
        target, own = self._share.held(part), self._share.taken(part)
        self._rows[:, target] = rows[:, own]
        self._inverse_norms[:, target] = norms[:, own]
        self._images[target] = images[own]
        self._first_pass.write(target, self._rows[:, target], self._inverse_norms[:, target])

    def state_dict(self) -> dict[str, Any]:
        """The live rows and where they lie, as tensors and numbers that a checkpoint can hold."""
        live = self._ring(0).live()

        def gather(values: Tensor, dim: int) -> Tensor:
            parts = [values[:, part] if dim else values[part] for part in live]
            return torch.cat(parts, dim=dim) if parts else values.narrow(dim, 0, 0).clone()

        return {
            "rows": gather(self._rows, 1),
            "inverse_norms": gather(self._inverse_norms, 1),
            "images": gather(self._images, 0),
            "counts": torch.tensor(list(self._counts), dtype=torch.long),
            "oldest": self._oldest,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, at the same slots.

        Raises:
            ValueError: the state comes from a bank of another width, or holds more than this one can.
        """
        rows: Tensor = state["rows"]
        counts: list[int] = state["counts"].tolist()
        if rows.shape[2] != self._rows.shape[2]:
            raise ValueError(f"the bank's objects have {self._rows.shape[2]} channels, the state's {rows.shape[2]}")
        if len(counts) > self.num_images or rows.shape[1] > self.capacity:
            raise ValueError(
                f"a state of {len(counts)} images with {rows.shape[1]} objects does not fit a bank of "
                f"{self.num_images} images and {self.capacity} objects: use a larger bank"
            )
        self._counts.clear()
        self._oldest, self._length = int(state["oldest"]) % self.capacity, 0
        # Rows may be rounded to the bank's type after their norm was taken: norms stay as they were.
        self._append(self._in_range(rows), state["inverse_norms"], state["images"], counts)

    def _ring(self, view: int) -> Ring:
        """One view's bank, as far as it is held here, as the search reads it."""
        live = [self._share.held(part) for part in ring_slices(self._oldest, self._length, self.capacity)]
        return Ring(
            rows=self._rows[view],
            inverse_norms=self._inverse_norms[view],
            images=self._images,
            capacity=self._held,
            # Where the first slice holds nothing of the share, its oldest row is the first of the second.
            oldest=next((part.start for part in live if part.stop > part.start), 0),
            length=sum(part.stop - part.start for part in live),
            tile=self._tile,
        )
