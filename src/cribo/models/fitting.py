"""Fit recognised weights to a network, and load all or none of them."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from timm.models import Beit, VisionTransformer
from torch import Tensor

from cribo.base.errors import InputError
from cribo.models.backbone import Backbone
from cribo.models.channels import inflated
from cribo.models.formats.architecture import project_of_fixed_positions
from cribo.models.formats.recognised import Recognised
from cribo.models.formats.recognising import first_keys, required_keys
from cribo.models.numerics import Numerics
from cribo.models.positions import Resizing, resize_positions, resize_relative_positions


def original_resizing(recognised: Recognised) -> Resizing | None:
    """Return how the project that wrote the weights resizes positions; None if the project is unknown."""
    if recognised.numerics is not None:
        return recognised.numerics.positions
    if recognised.positions is not None:
        return recognised.positions
    state, resizing = recognised.state, recognised.expected.positions
    if resizing is None and "pos_embed" in state:
        side = math.isqrt(state["pos_embed"].shape[1])
        # Keys of a plain ViT do not show who trained it; a fixed position embedding does.
        project = project_of_fixed_positions(state["pos_embed"][:, -side * side :])
        return {"MAE": "bicubic", "MoCo v3": "timm", None: None}[project]
    # Networks with registers derive from DINOv2's, which resize as timm does.
    return "timm" if "reg_token" in state and resizing in ("bicubic", "bicubic_offset") else resizing


def fit(
    state: dict[str, Tensor], backbone: Backbone, source: str, numerics: Numerics
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Resize the position embedding, apply the checkpoint filter of timm's model family, and inflate the first layer.

    Also returns the names of resized tensors.
    """
    # Files of transformers store registers even if there are none.
    state = {key: value for key, value in state.items() if key != "reg_token" or value.numel()}
    shapes = {key: value.shape for key, value in state.items()}
    state = _with_resized_positions(state, backbone, numerics.positions)
    if numerics.relative_positions != "timm" and isinstance(backbone.model, Beit):
        state = _with_resized_biases(state, backbone, numerics.relative_positions)
    checkpoint_filter = getattr(sys.modules[type(backbone.model).__module__], "checkpoint_filter_fn", None)
    fitted = state
    if checkpoint_filter is not None:
        try:
            fitted = checkpoint_filter(dict(state), backbone.model)
        except Exception as error:  # filters fail in different ways on another family's file
            raise InputError(
                f"{source} does not fit {backbone.name}: timm's filter failed ({type(error).__name__}: {error})"
            ) from error
    fitted = inflated(fitted, backbone)
    resampled = (key for key, value in fitted.items() if key in shapes and shapes[key] != value.shape)
    return fitted, tuple(resampled)


def _with_resized_positions(state: dict[str, Tensor], backbone: Backbone, resizing: Resizing) -> dict[str, Tensor]:
    own = getattr(backbone.model, "pos_embed", None)
    if not (isinstance(own, Tensor) and "pos_embed" in state and isinstance(backbone.model, VisionTransformer | Beit)):
        return state
    is_without_prefix = getattr(backbone.model, "no_embed_class", False)
    prefix = 0 if is_without_prefix else backbone.model.num_prefix_tokens
    side = math.isqrt(max(state["pos_embed"].shape[1] - prefix, 0))
    if side == 0 or side * side + prefix != state["pos_embed"].shape[1]:
        return state  # timm's filter or the check of shapes will report it
    grid = backbone.model.patch_embed.grid_size
    resized = resize_positions(state["pos_embed"], (side, side), grid, resizing, prefix_tokens=prefix)
    return {**state, "pos_embed": resized}


def _with_resized_biases(
    state: dict[str, Tensor], backbone: Backbone, how: Literal["geometric_spline", "bilinear"]
) -> dict[str, Tensor]:
    grid = backbone.model.patch_embed.grid_size
    state = dict(state)
    for key in (key for key in state if key.endswith("relative_position_bias_table")):
        side = (math.isqrt(len(state[key]) - 3) + 1) // 2
        state[key] = resize_relative_positions(state[key], (side, side), grid, how)
    return state


def load_all_or_nothing(backbone: Backbone, state: Mapping[str, Tensor], source: str, keys: Sequence[str]) -> None:
    """Check every key, shape, type and value before loading; `keys` are the names in the file, for error messages."""
    own = backbone.model.state_dict()
    reshaped = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(own[key].shape)}"
        for key in own
        if key in state and state[key].shape != own[key].shape and key not in backbone.unused_parameters
    ]
    retyped = [
        f"{key} {_name(state[key].dtype)} instead of {_name(own[key].dtype)}"
        for key in own
        if key in state and key not in backbone.unused_parameters and not _are_alike(state[key], own[key])
    ]
    typed = [key for key in own if key in state and _are_alike(state[key], own[key])]
    unexpected = [_name_in_file(key, keys) for key in state if key not in own]
    problems = [
        f"{len(keys)} keys {what}: {first_keys(keys)}"
        for what, keys in (
            ("missing", sorted(required_keys(backbone) - state.keys(), key=list(own).index)),
            ("of a different shape", reshaped),
            ("of a different type", retyped),
            ("that are not finite", [key for key in typed if not _is_finite(state[key])]),
            ("unexpected", unexpected),
        )
        if keys
    ]
    if problems:
        arguments = f" with {backbone.args}" if backbone.args else ""
        way_out = ": skip them with --backbone.ignore PATTERN (ignore= in Python)" if unexpected else ""
        if retyped:
            way_out = (
                ": the weights are quantised; dequantise them with the library that wrote them, and save its state "
                "dict as floating-point numbers"
            )
        raise InputError(
            f"{source} does not fit {backbone.name}{arguments}; nothing was loaded; {'; '.join(problems)}{way_out}"
        )
    usable = {key: state[key] for key in own if key in state and state[key].shape == own[key].shape}
    backbone.model.load_state_dict({**own, **usable})


def _are_alike(value: Tensor, own: Tensor) -> bool:
    """Whether numbers can be converted to the type of a network's: counters of batch norm may be of any type."""
    return value.dtype in _FLOATS if own.is_floating_point() else own.ndim == 0 or not value.is_floating_point()


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_finite(value: Tensor) -> bool:
    """Whether all values are finite. The sum is checked first: it takes a tenth of the time, but may overflow."""
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def _name_in_file(key: str, keys: Sequence[str]) -> str:
    return next((name for name in keys if name.endswith(key)), key)
