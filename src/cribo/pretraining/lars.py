"""LARS with the trust ratio of the released codes of self-supervised methods."""

from typing import Any

import torch
from timm.optim.lars import Lars


class LARS(Lars):
    """LARS (You et al. 2017) whose trust ratio is |w| / |g + decay w|.

    timm's has |w| / (|g| + decay |w|), as in the paper's algorithm; SlotCon, ORL and BYOL add the decay to the gradient
    first. Rates are adapted in groups with weight decay (`decay`), even where the schedule of the decay is 0.

    Args:
        groups: parameter groups with the factor `decay`; schedules set their `lr` and `weight_decay`.
        momentum: momentum of the gradients.
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float) -> None:
        groups = [{**group, "always_adapt": bool(group["decay"])} for group in groups]
        super().__init__(groups, lr=0.0, momentum=momentum)  # pyright: ignore[reportArgumentType]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Add the decay to the gradients, and update the parameters."""
        decays = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = 0.0
            for parameter in group["params"]:
                if decay and parameter.grad is not None:
                    parameter.grad.add_(parameter, alpha=decay)
        try:
            return super().step(closure)
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
