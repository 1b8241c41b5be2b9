"""Infer the timm architecture of weights from the names and shapes of their tensors.

The values of timm's networks are rows of `architectures.yaml`; a function of each family reads them from shapes.
"""

import math
import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, Literal, NamedTuple

import timm
import torch
import yaml
from jaxtyping import Float
from torch import Tensor

from cribo.base.errors import InputError
from cribo.models import networks

# The size at which nearly all networks without a position embedding were trained.
_USUAL_SIZE = 224


class Architecture(NamedTuple):
    """Arguments that build the network of some weights.

    Attributes:
        name: timm's name.
        args: `args` of `build_backbone`.
        image_size: size of the position embedding in pixels.
        notes: assumptions, for the user.
    """

    name: str
    args: dict[str, Any]
    image_size: int
    notes: tuple[str, ...] = ()


class _Known(NamedTuple):
    """What weights do not show: the arguments of `infer_architecture`."""

    heads: Mapping[int, int]
    num_heads: int | None
    act_layer: str | None
    assumed_act_layer: str | None
    output_stride: int | None


class _Family(NamedTuple):
    """Networks of timm with the same arguments; a row of `architectures.yaml`, which explains the fields."""

    match: tuple[str, ...]
    names: Mapping[str, Mapping[str, Any]]
    usual: Mapping[str, Any]
    other: Mapping[str, Any]
    heads: Mapping[int, int]

    def named(self, found: Mapping[str, Any]) -> str | None:
        """Return the name of the network with these values; None if there is none."""
        rows = self.names.items()
        return next((name for name, row in rows if all(row[key] == found[key] for key in self.match)), None)

    def closest(self, found: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return a name, and the values that differ from its own."""
        name = self.named(found)
        usual = {**self.usual, **(self.other if name is None else self.names[name])}
        return name or self.other["name"], _differing(found, usual)


def _differing(found: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in usual or usual[key] != value}


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tuples(inner) for key, inner in value.items()}
    return tuple(value) if isinstance(value, list) else value


_FILE = (resources.files("cribo.models.formats") / "architectures.yaml").read_text(encoding="utf-8")
_DEFAULTS: dict[str, Any] = {"usual": {}, "heads": {}}
_FAMILIES = {name: _Family(**{**_DEFAULTS, **row}) for name, row in _with_tuples(yaml.safe_load(_FILE)).items()}


def infer_architecture(
    state: Mapping[str, Tensor],
    *,
    heads: Mapping[int, int] | None = None,
    num_heads: int | None = None,
    act_layer: str | None = None,
    assumed_act_layer: str | None = None,
    output_stride: int | None = None,
) -> Architecture:
    """Infer the network that has these weights.

    Args:
        state: tensors under timm's keys: a vision transformer (with a learned or fixed position embedding), a DINOv3
            vision transformer, a ResNet, a ConvNeXt or a Swin transformer; or XCiT, CAPI, and MoCo v3's convolutional
            stem under their own.
        heads: number of attention heads by width, preferred to the usual ones; weights do not show it.
        num_heads: number of attention heads, if known.
        act_layer: activation of the MLPs, if known.
        assumed_act_layer: activation to assume if `act_layer` is not known.
        output_stride: output stride of a ResNet, if known: 8, 16 or 32; weights do not show it.

    Raises:
        ValueError: the weights are of another kind of network, or an argument that they do not show is unknown.

    Example:
        >>> import timm
        >>> infer_architecture(timm.create_model("vit_base_patch32_224", num_classes=0).state_dict())[:3]
        ('vit_base_patch32_224', {}, 224)
    """
    known = _Known(heads or {}, num_heads, act_layer, assumed_act_layer, output_stride)
    for patterns, read in _READERS:
        if all(any(re.search(pattern, key) for key in state) for pattern in patterns):
            found = read(state, known)
            channels = next(state[key].shape[1] for key in _FIRST_LAYERS if key in state)
            return found if channels == 3 else found._replace(args={**found.args, "in_chans": channels})
    raise InputError(
        "these are not weights of a vision transformer with a position embedding, DINOv3, Swin, ConvNeXt or ResNet: "
        "give the timm name of their architecture"
    )


# ------------------------------------------------------------------------------------------- vision transformers


def _vit(state: Mapping[str, Tensor], known: _Known) -> Architecture:
    notes: tuple[str, ...] = ()
    if known.act_layer is None and known.assumed_act_layer is not None:
        known = known._replace(act_layer=known.assumed_act_layer)
        notes = (_ACTIVATION_NOTE.format(known.act_layer),)
    if "norm_pre.weight" in state and known.act_layer is None:
        raise InputError(
            "the weights have a norm before the first block, as in CLIP, and do not show the activation of their "
            "MLPs: give the timm name of their architecture, such as vit_base_patch16_clip_quickgelu_224, or "
            "args={'act_layer': 'gelu'} or 'quick_gelu'"
        )
    dim, patch_size, depth = _transformer_shape(state)
    hidden = len(state["blocks.0.mlp.fc1.weight"])
    is_gated = state["blocks.0.mlp.fc2.weight"].shape[1] * 2 == hidden
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    grid, no_embed_class = _grid(state["pos_embed"].shape[1], int("cls_token" in state) + registers)
    found = {
        "patch_size": patch_size,
        "embed_dim": dim,
        "depth": depth,
        "mlp_ratio": _ratio(hidden, dim),
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "qk_norm": "blocks.0.attn.q_norm.weight" in state,
        "init_values": 1e-5 if "blocks.0.ls1.gamma" in state else None,
        "class_token": "cls_token" in state,
        "reg_tokens": registers,
        "no_embed_class": no_embed_class,
        "pre_norm": "norm_pre.weight" in state,
    }
    if "attn_pool.latent" in state:
        found["global_pool"] = "map"
    elif not found["class_token"] or "fc_norm.weight" in state:
        # Networks with average pooling may have their last norm after it.
        found |= {"global_pool": "avg", "fc_norm": "fc_norm.weight" in state}
    if "norm.weight" not in state and "fc_norm.weight" not in state:
        found["final_norm"] = False
    given = {key: value for key in ("num_heads", "act_layer") if (value := getattr(known, key)) is not None}
    if known.num_heads is None:
        given["num_heads"] = known.heads.get(dim) or _FAMILIES["vit"].heads.get(dim)
        if given["num_heads"] is None:
            given["num_heads"], head_notes = _guess_heads(dim)
            notes += head_notes
        elif dim == _MOCO_WIDTH and project_of_fixed_positions(state["pos_embed"][:, -grid * grid :]) == "MoCo v3":
            given["num_heads"] = 12
            notes += () if known.heads else (_MOCO_NOTE,)
    found |= given
    name, usual = _vit_name(found, hidden, is_gated)
    args = _differing(found, {**_FAMILIES["vit"].usual, **usual})
    return Architecture(name, args, grid * patch_size, (*notes, *_depth_notes(dim, depth)))


_ACTIVATION_NOTE = (
    "weights do not show the activation of their MLPs: assumed {}; if it is another, give args={{'act_layer': ...}} "
    "(gelu, quick_gelu, gelu_tanh)"
)


def _vit_name(found: Mapping[str, Any], hidden: int, is_gated: bool) -> tuple[str, Mapping[str, Any]]:
    """Return the timm name closest to the values found, and that name's own values."""
    family, dim, patch_size = _FAMILIES["vit"], found["embed_dim"], found["patch_size"]
    registers = {"reg_tokens": 4, "no_embed_class": True} if found["reg_tokens"] else {}
    middle = "patch14_reg4_dinov2" if registers else "patch14_dinov2"
    if is_gated:
        # Only this name has a gated MLP; its ratio is written in timm with five digits.
        usual = {"patch_size": 14, "embed_dim": 1536, "depth": 40, "num_heads": 24, "init_values": 1e-5, **registers}
        usual["mlp_ratio"] = found["mlp_ratio"] if (dim, hidden) == (1536, 8192) else None
        return f"vit_giant_{middle}", usual
    size = family.named(found) if hidden == 4 * dim else None
    if size is None:
        return family.other["name"], family.other
    usual = {key: found[key] for key in ("embed_dim", "depth", "mlp_ratio")} | {"num_heads": family.heads[dim]}
    if size in ("small", "base", "large") and patch_size == 14 and found["init_values"]:
        return f"vit_{size}_{middle}", {**usual, "patch_size": 14, "init_values": 1e-5, **registers}
    patches = family.names[size]["patches"]
    nearest = patch_size if patch_size in patches else 16 if 16 in patches else patches[0]
    return f"vit_{size}_patch{nearest}_224", {**usual, "patch_size": nearest}


def _depth_notes(dim: int, depth: int) -> tuple[str, ...]:
    usual = sorted({row["depth"] for row in _FAMILIES["vit"].names.values() if row["embed_dim"] == dim})
    if not usual or depth in usual:
        return ()
    return (f"the file has {depth} blocks, networks of this width usually {usual[0]}: check that it is complete",)


# After MoCo v3's converter to DeiT's names, only the fixed positions identify MoCo v3.
_MOCO_WIDTH = 384
_MOCO_NOTE = "assumed the 12 attention heads of MoCo v3's ViT-S, because the positions are its fixed sines and cosines"


def project_of_fixed_positions(positions: Float[Tensor, "1 n d"]) -> Literal["MoCo v3", "MAE"] | None:
    """Return the project whose fixed sine-cosine positions these are; None for a learned embedding.

    MoCo v3 (vits.py) fills the first half of the channels by row, MAE (util/pos_embed.py) by column.

    Args:
        positions: (1, N, D) of a square grid, without prefix tokens.
    """
    side, quarter = math.isqrt(positions.shape[1]), positions.shape[2] // 4
    if positions.is_meta or side < 2 or positions.shape[2] != 4 * quarter:
        return None
    angles = torch.arange(side)[:, None] * 10_000.0 ** (-torch.arange(quarter) / quarter)
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    by_row, by_column = waves.repeat_interleave(side, dim=0), waves.repeat(side, 1)
    if torch.allclose(positions[0].float(), torch.cat([by_row, by_column], dim=1), atol=1e-3):
        return "MoCo v3"
    return "MAE" if torch.allclose(positions[0].float(), torch.cat([by_column, by_row], dim=1), atol=1e-3) else None


def _dinov3(state: Mapping[str, Tensor], known: _Known) -> Architecture:
    dim, patch_size, depth = _transformer_shape(state)
    family = _FAMILIES["gated dinov3" if "blocks.0.mlp.fc1_g.weight" in state else "dinov3"]
    notes: tuple[str, ...] = ()
    num_heads = known.num_heads or family.heads.get(dim)
    if num_heads is None:
        num_heads, notes = _guess_heads(dim)
    found = {
        "patch_size": patch_size,
        "num_reg_tokens": state["reg_token"].shape[1] if "reg_token" in state else 0,
        "embed_dim": dim,
        "depth": depth,
        "num_heads": num_heads,
        "mlp_ratio": _ratio(state["blocks.0.mlp.fc2.weight"].shape[1], dim),
    }
    name, args = family.closest(found)
    if family.named(found) is not None and num_heads == family.heads[dim]:
        del args["num_heads"]
    if "blocks.0.attn.qkv.bias" in state:  # a bias of the keys, too, which timm's usual attention of this name lacks
        args |= {"attn_type": "rope", "qkv_bias": True}
    has_bias = "blocks.0.attn.q_bias" in state
    if not timm.is_model(_DINOV3_NAMES[has_bias].format(name)):  # timm has two of them in one form only
        args["qkv_bias"], has_bias = has_bias, not has_bias
    size = _USUAL_SIZE // patch_size * patch_size
    return Architecture(_DINOV3_NAMES[has_bias].format(name), args, size, (*notes, *_depth_notes(dim, depth)))


_DINOV3_NAMES = {True: "{}_qkvb", False: "{}"}  # with a bias of queries and values, and without


def _conv_stem_vit(state: Mapping[str, Tensor], known: _Known) -> Architecture:
    """MoCo v3's stem: four convolutions of stride 2, for patches of 16 pixels."""
    plain = {key: value for key, value in state.items() if not key.startswith("patch_embed.proj.")}
    dim = len(state["patch_embed.proj.12.weight"])
    plain["patch_embed.proj.weight"] = torch.empty(dim, 3, 16, 16, device="meta")
    found = _vit(plain, known)
    args = {"name": found.name, "size": found.image_size, **found.args}
    # It has one block fewer than networks without the stem.
    notes = tuple(note for note in found.notes if "check that it is complete" not in note)
    return Architecture(f"{networks.__name__}.vit_with_convolutional_stem", args, found.image_size, notes)


def _capi(state: Mapping[str, Tensor], known: _Known) -> Architecture:
    if "encoder.blocks.0.residual1.norm.bias" in state:
        raise InputError("a CAPI network with layer norms instead of its RMS norms cannot be built")
    patches = state["patch_embed.weight"]
    dim, depth, patch_size = len(patches), _count(state, r"encoder\.blocks"), patches.shape[-1]
    channels = state["encoder.blocks.0.residual1.fn.rope.freqs"].shape[1]
    args = {"dim": dim, "depth": depth, "heads": dim // channels, "patch_size": patch_size}
    args["registers"] = state["registers"].shape[1]
    note = "the global token is the mean of the patch tokens; CAPI's own is the mean of its predictor's output"
    notes = (note, *_depth_notes(dim, depth))
    return Architecture(f"{networks.__name__}.Capi", args, _USUAL_SIZE // patch_size * patch_size, notes)


def _xcit(state: Mapping[str, Tensor], known: _Known) -> Architecture:
    patch_size = 2 ** len({key.split(".")[2] for key in state if re.match(r"patch_embed\.proj\.\d+\.0\.weight", key)})
    found = {
        "embed_dim": state["cls_token"].shape[-1],
        "depth": _count(state, "blocks"),
        "num_heads": len(state["blocks.0.attn.temperature"]),
    }
    name, args = _FAMILIES["xcit"].closest(found)
    note = (
        "weights do not show whether XCiT's last blocks normalise all tokens: assumed that they do, as in all but its "
        "smallest network; if not, give args={'tokens_norm': False}"
    )
    notes = (note,) if _FAMILIES["xcit"].named(found) is None else ()
    return Architecture(f"{name}_p{patch_size}_224", args, _USUAL_SIZE, notes)


def _beit(state: Mapping[str, Tensor], known: _Known) -> Architecture:
    dim, patch_size, depth = _transformer_shape(state)
    _check_activation("BEiT", known, "gelu")
    table = next(value for key, value in state.items() if key.endswith("relative_position_bias_table"))
    found = {
        "patch_size": patch_size,
        "embed_dim": dim,
        "depth": depth,
        "num_heads": table.shape[1],
        "mlp_ratio": _ratio(len(state["blocks.0.mlp.fc1.weight"]), dim),
        "qkv_bias": "blocks.0.attn.q_bias" in state,
        "init_values": 0.1 if "blocks.0.gamma_1" in state else None,
        "use_abs_pos_emb": "pos_embed" in state,
        "use_rel_pos_bias": "blocks.0.attn.relative_position_bias_table" in state,
        "use_shared_rel_pos_bias": "rel_pos_bias.relative_position_bias_table" in state,
        "use_fc_norm": "fc_norm.weight" in state,
    }
    side = (math.isqrt(len(table) - 3) + 1) // 2
    if (2 * side - 1) ** 2 + 3 != len(table):
        raise InputError(f"a table of {len(table)} position biases does not fit a square image")
    note = "the global token is the norm of the mean of the tokens, as the file has no norm of [CLS]"
    notes = (*((note,) if found["use_fc_norm"] else ()), *_depth_notes(dim, depth))
    return Architecture(*_FAMILIES["beit"].closest(found), side * patch_size, notes)


# ---------------------------------------------------------------------------------------------------- feature maps


def _resnet(state: Mapping[str, Tensor], known: _Known) -> Architecture:
    _check_activation("ResNet", known, "relu")
    layers = tuple(_count(state, rf"layer{stage}") for stage in range(1, 5))
    is_bottleneck = "layer1.0.conv3.weight" in state
    stages = [stage for stage in range(1, 5) if layers[stage - 1]]
    last, expansion = ("conv3", 4) if is_bottleneck else ("conv2", 1)
    channels = tuple(len(state[f"layer{stage}.0.{last}.weight"]) // expansion for stage in stages)
    family = _FAMILIES["bottleneck resnet" if is_bottleneck else "basic resnet"]
    found: dict[str, Any] = {"layers": layers}
    if channels != family.usual["channels"][: len(channels)]:
        found["channels"] = channels
    if is_bottleneck:
        # ResNeXt divides the inner convolution into groups, wide networks widen it.
        inner = len(state["layer1.0.conv1.weight"])
        found["cardinality"] = inner // state["layer1.0.conv2.weight"].shape[1]
        found["base_width"] = inner * 64 // (channels[0] * found["cardinality"])
    name, args = family.closest(found)
    notes: tuple[str, ...] = ()
    if family.named(found) is None:
        counts = ", ".join(map(str, layers))
        notes = (f"the file's stages have {counts} blocks, which no usual ResNet has: check that it is complete",)
    if known.output_stride not in (None, 32):
        args["output_stride"] = known.output_stride
    # ResNet-D has average pooling before the convolution of a shortcut.
    if getattr(state.get(f"layer{stages[-1]}.0.downsample.1.weight"), "ndim", 1) == 4:
        args["avg_down"] = True
        if "output_stride" in args:
            raise InputError("timm's dilated ResNet-D has average pooling in its shortcuts, MMSegmentation's does not")
    if "conv1.0.weight" in state:  # ResNet-C and -D: three convolutions
        first, second = len(state["conv1.0.weight"]), len(state["conv1.3.weight"])
        args |= {"stem_type": "deep" if first == second else "deep_tiered", "stem_width": second}
    elif (stem_channels := len(state["conv1.weight"])) != 64:
        args = {"name": name, "stem_channels": stem_channels, **args}
        name = f"{networks.__name__}.resnet_with_stem"
    return Architecture(name, args, _USUAL_SIZE, notes)


def _convnext(state: Mapping[str, Tensor], known: _Known) -> Architecture:
    if state["stem.1.weight"].ndim != 1:
        raise InputError("the stem has overlapping convolutions: give the timm name, such as convnext_atto_ols")
    depths = tuple(_count(state, rf"stages\.{stage}\.blocks") for stage in range(_count(state, "stages")))
    block = "stages.0.blocks.0"
    found = {
        "depths": depths,
        "dims": tuple(len(state[f"stages.{stage}.blocks.0.conv_dw.weight"]) for stage in range(len(depths))),
        "patch_size": state["stem.0.weight"].shape[-1],
        "kernel_sizes": state[f"{block}.conv_dw.weight"].shape[-1],
        "conv_mlp": state[f"{block}.mlp.fc1.weight"].ndim == 4,
        "conv_bias": f"{block}.conv_dw.bias" in state,
        "ls_init_value": 1e-6 if f"{block}.gamma" in state else None,
        "head_norm_first": "norm_pre.weight" in state,
        "act_layer": known.act_layer or "gelu",
    }
    family = _FAMILIES["convnextv2" if f"{block}.mlp.grn.weight" in state else "convnext"]
    return Architecture(*family.closest(found), _USUAL_SIZE)


def _swin(state: Mapping[str, Tensor], known: _Known) -> Architecture:
    _check_activation("Swin transformer", known, "gelu")
    depths = tuple(_count(state, rf"layers\.{stage}\.blocks") for stage in range(_count(state, "layers")))
    tables = [state[f"layers.{stage}.blocks.0.attn.relative_position_bias_table"] for stage in range(len(depths))]
    windows = {(math.isqrt(len(table)) + 1) // 2 for table in tables}
    if len(windows) > 1:
        raise InputError(f"the windows of the stages differ, {sorted(windows)}: give the timm name of the architecture")
    window, (dim, _, _, patch_size) = windows.pop(), state["patch_embed.proj.weight"].shape
    found = {
        "patch_size": patch_size,
        "embed_dim": dim,
        "depths": depths,
        "num_heads": tuple(table.shape[1] for table in tables),
        "window_size": window,
        "mlp_ratio": _ratio(len(state["layers.0.blocks.0.mlp.fc1.weight"]), dim),
        "qkv_bias": "layers.0.blocks.0.attn.qkv.bias" in state,
    }
    # In the original's training, the map of the last stage is as large as a window.
    return Architecture(*_FAMILIES["swin"].closest(found), patch_size * 2 ** (len(depths) - 1) * window)


_READERS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Tensor], _Known], Architecture]], ...] = (
    ((r"^layer1\.0\.conv1\.weight$",), _resnet),
    ((r"^stages\.0\.blocks\.0\.conv_dw\.weight$",), _convnext),
    ((r"^layers\.0\.blocks\.0\.attn\.relative_position_bias_table$",), _swin),
    ((r"relative_position_bias_table$", r"^blocks\.0\.norm1\.weight$"), _beit),
    ((r"^encoder\.blocks\.0\.residual1\.fn\.rope\.freqs$",), _capi),
    ((r"^cls_attn_blocks\.0\.norm1\.weight$",), _xcit),
    ((r"^patch_embed\.proj\.12\.weight$",), _conv_stem_vit),
    ((r"^blocks\.0\.norm1\.weight$", r"^pos_embed$"), _vit),
    ((r"^blocks\.0\.gamma_1$",), _dinov3),
)
"""Keys that identify a family, and the function that reads its values from shapes; the first that matches is taken."""

