"""Optimiser, parameter groups, frozen parts, gradient clipping (docs/method.md, "Recipe")."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cribo.base.errors import ConfigError
from cribo.objectives.config import OptimConfig


def make_optimiser(groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    """Return the optimiser of a configuration; schedules set its learning rates at every step."""
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, optim.beta2), fused=True)
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=optim.gradient_momentum, fused=True)
    from cribo.pretraining.lars import LARS

    return LARS(groups, momentum=optim.gradient_momentum)


def parameter_groups(
    trained: nn.Module, layer_decay: float = 1.0, lr_factors: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimiser, with the factors `lr_scale` and `decay` for the schedules.

    Weight decay is not applied to biases and other 1-D parameters; it is applied to [CLS], the position embedding
    and the weight-norm gain, which have more dimensions. With `layer_decay` below 1, the learning rate decreases from
    each block of the backbone to the previous one; the head has the full rate. `lr_factors` multiply the rates of
    parameters whose names begin with a prefix; the longest matching prefix applies.

    Raises:
        ConfigError: no parameter has one of the prefixes.
    """
    names = [name for name, _ in trained.named_parameters()]
    factors = dict(sorted((lr_factors or {}).items(), key=lambda item: len(item[0]), reverse=True))
    for prefix in factors:
        if not any(name.startswith(prefix) for name in names):
            parts = ", ".join(dict.fromkeys(f"{name.partition('.')[0]}." for name in names))
            raise ConfigError(
                f"optim.lr_factors {prefix!r} is not the beginning of a parameter's name: the names begin with {parts}"
            )
    layers = _layers([name for name in names if name.startswith("backbone.")])
    depth = max(layers.values(), default=0)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in trained.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = layer_decay ** (depth - layers[name]) if name in layers else 1.0
        scale *= next((factor for prefix, factor in factors.items() if name.startswith(prefix)), 1.0)
        groups.setdefault((scale, parameter.ndim > 1), []).append(parameter)
    return [
        {"params": parameters, "lr_scale": scale, "decay": float(decays)}
        for (scale, decays), parameters in sorted(groups.items(), key=lambda item: item[0])
    ]


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Remove gradients, so that the optimiser skips these parameters and creates no state for them."""
    for parameter in parameters:
        parameter.grad = None


@torch.no_grad()
def clip_each(gradients: list[Tensor], limit: float) -> None:
    """Clip the norm of each gradient tensor separately, without synchronising with the device."""
    if gradients:
        lengths = torch.stack(torch._foreach_norm(gradients))  # pyright: ignore[reportPrivateImportUsage]
        scales = (limit / (lengths + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, list(scales.unbind()))  # pyright: ignore[reportPrivateImportUsage]


# Names of blocks in timm's networks: blocks.3, stages.2.blocks.1, stages.2.downsample, layer4.0, ...
_BLOCK = re.compile(
    r".*?\b(?:(?:stages|layers)\.\d+\.blocks\.\d+|(?:stages|layers)\.\d+\.\w+|layer\d+\.\d+|blocks\.\d+)\b"
)


def block_names(names: Iterable[str]) -> list[str]:
    """Return the names of a network's blocks, from the names of its parameters.

    Example:
        >>> block_names(["cls_token", "blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.1.norm.weight"])
        ['blocks.0', 'blocks.1']
    """
    return list(dict.fromkeys(block[0] for name in names if (block := _BLOCK.match(name))))


def _layers(names: Sequence[str]) -> dict[str, int]:
    """Return the layer index of each parameter: 0 before the blocks, 1, 2, ... inside, and the next number after them.

    Names must be in the order of the network's layers.
    """
    blocks = {block: place for place, block in enumerate(block_names(names), start=1)}
    layers, begun = {}, False
    for name in names:
        block = _BLOCK.match(name)
        begun = begun or block is not None
        layers[name] = blocks[block[0]] if block else (len(blocks) + 1 if begun else 0)
    return layers
