"""Infer the timm architecture of weights from the names and shapes of their tensors."""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cribo.base.errors import InputError
from cribo.models import networks

# Names of widths and depths, and the attention heads of each width. Most have 64 channels per head, but not all:
# ViT-H of MAE and LOCA has 80, DINOv3's largest has 128.
_VIT_NAMES = {(192, 12): "tiny", (384, 12): "small", (768, 12): "base", (1024, 24): "large", (1280, 32): "huge"}
_VIT_HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1152: 16, 1280: 16, 1408: 16, 1536: 24, 1664: 16}
_DINOV3_NAMES = {
    (192, 12, 768): "tiny",
    (384, 12, 1536): "small",
    (768, 12, 3072): "base",
    (1024, 24, 4096): "large",
}
_GATED_DINOV3_NAMES = {(384, 12, 1536): "small_plus", (1280, 32, 5120): "huge_plus", (4096, 40, 8192): "7b"}
_DINOV3_HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 20, 4096: 32}
_RESNET_NAMES: dict[tuple[str, tuple[int, ...]], str] = {
    ("basic", (2, 2, 2, 2)): "resnet18",
    ("basic", (3, 4, 6, 3)): "resnet34",
    ("bottleneck", (3, 4, 6, 3)): "resnet50",
    ("bottleneck", (3, 4, 23, 3)): "resnet101",
    ("bottleneck", (3, 8, 36, 3)): "resnet152",
}
_RESNET_CHANNELS = (64, 128, 256, 512)
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
    given = {key: value for key, value in (("num_heads", num_heads), ("act_layer", act_layer)) if value is not None}
    if "layer1.0.conv1.weight" in state:
        return _resnet(state, output_stride, given)
    if "stages.0.blocks.0.conv_dw.weight" in state:
        return _convnext(state, given)
    if "layers.0.blocks.0.attn.relative_position_bias_table" in state:
        return _swin(state, given)
    if any(key.endswith("relative_position_bias_table") for key in state) and "blocks.0.norm1.weight" in state:
        return _beit(state, given)
    if "encoder.blocks.0.residual1.fn.rope.freqs" in state:
        return _capi(state)
    if "cls_attn_blocks.0.norm1.weight" in state:
        return _xcit(state)
    if "patch_embed.proj.12.weight" in state:
        return _conv_stem_vit(state, heads or {}, given)
    if "blocks.0.gamma_1" in state and "pos_embed" not in state:
        return _dinov3(state, given)
    if "blocks.0.norm1.weight" in state and "pos_embed" in state:
        notes: tuple[str, ...] = ()
        if act_layer is None and assumed_act_layer is not None:
            given["act_layer"] = assumed_act_layer
            notes = (_ACTIVATION_NOTE.format(assumed_act_layer),)
        found = _vit(state, heads or {}, given)
        return found._replace(notes=(*notes, *found.notes))
    raise InputError(
        "these are not weights of a vision transformer with a position embedding, DINOv3, Swin, ConvNeXt or ResNet: "
        "give the timm name of their architecture"
    )


_ACTIVATION_NOTE = (
    "weights do not show the activation of their MLPs: assumed {}; if it is another, give args={{'act_layer': ...}} "
    "(gelu, quick_gelu, gelu_tanh)"
)


def _vit(state: Mapping[str, Tensor], known_heads: Mapping[int, int], given: Mapping[str, Any]) -> Architecture:
    if "norm_pre.weight" in state and "act_layer" not in given:
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
    name, usual = _vit_name(found, hidden, is_gated)
    args = {key: value for key, value in found.items() if usual.get(key, _VIT_DEFAULTS.get(key)) != value}
    notes: tuple[str, ...] = ()
    if "num_heads" not in given:
        num_heads = known_heads.get(dim) or _VIT_HEADS.get(dim)
        if num_heads is None:
            num_heads, notes = _guess_heads(dim)
        elif dim == _MOCO_WIDTH and project_of_fixed_positions(state["pos_embed"][:, -grid * grid :]) == "MoCo v3":
            num_heads, notes = 12, () if known_heads else (_MOCO_NOTE,)
        given = {**given, "num_heads": num_heads}
    args |= {key: value for key, value in given.items() if usual.get(key, _VIT_DEFAULTS.get(key)) != value}
    return Architecture(name, args, grid * patch_size, (*notes, *_depth_notes(dim, depth)))


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