_FIRST_LAYERS = (
    "patch_embed.proj.weight",
    "patch_embed.proj.0.weight",
    "patch_embed.proj.0.0.weight",
    "patch_embed.weight",
    "conv1.weight",
    "conv1.0.weight",
    "stem.0.weight",
)
"""Names of the kernels (D, C, P, P) of the first layers of these families."""


# --------------------------------------------------------------------------------------------------------- shapes


def _check_activation(kind: str, known: _Known, usual: str) -> None:
    if known.act_layer not in (None, usual):
        raise InputError(f"timm has no {kind} with the activation {known.act_layer}, only {usual}")


def _transformer_shape(state: Mapping[str, Tensor]) -> tuple[int, int, int]:
    patches = state["patch_embed.proj.weight"]
    if patches.ndim != 4 or patches.shape[2] != patches.shape[3] or patches.shape[1] == 1:
        raise InputError(
            "patch_embed.proj.weight must be (D, C, P, P) for square patches of images of C > 1 channels, got "
            f"{tuple(patches.shape)}"
        )
    return patches.shape[0], patches.shape[-1], _count(state, "blocks")


def _count(state: Mapping[str, Tensor], name: str) -> int:
    numbers = {int(match[1]) for key in state if (match := re.match(rf"{name}\.(\d+)\.", key))}
    missing = sorted(set(range(max(numbers, default=-1) + 1)) - numbers)
    if missing:
        raise InputError(f"{name} are numbered to {max(numbers)}, but {missing} are missing: the file is not complete")
    return len(numbers)


def _grid(positions: int, prefix_tokens: int) -> tuple[int, bool]:
    """Return the patches along a side of the position embedding, and whether it excludes the prefix tokens."""
    # Registers have no position.
    for tokens in dict.fromkeys((0, prefix_tokens) if prefix_tokens > 1 else (prefix_tokens, 0)):
        side = math.isqrt(max(positions - tokens, 0))
        if side and side * side == positions - tokens:
            return side, tokens != prefix_tokens
    raise InputError(
        f"pos_embed has {positions} positions, which is not a square grid with {prefix_tokens} prefix tokens: networks "
        "trained on non-square images are not supported"
    )


def _ratio(hidden: int, dim: int) -> float:
    ratio = hidden / dim
    return ratio if int(dim * ratio) == hidden else math.nextafter(ratio, math.inf)


def _guess_heads(dim: int) -> tuple[int, tuple[str, ...]]:
    if dim % 64:
        raise InputError(
            f"weights do not show their attention heads, and a width of {dim} is no multiple of the usual 64 channels "
            "per head: give args={'num_heads': ...}"
        )
    return dim // 64, (
        f"weights do not show their attention heads: assumed {dim // 64} of 64 channels each; if this is wrong, give "
        "args={'num_heads': ...}",
    )
