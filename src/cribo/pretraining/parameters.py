"""Parameter groups, frozen parts, gradient clipping (docs/method.md, "Recipe"), and statistics of batch norms."""

import re
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cribo.pretraining.config import OptimConfig
from cribo.pretraining.network import Network
from cribo.pretraining.shares import held


def parameter_groups(student: Network, config: OptimConfig) -> list[dict[str, object]]:
    """Groups for AdamW, each with `lr_scale` and `decay`, which the schedules are multiplied with.

    Biases and other 1-D parameters do not decay. [CLS], the position embedding and the weight-norm gain do:
    they have more than one dimension. With `layer_decay` below 1 the learning rate falls from each block of the
    backbone to the one below; the head has the full rate.
    """
    layers = _layers([name for name, _ in student.backbone.named_parameters()])
    depth = max(layers.values())
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in student.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = 1.0
        if name.startswith("backbone."):
            scale = config.layer_decay ** (depth - layers[name.removeprefix("backbone.")])
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
def clip_each(gradients: list[Tensor], lengths: Float[Tensor, " n"], limit: float) -> None:
    """Scale each gradient tensor whose own norm exceeds `limit` down to it, without waiting for the device.

    Args:
        gradients: at least one; of those that devices share, each scales its part.
        lengths: their norms (`shares.norms`).
        limit: the largest norm.
    """
    scales = (limit / (lengths + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(  # pyright: ignore[reportPrivateImportUsage]
        [held(gradient) for gradient in gradients], list(scales.unbind())
    )


class RunningStatistics:
    """The running mean and variance of all batch norms of some modules, which can be put back to where they were.

    Nothing waits for the device.

    Args:
        modules: searched for batch norms.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        layers = [m for module in modules for m in module.modules() if isinstance(m, _BatchNorm)]
        self._now = [t for m in layers for t in (m.running_mean, m.running_var) if t is not None]
        self._before: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Remember them as they are."""
        self._before = [values.clone() for values in self._now]

    @torch.no_grad()
    def put_back(self, condition: Tensor) -> None:
        """Put them back where a condition, a boolean scalar on the device, is true."""
        for values, before in zip(self._now, self._before, strict=True):
            values.copy_(torch.where(condition, before, values))


# What timm's networks call their blocks: blocks.3, stages.2.blocks.1, stages.2.downsample, layer4.0, ...
_BLOCK = re.compile(
    r".*?\b(?:(?:stages|layers)\.\d+\.blocks\.\d+|(?:stages|layers)\.\d+\.\w+|layer\d+\.\d+|blocks\.\d+)\b"
)


def block_names(names: Iterable[str]) -> list[str]:
    """The blocks that some parameters of a network belong to, by name, each once.

    Example:
        >>> block_names(["cls_token", "blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.1.norm.weight"])
        ['blocks.0', 'blocks.1']
    """
    return list(dict.fromkeys(block[0] for name in names if (block := _BLOCK.match(name))))


def _layers(names: Sequence[str]) -> dict[str, int]:
    """Each parameter's place: 0 before the blocks, 1, 2, ... inside, the next number after them.

    Parameters are named in the order in which they are used.
    """
    blocks = {block: place for place, block in enumerate(block_names(names), start=1)}
    layers, begun = {}, False
    for name in names:
        block = _BLOCK.match(name)
        begun = begun or block is not None
        layers[name] = blocks[block[0]] if block else (len(blocks) + 1 if begun else 0)
    return layers
