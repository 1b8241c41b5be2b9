"""Parameter groups, frozen parts, gradient clipping (docs/method.md, "Recipe")."""

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


def parameter_groups(trained: nn.Module, layer_decay: float = 1.0) -> list[dict[str, object]]:
    """Return parameter groups for AdamW, with the factors `lr_scale` and `decay` for the schedules.

    Weight decay is not applied to biases and other 1-D parameters; it is applied to [CLS], the position embedding
    and the weight-norm gain, which have more dimensions. With `layer_decay` below 1, the learning rate decreases from
    each block of the backbone to the previous one; the head has the full rate.
    """
    layers = _layers([name for name, _ in trained.named_parameters() if name.startswith("backbone.")])
    depth = max(layers.values(), default=0)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in trained.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = layer_decay ** (depth - layers[name]) if name in layers else 1.0
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