def _depth_notes(dim: int, depth: int) -> tuple[str, ...]:
    usual = sorted({named for width, named in _VIT_NAMES if width == dim})
    if not usual or depth in usual:
        return ()
    return (f"the file has {depth} blocks, networks of this width usually {usual[0]}: check that it is complete",)


_VIT_DEFAULTS = {
    "qkv_bias": True,
    "qk_norm": False,
    "init_values": None,
    "class_token": True,
    "reg_tokens": 0,
    "no_embed_class": False,
    "pre_norm": False,
    "act_layer": "gelu",
}
# ViT-S/16, the base of all networks without a timm name of their own.
_SMALL = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6, "mlp_ratio": 4.0}
_VIT_PATCHES = {"tiny": (16,), "small": (8, 16, 32), "base": (8, 16, 32), "large": (14, 16, 32), "huge": (14,)}


def _vit_name(found: Mapping[str, Any], hidden: int, is_gated: bool) -> tuple[str, dict[str, Any]]:
    """Return the timm name closest to the values found, and that name's own values."""
    dim, depth, patch_size = found["embed_dim"], found["depth"], found["patch_size"]
    registers = {"reg_tokens": 4, "no_embed_class": True} if found["reg_tokens"] else {}
    middle = "patch14_reg4_dinov2" if registers else "patch14_dinov2"
    if is_gated:
        # Only this name has a gated MLP; its ratio is written in timm with five digits.
        usual = {"patch_size": 14, "embed_dim": 1536, "depth": 40, "num_heads": 24, "init_values": 1e-5, **registers}
        usual["mlp_ratio"] = found["mlp_ratio"] if (dim, hidden) == (1536, 8192) else None
        return f"vit_giant_{middle}", usual
    size = _VIT_NAMES.get((dim, depth)) if hidden == 4 * dim else None
    usual = {"patch_size": patch_size, "embed_dim": dim, "depth": depth, "num_heads": _VIT_HEADS.get(dim)}
    usual["mlp_ratio"] = found["mlp_ratio"]
    if size in ("small", "base", "large") and patch_size == 14 and found["init_values"]:
        return f"vit_{size}_{middle}", {**usual, "init_values": 1e-5, **registers}
    if size is not None and patch_size in _VIT_PATCHES[size]:
        return f"vit_{size}_patch{patch_size}_224", usual
    if size is not None:
        nearest = 16 if 16 in _VIT_PATCHES[size] else _VIT_PATCHES[size][0]
        return f"vit_{size}_patch{nearest}_224", {**usual, "patch_size": nearest}
    return "vit_small_patch16_224", _SMALL


