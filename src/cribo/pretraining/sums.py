"""Running sums of losses and metrics, accumulated on the device."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from cribo.objectives.base import Output, detached


class RunningSums:
    """Numerators and denominators of losses and metrics, summed over the steps since the last reading.

    Losses and scalar metrics are averaged over devices; numerators and denominators of the other metrics are summed
    before dividing. Results do not depend on the number of devices, even if it changes between the steps of a row.

    Only `read`, `is_finite` and `state_dict` synchronise with the device; call them on all ranks.

    Args:
        gather: function that stacks the tensors (...) of all ranks in order: (devices, ...).
        devices: function that returns the number of devices.
    """

    def __init__(self, gather: Callable[[Tensor], Tensor], devices: Callable[[], int] = lambda: 1) -> None:
        self._gather = gather
        self._devices = devices
        self._sums: dict[str, Tensor] = {}  # (2,): numerator, denominator

    def add(self, output: Output, weights: Mapping[str, float]) -> None:
        """Add a micro-batch: each loss as `loss_<name>`, the weighted total as `loss`, the metrics by name."""
        first = next(iter(output.losses.values())).detach()
        like = first.to(torch.promote_types(first.dtype, torch.float32))  # 16-bit sums stop growing at 256 or 2048
        total = sum(weights.get(name, 1.0) * loss.detach() for name, loss in output.losses.items())
        values = {f"loss_{name}": loss for name, loss in output.losses.items()} | {"loss": total} | output.metrics
        added = dict(zip(values, self._pairs(values.values(), like), strict=True))
        known = [name for name in added if name in self._sums]
        if known:  # one kernel for all
            torch._foreach_add_([self._sums[name] for name in known], [added[name] for name in known])  # pyright: ignore[reportPrivateImportUsage]
        self._sums |= {name: pair for name, pair in added.items() if name not in self._sums}

    def _pairs(self, values: Iterable[Any], like: Tensor) -> tuple[Tensor, ...]:
        """Return the numerator and denominator (2,) of each value, as means over the devices."""
        numbers: list[Tensor | float] = []
        for value in values:
            pair, factor = (value, self._devices()) if isinstance(value, tuple) else ((value, 1.0), 1)
            numbers += pair if factor == 1 else (factor * number for number in pair)
        of_host = {number: detached(number, like) for number in numbers if not isinstance(number, Tensor)}
        on_device = [detached(x, like) if isinstance(x, Tensor) else of_host[x] for x in numbers]
        return torch.stack(on_device).view(-1, 2).unbind()

    def read(self) -> dict[str, float]:
        """Return the quotients over all devices since the last reading, without those of denominator 0."""
        found = {name: pair.tolist() for name, pair in self._over_devices().items()}
        self._sums = {}
        return {name: numerator / denominator for name, (numerator, denominator) in found.items() if denominator}

    def is_finite(self) -> bool:
        """Whether all losses were finite since the last reading, on all devices."""
        losses = [pair.tolist() for name, pair in self._over_devices().items() if name.startswith("loss")]
        return all(math.isfinite(number) for pair in losses for number in pair)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, as means over the devices, for a checkpoint."""
        return {name: pair.cpu() for name, pair in self._over_devices().items()}

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore a state on each rank."""
        self._sums = {name: pair.to(device) for name, pair in state.items()}

    def _over_devices(self) -> dict[str, Tensor]:
        if not self._sums:
            return {}
        gathered = self._gather(torch.stack(list(self._sums.values()))).mean(dim=0)
        return dict(zip(self._sums, gathered, strict=True))
