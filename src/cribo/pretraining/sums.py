"""What the steps gave, added up on the device until somebody reads it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cribo.pretraining.objective import LOSSES

WATCHED = (*(f"the loss {name}" for name in LOSSES), "the gradients")
"""What can fail to be finite in a step, in the order in which it is named."""

_COUNTS = ("valid", "kept", "images", "steps", "left_out")


@dataclass(frozen=True)
class LeftOut:
    """The steps that were left out because they were not finite, since this was last read.

    Attributes:
        first: by what was not finite (one of `WATCHED`), the first step at which it was not. Empty if nothing is
            wrong: a step whose gradients alone overflow is part of scaling losses for 16-bit floats.
        count: of the updates that were left out.
        in_a_row: the most steps that were not finite and followed one another, with those before the last reading.
    """

    first: dict[str, int]
    count: int
    in_a_row: int

    @property
    def earliest(self) -> tuple[str, int] | None:
        """What was not finite first, and when."""
        return min(self.first.items(), key=lambda item: item[1], default=None)


class RunningSums:
    """Sums over the steps since the last reading. A step that is not finite is counted, and left out of them.

    Only the methods that read wait for the device; they are to be called on all devices.

    Args:
        like: a tensor of the device and type of the losses.
        share: of the run's devices that this one is.
        gather: (...) on every device -> (devices, ...), in their order.
    """

    def __init__(self, like: Tensor, *, share: float, gather: Callable[[Tensor], Tensor]) -> None:
        self._share = share
        self._gather = gather
        self._values = like.new_zeros(len(LOSSES) + len(_COUNTS))
        self._first = like.new_full((len(WATCHED),), torch.inf)
        self._run = like.new_zeros(3)  # steps left out: up to and with the last step; the most of these; in all

    def add(
        self, step: int, losses: Tensor, counts: Sequence[Tensor | int], *, left_out: Tensor, expected: bool
    ) -> None:
        """Add a step.

        Args:
            step: its number, from 0.
            losses: (3,) of this device.
            counts: valid matches, kept objects, and images of this device.
            left_out: (,) whether the update was left out, because the gradients were not finite.
            expected: whether that alone is nothing to report.
        """
        finite = losses.isfinite()
        bad = left_out | ~finite.all()
        # Numbers are filled on the device: one that is copied there would wait for all that is under way.
        filled = [c if isinstance(c, Tensor) else losses.new_full((), c) for c in (*counts, self._share)]
        values = torch.cat((self._share * losses, torch.stack(filled)))
        self._values[:-1] += values.where(~bad, 0)
        self._values[-1] += self._share * left_out
        new = torch.cat((~finite, (left_out & (not expected))[None]))
        self._first = self._first.minimum(torch.where(new, float(step), torch.inf))
        ending, most, total = self._run.unbind()
        ending = (ending + 1) * bad
        self._run = torch.stack((ending, most.maximum(ending), total + left_out))

    def read(self) -> tuple[dict[str, float], dict[str, float]]:
        """Means of the losses (none if all steps were left out), and counts, over all devices since the last time."""
        *losses, valid, kept, images, steps, left_out = self._over_devices()["values"].tolist()
        self._values = torch.zeros_like(self._values)
        means = {name: loss / steps for name, loss in zip(LOSSES, losses, strict=True)} if steps else {}
        return means, dict(zip(_COUNTS, (valid, kept, images, steps, left_out), strict=True))

    def read_left_out(self) -> LeftOut:
        """The steps that were left out on any device. Devices that decide by it decide together."""
        state = self._over_devices()
        self._first = torch.full_like(self._first, torch.inf)
        self._run = torch.stack((self._run[0], self._run[0], self._run[0] * 0))
        steps = zip(WATCHED, state["first"].tolist(), strict=True)
        _, most, total = state["run"].tolist()
        return LeftOut({what: int(step) for what, step in steps if step < torch.inf}, int(total), int(most))

    def forget_means(self) -> None:
        """Begin means anew; what was left out goes on being counted."""
        self._values[:-1].zero_()

    def state_dict(self) -> dict[str, Any]:
        """The sums of all devices, for a checkpoint."""
        return self._over_devices()

    def load_state_dict(self, state: dict[str, Any], *, is_first: bool) -> None:
        """Take up the sums of all devices; the first one holds them, for they will be added up again."""
        self._values.copy_(state["values"] if is_first else torch.zeros_like(self._values))
        self._first.copy_(state["first"])
        self._run.copy_(state["run"])

    def _over_devices(self) -> dict[str, Tensor]:
        names, parts = ("values", "first", "run"), (self._values, self._first, self._run)
        gathered = self._gather(torch.cat(parts)).split([len(part) for part in parts], dim=1)
        values, first, run = gathered
        return dict(zip(names, (values.sum(dim=0), first.amin(dim=0), run.amax(dim=0)), strict=True))
