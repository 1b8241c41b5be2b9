"""Memory banks of a run: the same on every rank, and saved in checkpoints."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from cribo.base.errors import ConfigError
from cribo.data.randomness import keyed_generator
from cribo.method import Matches, MemoryBank
from cribo.method.bank import ring_slices
from cribo.objectives.base import Step
from cribo.objectives.config import ObjectiveOptions
from cribo.objectives.objects import RowPairs
from cribo.objectives.points import Points

_PATCHES_PER_IMAGE = 8
_PATCHES = 2  # purpose of the keyed draw


class RunBank:
    """Memory bank that is allocated at a run's first batch.

    Args:
        num_images: number of images in the bank.
        num_objects: maximum number of rows per image.
    """

    def __init__(self, *, num_images: int, num_objects: int) -> None:
        self.num_images = num_images
        self.num_objects = num_objects
        self.bank: MemoryBank | None = None
        self._restored: dict[str, Any] | None = None

    def allocate(self, rows: Float[Tensor, "2 r d"]) -> MemoryBank:
        """Return the bank; the first call allocates it with the rows' width, dtype and device, or restores it."""
        if self.bank is None:
            self.bank = MemoryBank(
                num_images=self.num_images,
                num_objects=self.num_objects,
                dim=rows.shape[2],
                dtype=torch.float16 if rows.is_cuda else rows.dtype,
                device=rows.device,
            )
            if self._restored is not None:
                self.bank.load_state_dict(self._restored)
                self._restored = None
        return self.bank

    def match(self, objects: RowPairs, *, group_size: int, criterion: Any) -> Matches:
        """Match the objects of each group of `group_size` images; see `MemoryBank.match`."""
        bank, groups = self.allocate(objects.teacher), objects.groups(group_size)
        return bank.match(objects.teacher, objects.images, criterion=criterion, groups=groups)

    def push(self, parts: Sequence[RowPairs], images: Int[Tensor, " b"], step: Step) -> None:
        """Add the rows of a step's micro-batches on all ranks; no-op until a loss has read the bank.

        Args:
            parts: rows of each micro-batch.
            images: (B,) index of each image of the micro-batches in the collection.
            step: the completed step.
        """
        if self.bank is not None:
            self.bank.push(*_gather(parts, images, step))

    def state_dict(self) -> dict[str, Any] | None:
        """Return the bank's state, or the one to be restored; None if it was never allocated."""
        return self.bank.state_dict() if self.bank is not None else self._restored

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Store a state, to be restored when the bank is allocated."""
        self.bank, self._restored = None, state


def object_bank(options: ObjectiveOptions, num_images: int) -> RunBank:
    """Create the bank of objects."""
    return RunBank(num_images=resolve_bank_images(options, num_images), num_objects=options.objects.num_objects)


class RowQueue(nn.Module):
    """Ring buffer of the latest rows, identical on every rank; new rows replace the oldest.

    Args:
        count: M, number of rows.
        dim: D, channels of a row.
    """

    rows: Tensor

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(count, dim))
        self.written = 0  # rows written since the start of the run

    def __len__(self) -> int:
        """Number of rows in use."""
        return min(self.written, len(self.rows))

    def read(self) -> Float[Tensor, "m d"]:
        """Return the rows in use."""
        return self.rows[: len(self)]

    @torch.no_grad()
    def push(self, rows: Float[Tensor, "r d"]) -> None:
        """Add rows, of more than M the last ones; they replace the oldest ones."""
        rows = rows[-len(self.rows) :]
        first = 0
        for part in ring_slices(self.written % len(self.rows), len(rows), len(self.rows)):
            self.rows[part] = rows[first : first + part.stop - part.start].to(self.rows.dtype)
            first += part.stop - part.start
        self.written += len(rows)

    def get_extra_state(self) -> int:
        """Return the number of written rows, for a checkpoint."""
        return self.written

    def set_extra_state(self, state: int) -> None:
        """Restore the number of written rows."""
        self.written = state


class PatchBank(RunBank):
    """Bank of patches: a few of each image, sampled in each step.

    Args:
        options: options of the run.
        on: whether a loss reads the bank.

    Raises:
        ConfigError: the bank is too small for one patch of each view of a batch.
    """

    def __init__(self, options: ObjectiveOptions, *, on: bool) -> None:
        rows, batch_size = options.losses.patch_bank // 2, options.optim.batch_size
        if on and rows < batch_size:
            raise ConfigError(
                f"losses.patch_bank must hold one patch of each view of a batch, at least {2 * batch_size}, got "
                f"{options.losses.patch_bank}: use a larger bank or a smaller optim.batch_size"
            )
        per_image = max(1, min(_PATCHES_PER_IMAGE, rows // batch_size))
        super().__init__(num_images=rows // per_image, num_objects=per_image)
        self.seed = options.seed

    def push_points(self, parts: Sequence[Points], images: Int[Tensor, " b"], step: Step) -> None:
        """Add a few points of each image; arguments as for `push`."""
        if self.bank is not None:
            key = (self.seed, _PATCHES, step.number)
            self.push([part.draw(self.num_objects, keyed_generator(*key)) for part in parts], images, step)


def resolve_bank_images(options: ObjectiveOptions, num_images: int) -> int:
    """Return S: as configured, else min(25000, half the data set), but at least one batch."""
    configured = options.objects.bank_images
    if configured is None:
        return max(min(25_000, num_images // 2), options.optim.batch_size)
    return configured


def _gather(
    parts: Sequence[RowPairs], images: Int[Tensor, " b"], step: Step
) -> tuple[Float[Tensor, "2 r d"], Int[Tensor, " r"], list[int]]:
    """Gather the rows of all ranks in the order of the whole batch, so that all ranks' banks are equal.

    Returns:
        The rows, the image of each, and the number of rows of each image of the whole batch.
    """
    rows = torch.cat([part.teacher for part in parts], dim=1)
    own = torch.tensor([count for part in parts for count in part.counts])
    counts, images = step.gather(torch.stack((own.to(images.device, non_blocking=True), images))).unbind(dim=1)
    # (ranks, B); reading the counts of other ranks synchronises with the device.
    counted: list[list[int]] = [own.tolist()] if len(counts) == 1 else counts.tolist()
    lengths = [sum(each) for each in counted]
    padded = F.pad(rows, (0, 0, 0, max(lengths) - rows.shape[1]))
    gathered = step.gather(padded) if max(lengths) else padded[None]
    rows = torch.cat([part[:, :length] for part, length in zip(gathered, lengths, strict=False)], dim=1)
    repeated = images.flatten().repeat_interleave(counts.flatten(), output_size=sum(lengths))
    return rows, repeated, [count for each in counted for count in each]
