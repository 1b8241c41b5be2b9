"""LoRA (Hu et al. 2021): train low-rank additions to the weights of a backbone's linear layers, with peft.

Only the student has adapters. The teacher is a plain copy that follows the student's merged weights, so a run scores
and exports a plain network.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cribo.base.errors import InputError, MissingPackage
from cribo.base.packages import install_command
from cribo.models.backbone import Backbone

Module = TypeVar("Module", bound=nn.Module)

_BLOCK_LINEAR = re.compile(r"(?:.*\.)?blocks\.(\d+)\.(?:attn|mlp)\..+")


def add_adapters(backbone: Backbone, rank: int, *, first_block: int = 0, seed: int = 0) -> None:
    """Add adapters to the linear layers of a backbone's attention and MLPs, in place, and freeze everything else.

    A layer W becomes W + B A; B is initially 0, so features do not change.

    Args:
        backbone: network of any family whose blocks have linear layers.
        rank: number of rows of A; 1 to the width of the narrowest layer.
        first_block: blocks before this one get no adapters; only for networks with one sequence of blocks.
        seed: seed of A, which is random.

    Raises:
        ValueError: the network has no such layers, or the rank is out of range.
        ImportError: peft is not installed.
    """
    layers = _linear_layers(backbone, first_block)
    if not layers:
        raise InputError(
            f"LoRA requires linear layers, {backbone.name} has none in its blocks: train all of its weights, or use a "
            "vision transformer"
        )
    width = min(min(layer.in_features, layer.out_features) for layer in layers.values())
    if not 1 <= rank <= width:
        raise InputError(f"the rank must be 1 to {width}, the width of {backbone.name}, got {rank}")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingPackage(f"LoRA requires peft ({error}): {install_command('lora')}") from error
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules="|".join(map(re.escape, layers)))
        inject_adapter_in_model(config, backbone.model)


def plain_copy(module: Module) -> Module:
    """Return a copy of a module with its adapters merged into the weights."""
    plain = copy.deepcopy(module)
    for name, layer in list(_adapted_layers(plain)):
        layer.merge()
        plain.set_submodule(name, layer.get_base_layer())
    return plain


def merged_parameters(module: nn.Module) -> list[Tensor]:
    """Return the parameters of `plain_copy(module)`, in the same order."""
    merged: dict[int, Tensor] = {}
    for _, layer in _adapted_layers(module):
        weight = layer.get_base_layer().weight
        merged[id(weight)] = weight + layer.get_delta_weight("default")
    return [merged.get(id(value), value) for name, value in module.named_parameters() if ".lora_" not in name]


def has_adapters(module: nn.Module) -> bool:
    """Whether `add_adapters` was called on a backbone inside the module."""
    return any(True for _ in _adapted_layers(module))


def _adapted_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, layer) for name, layer in module.named_modules() if hasattr(layer, "lora_A"))


def _linear_layers(backbone: Backbone, first_block: int) -> dict[str, nn.Linear]:
    """Return the linear layers of attention and MLPs from a block on, by name.

    Layers that are never called (the qkv of BEiT) are excluded: an adapter would have no effect.
    """
    called: set[str] = set()
    found: dict[str, nn.Linear] = {}
    hooks = []
    for name, layer in backbone.model.named_modules():
        match = _BLOCK_LINEAR.fullmatch(name)
        if isinstance(layer, nn.Linear) and match and int(match[1]) >= first_block:
            found[name] = layer
            hooks.append(layer.register_forward_pre_hook(lambda *_, name=name: called.add(name)))
    try:
        backbone.encode_blank()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: layer for name, layer in found.items() if name in called}
