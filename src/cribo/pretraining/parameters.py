"""Parameter groups, frozen parts and gradient clipping (METHOD section 5)."""

import re
from collections.abc import Iterable

import torch
from torch import nn

from cribo.pretraining.config import OptimConfig
from cribo.pretraining.network import Network


def parameter_groups(student: Network, config: OptimConfig) -> list[dict[str, object]]:
    """Groups for AdamW, each with `lr_scale` and `decay`, which the schedules are multiplied with.

    Biases and other 1-D parameters do not decay. [CLS], the position embedding and the weight-norm gain do:
    they have more than one dimension. With `layer_decay` below 1 the learning rate falls from each block of the
    backbone to the one below; the head has the full rate.
    """
    depth = 1 + max((_block_number(name) or 0) for name, _ in student.backbone.named_parameters())
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in student.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = 1.0
        if name.startswith("backbone."):
            scale = config.layer_decay ** (depth - _layer(name, depth))
        groups.setdefault((scale, parameter.ndim > 1), []).append(parameter)
    return [
        {"params": parameters, "lr_scale": scale, "decay": float(decays)}
        for (scale, decays), parameters in sorted(groups.items(), key=lambda item: item[0])
    ]


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Take the gradients away, so that the optimiser neither moves nor decays the parameters nor keeps state."""
    for parameter in parameters:
        parameter.grad = None


@torch.no_grad()
def clip_each(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Scale each gradient tensor whose own norm exceeds `limit` down to it, without a synchronisation."""
    for parameter in parameters:
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad)
            parameter.grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))


# Where timm's networks number their blocks: blocks.3, stages.2.blocks.1, layer4.0, ...
_NUMBERED = re.compile(r"\b(?:blocks|stages\.\d+\.blocks|stages|layers|layer)\.?(\d+)\.")


def _block_number(name: str) -> int | None:
    match = _NUMBERED.search(name)
    return int(match[1]) + 1 if match else None


def _layer(name: str, depth: int) -> int:
    """0 for what comes before the blocks, their number from 1 inside, `depth` for what comes after."""
    number = _block_number(name)
    if number is not None:
        return number
    return depth if re.search(r"\b(?:norm|fc_norm|head)\b", name) else 0