def _dinov3(state: Mapping[str, Tensor], given: Mapping[str, Any]) -> Architecture:
    dim, patch_size, depth = _transformer_shape(state)
    is_gated = "blocks.0.mlp.fc1_g.weight" in state
    hidden = state["blocks.0.mlp.fc2.weight"].shape[1]
    size = (_GATED_DINOV3_NAMES if is_gated else _DINOV3_NAMES).get((dim, depth, hidden))
    bias = "_qkvb" if "blocks.0.attn.q_bias" in state else ""
    if "blocks.0.attn.qkv.bias" in state:  # a bias of the keys, too, which timm's usual attention of this name lacks
        given = {**given, "attn_type": "rope", "qkv_bias": True}
    found: dict[str, Any] = {"patch_size": patch_size, "num_reg_tokens": 0}
    if "reg_token" in state:
        found["num_reg_tokens"] = state["reg_token"].shape[1]
    args = {key: value for key, value in found.items() if {"patch_size": 16, "num_reg_tokens": 4}[key] != value}
    notes: tuple[str, ...] = ()
    num_heads = given.get("num_heads") or _DINOV3_HEADS.get(dim)
    if num_heads is None:
        num_heads, notes = _guess_heads(dim)
    if size is None:
        size = "small_plus" if is_gated else "small"
        args |= {"embed_dim": dim, "depth": depth, "num_heads": num_heads, "mlp_ratio": _ratio(hidden, dim)}
    elif num_heads != _DINOV3_HEADS[dim]:
        args["num_heads"] = num_heads
    args |= {key: value for key, value in given.items() if key in ("attn_type", "qkv_bias")}
    if size == "7b" and bias:
        bias, args = "", {**args, "qkv_bias": True}
    if size == "tiny" and not bias:
        bias, args = "_qkvb", {**args, "qkv_bias": False}
    notes = (*notes, *_depth_notes(dim, depth))
    return Architecture(f"vit_{size}_patch16_dinov3{bias}", args, _USUAL_SIZE // patch_size * patch_size, notes)


def _conv_stem_vit(
    state: Mapping[str, Tensor], known_heads: Mapping[int, int], given: Mapping[str, Any]
) -> Architecture:
    """MoCo v3's stem: four convolutions of stride 2, for patches of 16 pixels."""
    plain = {key: value for key, value in state.items() if not key.startswith("patch_embed.proj.")}
    dim = len(state["patch_embed.proj.12.weight"])
    plain["patch_embed.proj.weight"] = torch.empty(dim, 3, 16, 16, device="meta")
    found = _vit(plain, known_heads, given)
    args = {"name": found.name, "size": found.image_size, **found.args}
    # It has one block fewer than networks without the stem.
    notes = tuple(note for note in found.notes if "check that it is complete" not in note)
    return Architecture(f"{networks.__name__}.vit_with_convolutional_stem", args, found.image_size, notes)


def _capi(state: Mapping[str, Tensor]) -> Architecture:
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


# Names and attention heads by width and depth.
_XCIT_NAMES = {
    (128, 12): ("nano_12", 4),
    (192, 12): ("tiny_12", 4),
    (192, 24): ("tiny_24", 4),
    (384, 12): ("small_12", 8),
    (384, 24): ("small_24", 8),
    (512, 24): ("medium_24", 8),
    (768, 24): ("large_24", 16),
}


def _xcit(state: Mapping[str, Tensor]) -> Architecture:
    dim, depth = state["cls_token"].shape[-1], _count(state, "blocks")
    patch_size = 2 ** len({key.split(".")[2] for key in state if re.match(r"patch_embed\.proj\.\d+\.0\.weight", key)})
    num_heads = len(state["blocks.0.attn.temperature"])
    if (dim, depth) in _XCIT_NAMES and patch_size in (8, 16):
        size, usual = _XCIT_NAMES[dim, depth]
        args = {} if num_heads == usual else {"num_heads": num_heads}
        return Architecture(f"xcit_{size}_p{patch_size}_224", args, _USUAL_SIZE)
    args = {"embed_dim": dim, "depth": depth, "num_heads": num_heads}
    note = (
        "weights do not show whether XCiT's last blocks normalise all tokens: assumed that they do, as in all but its "
        "smallest network; if not, give args={'tokens_norm': False}"
    )
    return Architecture(f"xcit_small_12_p{patch_size}_224", args, _USUAL_SIZE, (note,))


def _resnet(state: Mapping[str, Tensor], output_stride: int | None, given: Mapping[str, Any]) -> Architecture:
    if given.get("act_layer", "relu") != "relu":
        raise InputError(f"a ResNet has the activation relu, got {given['act_layer']}")
    layers = tuple(_count(state, rf"layer{stage}") for stage in range(1, 5))
    is_bottleneck = "layer1.0.conv3.weight" in state
    kind = "bottleneck" if is_bottleneck else "basic"
    stages = [stage for stage in range(1, 5) if layers[stage - 1]]
    inner = [len(state[f"layer{stage}.0.conv1.weight"]) for stage in stages]
    last = "conv3" if is_bottleneck else "conv2"
    channels = tuple(len(state[f"layer{stage}.0.{last}.weight"]) // (4 if is_bottleneck else 1) for stage in stages)
    name = _RESNET_NAMES.get((kind, layers))
    args: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    if name is None:
        name, args = ("resnet50" if is_bottleneck else "resnet18"), {"layers": layers}
        counts = ", ".join(map(str, layers))
        notes = (f"the file's stages have {counts} blocks, which no usual ResNet has: check that it is complete",)
    if channels != _RESNET_CHANNELS[: len(channels)]:
        args["channels"] = channels
    if is_bottleneck:
        # ResNeXt divides the inner convolution into groups, wide networks widen it.
        groups = inner[0] // state["layer1.0.conv2.weight"].shape[1]
        base_width = inner[0] * 64 // (channels[0] * groups)
        args |= {"cardinality": groups} if groups != 1 else {}
        args |= {"base_width": base_width} if base_width != 64 else {}
    if output_stride not in (None, 32):
        args["output_stride"] = output_stride
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


def _beit(state: Mapping[str, Tensor], given: Mapping[str, Any]) -> Architecture:
    dim, patch_size, depth = _transformer_shape(state)
    if given.get("act_layer", "gelu") != "gelu":
        raise InputError(f"timm has no BEiT with the activation {given['act_layer']}")
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
    usual: dict[str, Any] = {
        "patch_size": 16,
        "mlp_ratio": 4.0,
        "qkv_bias": True,
        "init_values": 0.1,
        "use_abs_pos_emb": False,
        "use_rel_pos_bias": True,
        "use_shared_rel_pos_bias": False,
        "use_fc_norm": True,
    }
    name = "beit_large_patch16_224" if (dim, depth) == (1024, 24) else "beit_base_patch16_224"
    sizes = {"base": (768, 12, 12), "large": (1024, 24, 16)}[name.split("_")[1]]
    usual |= dict(zip(("embed_dim", "depth", "num_heads"), sizes, strict=True))
    args = {key: value for key, value in found.items() if usual[key] != value}
    side = (math.isqrt(len(table) - 3) + 1) // 2
    if (2 * side - 1) ** 2 + 3 != len(table):
        raise InputError(f"a table of {len(table)} position biases does not fit a square image")
    return Architecture(name, args, side * patch_size, (*_beit_notes(state), *_depth_notes(dim, depth)))


def _beit_notes(state: Mapping[str, Tensor]) -> tuple[str, ...]:
    if "fc_norm.weight" not in state:
        return ()
    return ("the global token is the norm of the mean of the tokens, as the file has no norm of [CLS]",)


_CONVNEXT_NAMES: dict[tuple[str, tuple[int, ...], int], str] = {
    ("convnext", (3, 3, 9, 3), 96): "convnext_tiny",
    ("convnext", (3, 3, 27, 3), 96): "convnext_small",
    ("convnext", (3, 3, 27, 3), 128): "convnext_base",
    ("convnext", (3, 3, 27, 3), 192): "convnext_large",
    ("convnext", (3, 3, 27, 3), 256): "convnext_xlarge",
    ("convnext", (3, 4, 30, 3), 384): "convnext_xxlarge",
    ("convnextv2", (3, 3, 9, 3), 96): "convnextv2_tiny",
    ("convnextv2", (3, 3, 27, 3), 128): "convnextv2_base",
    ("convnextv2", (3, 3, 27, 3), 192): "convnextv2_large",
    ("convnextv2", (3, 3, 27, 3), 352): "convnextv2_huge",
}


def _convnext(state: Mapping[str, Tensor], given: Mapping[str, Any]) -> Architecture:
    if state["stem.1.weight"].ndim != 1:
        raise InputError("the stem has overlapping convolutions: give the timm name, such as convnext_atto_ols")
    depths = tuple(_count(state, rf"stages\.{stage}\.blocks") for stage in range(_count(state, "stages")))
    dims = tuple(len(state[f"stages.{stage}.blocks.0.conv_dw.weight"]) for stage in range(len(depths)))
    block = "stages.0.blocks.0"
    has_response_norm = f"{block}.mlp.grn.weight" in state
    family = "convnextv2" if has_response_norm else "convnext"
    args: dict[str, Any] = {}
    name = _CONVNEXT_NAMES.get((family, depths, dims[0])) if dims == _doubled(dims[0], len(dims)) else None
    if name is None:
        name, args = f"{family}_tiny", {"depths": depths, "dims": dims}
    found = {
        "patch_size": state["stem.0.weight"].shape[-1],
        "kernel_sizes": state[f"{block}.conv_dw.weight"].shape[-1],
        "conv_mlp": state[f"{block}.mlp.fc1.weight"].ndim == 4,
        "conv_bias": f"{block}.conv_dw.bias" in state,
        "ls_init_value": 1e-6 if f"{block}.gamma" in state else None,
        "head_norm_first": "norm_pre.weight" in state,
        "act_layer": given.get("act_layer", "gelu"),
    }
    usual: dict[str, Any] = {
        "patch_size": 4,
        "act_layer": "gelu",
        "kernel_sizes": 7,
        "conv_mlp": False,
        "conv_bias": True,
        "head_norm_first": False,
    }
    usual["ls_init_value"] = None if has_response_norm else 1e-6
    args |= {key: value for key, value in found.items() if usual[key] != value}
    return Architecture(name, args, _USUAL_SIZE)


_SWIN_NAMES: dict[tuple[tuple[int, ...], int, int], str] = {
    ((2, 2, 6, 2), 96, 7): "swin_tiny_patch4_window7_224",
    ((2, 2, 18, 2), 96, 7): "swin_small_patch4_window7_224",
    ((2, 2, 18, 2), 128, 7): "swin_base_patch4_window7_224",
    ((2, 2, 18, 2), 192, 7): "swin_large_patch4_window7_224",
    ((2, 2, 18, 2), 128, 12): "swin_base_patch4_window12_384",
    ((2, 2, 18, 2), 192, 12): "swin_large_patch4_window12_384",
}


def _swin(state: Mapping[str, Tensor], given: Mapping[str, Any]) -> Architecture:
    depths = tuple(_count(state, rf"layers\.{stage}\.blocks") for stage in range(_count(state, "layers")))
    tables = [state[f"layers.{stage}.blocks.0.attn.relative_position_bias_table"] for stage in range(len(depths))]
    windows, heads = {(math.isqrt(len(table)) + 1) // 2 for table in tables}, tuple(table.shape[1] for table in tables)
    if len(windows) > 1:
        raise InputError(f"the windows of the stages differ, {sorted(windows)}: give the timm name of the architecture")
    window, (dim, _, _, patch_size) = windows.pop(), state["patch_embed.proj.weight"].shape
    hidden = len(state["layers.0.blocks.0.mlp.fc1.weight"])
    found = {
        "patch_size": patch_size,
        "embed_dim": dim,
        "depths": depths,
        "num_heads": heads,
        "window_size": window,
        "mlp_ratio": _ratio(hidden, dim),
        "qkv_bias": "layers.0.blocks.0.attn.qkv.bias" in state,
    }
    usual: dict[str, Any] = {"patch_size": 4, "mlp_ratio": 4.0, "qkv_bias": True}
    name = _SWIN_NAMES.get((depths, dim, window))
    if name is None:
        name = "swin_tiny_patch4_window7_224"
    elif heads == _doubled(dim // 32, len(heads)):
        usual |= {"embed_dim": dim, "depths": depths, "num_heads": heads, "window_size": window}
    args = {key: value for key, value in found.items() if key not in usual or usual[key] != value}
    if given.get("act_layer", "gelu") != "gelu":
        raise InputError(f"timm has no Swin transformer with the activation {given['act_layer']}")
    # In the original's training, the map of the last stage is as large as a window.
    return Architecture(name, args, patch_size * 2 ** (len(depths) - 1) * window)


def _doubled(first: int, count: int) -> tuple[int, ...]:
    return tuple(first * 2**index for index in range(count))


def _transformer_shape(state: Mapping[str, Tensor]) -> tuple[int, int, int]:
    patches = state["patch_embed.proj.weight"]
    if patches.ndim != 4 or patches.shape[2] != patches.shape[3] or patches.shape[1] != 3:
        raise InputError(
            f"patch_embed.proj.weight must be (D, 3, P, P) for square patches of RGB images, got {tuple(patches.shape)}"
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
