"""What the steps gave, added up on the device until somebody reads it."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cribo.objectives.base import Output, detached


class RunningSums:
    """Numerators and denominators of losses and metrics over the steps since the last reading.

    Only `read` and `state_dict` wait for the device; they are to be called on all devices.

    Args:
        gather: (...) on every device -> (devices, ...), in their order.
    """

    def __init__(self, gather: Callable[[Tensor], Tensor]) -> None:
        self._gather = gather
        self._sums: dict[str, Tensor] = {}  # (2,): numerator, denominator

    def add(self, output: Output, weights: Mapping[str, float]) -> None:
        """Add a micro-batch: each loss as `loss_` and its name, the weighted total as `loss`, the metrics by name."""
        first = next(iter(output.losses.values())).detach()
        like = first.to(torch.promote_types(first.dtype, torch.float32))  # 16 bits count to 256 or 2048
        found = {f"loss_{name}": (loss, 1.0) for name, loss in output.losses.items()}
        total = sum(weights.get(name, 1.0) * loss.detach() for name, loss in output.losses.items())
        found["loss"] = total, 1.0  # pyright: ignore[reportArgumentType]
        found |= {name: value if isinstance(value, tuple) else (value, 1.0) for name, value in output.metrics.items()}
        for name, (numerator, denominator) in found.items():
            pair = torch.stack((detached(numerator, like), detached(denominator, like)))
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def read(self) -> dict[str, float]:
        """Quotients over all devices since the last reading; one whose denominator is 0 is left out."""
        found = {name: pair.tolist() for name, pair in self._over_devices().items()}
        self._sums = {}
        return {name: numerator / denominator for name, (numerator, denominator) in found.items() if denominator}

    def is_finite(self) -> bool:
        """Whether all losses were finite since the last reading, on all devices."""
        losses = [pair.tolist() for name, pair in self._over_devices().items() if name.startswith("loss")]
        return all(math.isfinite(number) for pair in losses for number in pair)

    def state_dict(self) -> dict[str, Any]:
        """The sums, as a mean over the devices, for a checkpoint."""
        return {name: pair.cpu() for name, pair in self._over_devices().items()}

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Take up a state, on each device."""
        self._sums = {name: pair.to(device) for name, pair in state.items()}

    def _over_devices(self) -> dict[str, Tensor]:
        if not self._sums:
            return {}
        # The mean: a run weighs its steps alike, on however many devices each was taken.
        gathered = self._gather(torch.stack(list(self._sums.values()))).mean(dim=0)
        return dict(zip(self._sums, gathered, strict=True))
