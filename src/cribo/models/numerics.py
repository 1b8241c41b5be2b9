"""Numerical details in which projects differ for the same architecture."""

from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from timm.layers.pos_embed_sincos import RotaryEmbeddingDinoV3
from timm.models import ResNet, VisionTransformer
from timm.models.swin_transformer import SwinTransformerBlock
from torch import nn

from cribo.base.errors import InputError
from cribo.models.positions import RESIZINGS, RelativeResizing, Resizing, Windows, attend_in_windows, embed_positions


@dataclass(frozen=True)
class Numerics:
    """Numerics that weights expect and that timm's constructor has no (JSON-serialisable) argument for.

    Attributes:
        norm_eps: epsilon of every layer norm; timm's by default.
        final_norm_eps: epsilon of the last layer norm, if different.
        positions: method of resizing the position embedding to other image sizes.
        rope_periods: periods of DINOv3's rotary embedding; computed by default. Released files contain them rounded to
            bfloat16.
        rope_coordinates: scaling of patch coordinates in DINOv3's rotary embedding: each side to [-1, 1] (`separate`),
            or both by the longer (`max`) or the shorter (`min`) one.
        dilate_entries: whether the first block of a dilated ResNet stage has the dilation of the stage's other blocks
            (SlotCon, PixPro) rather than that of the previous stage (timm, torchvision).
        windows: padding and shifting of Swin's windows.
        relative_positions: method of resizing BEiT's position biases.

    Raises:
        ValueError: unknown method of resizing or scaling.
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
    """Return the epsilon of each layer norm of a network, by name."""
    return {name: norm.eps for name, norm in model.named_modules() if isinstance(norm, nn.LayerNorm)}


def apply_numerics(model: Any, numerics: Numerics, *, before: Numerics, own_epsilons: dict[str, float]) -> None:
    """Set the numerics of a network of timm in place, except for BEiT's position biases.

    `own_epsilons` are the `norm_epsilons` of the network as built by timm.

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
    """Dilate the first block of each stage like the stage's other blocks, or like the previous stage."""
    dilation = 1
    for stage in (model.layer2, model.layer3, model.layer4):
        convolution = next(part for part in stage[0].modules() if getattr(part, "kernel_size", None) == (3, 3))
        before, dilation = dilation, dilation * (2 // convolution.stride[0])
        convolution.dilation = convolution.padding = (dilation if as_others else before,) * 2
