"""The pair of memory banks M_1 and M_2 (paper section 3.2.2)."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cribo.base.bounds import at_least
from cribo.base.errors import InputError
from cribo.method.config import Criterion
from cribo.method.matching import Rows, match_rows
from cribo.method.precision import at_least_float32, in_float32


@dataclass(frozen=True)
class Matches:
    """Nearest neighbours of a batch's objects in the memory bank.

    Attributes:
        nearest: (2, R) slot of each object's nearest neighbour in its view's bank; `NO_MATCH` if there is none.
        valid: (2, R) whether object and neighbour form a positive pair.
    """

    nearest: Int[Tensor, "2 r"]
    valid: Bool[Tensor, "2 r"]


class MemoryBank:
    """The teacher's object representations of the last S images, of both views, row-aligned.

    A ring of fixed size: objects are written in place and expire by image count. Each row is normalised when it is
    pushed, and its norm is stored too, so that neighbours pass through the head unnormalised.

    The bank is not an `nn.Module` and has no buffers: it is the same on every rank because every rank pushes the same
    objects, and distributed wrappers must not broadcast it. It has its own `state_dict` and `load_state_dict`.

    Args:
        num_images: S, number of images in the bank.
        num_objects: K, maximum number of objects per image.
        dim: D, channels of an object representation.
        dtype: type of the stored rows; half precision halves the memory and, on GPUs, the time of a search.
        device: device of the stored rows.

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

    def __init__(
        self,
        *,
        num_images: int,
        num_objects: int,
        dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        at_least(1).check(num_images=num_images, num_objects=num_objects, dim=dim)
        self.num_images = num_images
        self.capacity = num_images * num_objects
        # Uninitialised: only live slots are read, and the host commits memory when they are first written.
        self._rows = torch.empty((2, self.capacity, dim), dtype=dtype, device=device)
        norm_type = torch.promote_types(dtype, torch.float32)
        self._norms = torch.empty((2, self.capacity), dtype=norm_type, device=device)
        self._images = torch.empty(self.capacity, dtype=torch.long, device=device)
        self._counts: deque[int] = deque()  # objects of each image in the bank, oldest first
        self._oldest = 0  # slot of the oldest live row
        self._length = 0  # live rows

    def __len__(self) -> int:
        """Number of objects in the bank."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of a full bank."""
        return self._rows.nbytes + self._norms.nbytes + self._images.nbytes

    @property
    def images_held(self) -> int:
        """Number of images in the bank, including those without objects."""
        return len(self._counts)

    def objects(self, views: int | Int[Tensor, " r"], slots: Int[Tensor, " r"]) -> Float[Tensor, "r d"]:
        """Return the unnormalised objects (R, D) at `slots`, at least in float32; `views` is one or one per slot."""
        return at_least_float32(self._rows[views, slots]) * self._norms[views, slots][:, None]

    def image_ids(self, slots: Int[Tensor, " r"]) -> Int[Tensor, " r"]:
        """Return the image of the object at each slot."""
        return self._images[slots]

    @property
    def rows(self) -> Rows:
        """The objects in the bank, normalised, oldest first."""
        return Rows(self._rows, ring_slices(self._oldest, self._length, self.capacity), self._images)

    @torch.no_grad()
    @in_float32
    def match(
        self,
        objects: Float[Tensor, "2 r d"],
        images: Int[Tensor, " r"],
        *,
        criterion: Criterion | Callable[..., Bool[Tensor, "2 r"]] = "cycle",
        groups: Sequence[slice] | None = None,
    ) -> Matches:
        """Find each object's nearest neighbour in the bank of its view, and select the positive pairs.

        Args:
            objects: (2, R, D) teacher objects, any scale.
            images: (R,) image of each object; the bank's rows of the same image never match.
            criterion: `cycle` keeps cycle-consistent matches, `none` keeps every match (the paper's ablation); or a
                function with the arguments and result of `cycle_consistency`.
            groups: rows of each group of images, consecutive, for the criterion; by default all are one group.

        Raises:
            ValueError: an unknown criterion.

        Source: paper equations 2 to 4.
        """
        return Matches(*match_rows(objects, self.rows, images, criterion, groups))

    @torch.no_grad()
    def push(self, objects: Float[Tensor, "2 r d"], images: Int[Tensor, " r"], counts: Sequence[int]) -> None:
        """Add a batch's objects; the oldest images beyond `num_images` expire.

        Args:
            objects: (2, R, D) unnormalised, image after image. Objects that are not finite are stored as zeros.
            images: (R,) image of each object.
            counts: number of objects of each of the batch's images, possibly 0; their sum is R.

        Raises:
            ValueError: counts do not sum to R, or the batch has more images or objects than the bank can hold.
        """
        rows = objects.shape[1]
        if sum(counts) != rows:
            raise InputError(f"counts must sum to the {rows} objects given, got {sum(counts)}")
        if len(counts) > self.num_images or rows > self.capacity:
            raise InputError(
                f"a batch of {len(counts)} images with {rows} objects does not fit a bank of "
                f"{self.num_images} images and {self.capacity} objects: use a larger bank or a smaller batch"
            )
        while len(self._counts) + len(counts) > self.num_images or self._length + rows > self.capacity:
            expired = self._counts.popleft()
            self._oldest = (self._oldest + expired) % self.capacity
            self._length -= expired
        objects = at_least_float32(objects)
        objects = objects.where(objects.isfinite().all(dim=-1, keepdim=True), 0)
        norms = objects.norm(dim=-1)
        unit = objects / norms.clamp_min(torch.finfo(norms.dtype).tiny)[..., None]
        self._append(unit, norms, images, counts)

    def _append(
        self,
        unit: Float[Tensor, "2 r d"],
        norms: Float[Tensor, "2 r"],
        images: Int[Tensor, " r"],
        counts: Sequence[int],
    ) -> None:
        """Write rows after the newest one; there must be room."""
        first, end = 0, (self._oldest + self._length) % self.capacity
        for part in ring_slices(end, unit.shape[1], self.capacity):
            own = slice(first, first + part.stop - part.start)
            self._rows[:, part] = unit[:, own].to(self._rows.dtype)
            self._norms[:, part] = norms[:, own].to(self._norms.dtype)
            self._images[part] = images[own]
            first = own.stop
        self._counts.extend(counts)
        self._length += unit.shape[1]

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the live rows and their slots, for a checkpoint."""
        parts = self.rows.parts
        slots = torch.cat([torch.arange(part.start, part.stop) for part in parts] or [torch.arange(0)])
        slots = slots.to(self._images.device)
        return {
            "rows": self._rows[:, slots],
            "norms": self._norms[:, slots],
            "images": self._images[slots],
            "counts": torch.tensor(list(self._counts), dtype=torch.long),
            "oldest": self._oldest,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; rows keep their slots.

        Raises:
            ValueError: the state has another number of channels, or is larger than this bank.
        """
        rows: Tensor = state["rows"]
        counts: list[int] = state["counts"].tolist()
        if rows.shape[2] != self._rows.shape[2]:
            raise InputError(f"the bank's objects have {self._rows.shape[2]} channels, the state's {rows.shape[2]}")
        if len(counts) > self.num_images or rows.shape[1] > self.capacity:
            raise InputError(
                f"a state of {len(counts)} images with {rows.shape[1]} objects does not fit a bank of "
                f"{self.num_images} images and {self.capacity} objects: use a larger bank"
            )
        self._counts.clear()
        self._oldest, self._length = int(state["oldest"]) % self.capacity, 0
        self._append(rows, state["norms"], state["images"], counts)


def ring_slices(start: int, length: int, capacity: int) -> list[slice]:
    """Return the slices of `length` consecutive slots of a ring: one, two if they wrap around, or none.

    Example:
        >>> ring_slices(7, 5, capacity=10)
        [slice(7, 10, None), slice(0, 2, None)]
    """
    end = start + length
    parts = [slice(start, min(end, capacity)), slice(0, max(0, end - capacity))]
    return [part for part in parts if part.stop > part.start]
