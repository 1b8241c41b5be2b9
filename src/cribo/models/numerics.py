"""Arithmetic in which networks of the same architecture differ from project to project."""

from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from timm.layers.pos_embed_sincos import RotaryEmbeddingDinoV3
from timm.models import ResNet, VisionTransformer
from timm.models.swin_transformer import SwinTransformerBlock
from torch import nn

from cribo.errors import InputError
from cribo.models.positions import RESIZINGS, RelativeResizing, Resizing, Windows, attend_in_windows, embed_positions


@dataclass(frozen=True)
class Numerics:
    """Arithmetic that weights expect and timm's constructor has no argument for (or none that JSON holds).

    Attributes:
        norm_eps: epsilon of every layer norm; None: the one that timm gives the network.
        final_norm_eps: epsilon of the last layer norm, where it differs.
        positions: how the position embedding is resized to images of another size.
        rope_periods: of DINOv3's rotary embedding; None: computed. Released files hold them rounded to bfloat16.
        rope_coordinates: how DINOv3's rotary embedding scales the places of patches: each side to [-1, 1]
            (`separate`), or both by the longer (`max`) or the shorter (`min`) one.
        dilate_entries: whether the first block of a ResNet's dilated stage is dilated as its others are (SlotCon,
            PixPro); timm and torchvision dilate it as the stage before.
        windows: how Swin pads and shifts its windows.
        relative_positions: how the position biases of BEiT are resized.

    Raises:
        ValueError: an unknown way to resize or to scale.
    """

    norm_eps: float | None = None
    final_norm_eps: float | None = None
    positions: Resizing = "timm"
    rope_periods: tuple[float, ...] | None = None
    rope_coordinates: Literal["separate", "max", "min"] = "separate"
    dilate_entries: bool = False
    windows: Windows = "timm"
    relative_positions: RelativeResizing = "timm"

    def __post_init__(self) -> None:
        if self.positions not in RESIZINGS:
            raise InputError(f"positions must be one of {', '.join(RESIZINGS)}, got {self.positions!r}")
        if self.rope_coordinates not in ("separate", "max", "min"):
            raise InputError(f"rope_coordinates must be separate, max or min, got {self.rope_coordinates!r}")


_FINAL_NORMS = ("norm", "fc_norm", "head.norm")


def norm_epsilons(model: nn.Module) -> dict[str, float]:
    """Epsilon of each layer norm of a network, by its name."""
    return {name: norm.eps for name, norm in model.named_modules() if isinstance(norm, nn.LayerNorm)}


def apply_numerics(model: Any, numerics: Numerics, *, before: Numerics, own_epsilons: dict[str, float]) -> None:
    """Have a network compute as its weights expect; position biases of BEiT aside.

    Args:
        model: a network of timm, changed in place.
        numerics: what its weights expect.
        before: how it has computed so far.
        own_epsilons: `norm_epsilons` of the network as timm built it.

    Raises:
        ValueError: periods or coordinates for a network without DINOv3's rotary embedding, or of another length.
    """
    _set_rope(model, numerics)
    for name, own in own_epsilons.items():
        given = numerics.norm_eps
        if name in _FINAL_NORMS and numerics.final_norm_eps is not None:
            given = numerics.final_norm_eps
        model.get_submodule(name).eps = own if given is None else given
    if isinstance(model, VisionTransformer):
        _replace_method(model, "_pos_embed", embed_positions if numerics.positions != "timm" else None)
        vars(model)["position_resizing"] = numerics.positions
    for block in (each for each in model.modules() if isinstance(each, SwinTransformerBlock)):
        _replace_method(block, "_attn", attend_in_windows if numerics.windows == "original" else None)
    if isinstance(model, ResNet) and numerics.dilate_entries != before.dilate_entries:
        _set_entry_dilations(model, as_others=numerics.dilate_entries)


def _replace_method(module: nn.Module, name: str, function: Any) -> None:
    """Replace a method of one object; None restores the method of its class."""
    vars(module).pop(name, None)
    if function is not None:
        vars(module)[name] = MethodType(function, module)


def _set_rope(model: Any, numerics: Numerics) -> None:
    rope: Any = getattr(model, "rope", None)
    if not isinstance(rope, RotaryEmbeddingDinoV3):
        if numerics.rope_periods is not None or numerics.rope_coordinates != "separate":
            raise InputError(
                f"{type(model).__name__} has no rotary embedding of DINOv3, got rope_periods or rope_coordinates"
            )
        return
    periods, count = numerics.rope_periods, rope.dim // 4
    if periods is not None and len(periods) != count:
        raise InputError(
            f"rope_periods must be {count} numbers, one for every four channels of a head, got {len(periods)}"
        )
    vars(rope).pop("_compute_periods", None)
    if periods is not None:
        vars(rope)["_compute_periods"] = partial(torch.tensor, periods)
    rope.normalize_coords = numerics.rope_coordinates
    rope.init_non_persistent_buffers()


def _set_entry_dilations(model: Any, *, as_others: bool) -> None:
    """Dilate the first block of each stage as the stage's other blocks, or as the stage before."""
    dilation = 1
    for stage in (model.layer2, model.layer3, model.layer4):
        convolution = next(part for part in stage[0].modules() if getattr(part, "kernel_size", None) == (3, 3))
        before, dilation = dilation, dilation * (2 // convolution.stride[0])
        convolution.dilation = convolution.padding = (dilation if as_others else before,) * 2
