"""How projects name the keys of a network, and how each dialect becomes timm's.

Facts about a project (names, heads, normalisation, epsilon of its layer norms, how it resizes its position embedding)
are from its public repository.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

State = dict[str, Tensor]
Rules = tuple[tuple[str, str], ...]
Replacements = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]

HALF = (0.5, 0.5, 0.5)

# How originals resize their position embedding where features on images of another size than in training then differ
# from theirs, as timm resizes (bicubic, antialiased). In brackets, the relative L2 difference of MAE's fixed embedding
# of 14x14 patches resized to 32x32 and to 7x7; with noise of 0.3 added to it, up to six times as much. At the size of
# training there is none. Even where both are bicubic, torch uses another cubic kernel with antialiasing.
BICUBIC_OFFSET = (
    "on images of another size than in training, features differ from the original's, which resizes its position "
    "embedding with an offset of 0.1 patches and without antialiasing (1.1 % when enlarged, 3.6 % when halved)"
)
BICUBIC_PLAIN = (
    "on images of another size than in training, features differ from the original's, which resizes its position "
    "embedding without antialiasing (0.9 % when enlarged, 3.3 % when halved)"
)
BILINEAR_PLAIN = (
    "on images of another size than in training, features differ from the original's, which resizes its position "
    "embedding bilinearly (1.5 % when enlarged, 1.3 % when halved)"
)
BILINEAR_ANTIALIASED = (
    "on images of another size than in training, features differ from the original's, which resizes its position "
    "embedding bilinearly with antialiasing (1.5 % when enlarged, 3.8 % when halved)"
)


@dataclass(frozen=True)
class Dialect:
    """How a project names the keys of one network.

    Attributes:
        name: for people.
        anchor: the key by which a network of this dialect is found, as a pattern.
        needs: patterns, each of which some key of the network matches.
        rename: makes timm's keys of the network's own.
        dropped: (group, pattern of keys within the network) that are left out on purpose.
        norm_eps: epsilon of its layer norms, where it is not what timm's network has.
        mean, std: the normalisation of its images; None: ImageNet's.
        act_layer: of its MLPs, where it is not the exact GELU.
        count_heads: reads the attention heads off the network's own tensors, where these show them.
        note: what a user should know of every network of this dialect.
    """

    name: str
    anchor: str
    rename: Callable[[State], State]
    needs: tuple[str, ...] = ()
    dropped: Rules = ()
    norm_eps: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    act_layer: str | None = None
    count_heads: Callable[[State], int | None] = lambda state: None
    note: str | None = None


def _substitute(state: State, *rules: tuple[str, str | Callable[[re.Match[str]], str]]) -> State:
    renamed: State = {}
    for key, value in state.items():
        for pattern, replacement in rules:
            key = re.sub(pattern, replacement, key)
        if key in renamed:
            raise ValueError(f"two keys of the file stand for {key}: it holds parts of two formats")
        renamed[key] = value
    return renamed


def fold_positions(state: State, token: str, positions: int) -> State:
    """Make `token` timm's registers, and add the first `positions` position embeddings to [CLS] and registers."""
    state = dict(state)
    position = state.pop("pos_embed")
    tokens = torch.cat([state["cls_token"], state.pop(token)], dim=1)
    tokens[:, :positions] += position[:, :positions]
    state["cls_token"], state["reg_token"] = tokens[:, :1], tokens[:, 1:]
    state["pos_embed"] = position[:, positions:]
    return state


def _from_vit(state: State) -> State:
    state = _substitute(state, (r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma"))
    return fold_positions(state, "dist_token", 2) if "dist_token" in state else state


def _from_dinov2(state: State) -> State:
    state = _substitute(
        state,
        (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),  # trained in chunks, whose blocks keep their number
        (r"\.mlp\.w12\.", ".mlp.fc1."),
        (r"\.mlp\.w3\.", ".mlp.fc2."),
    )
    return fold_positions(state, "register_tokens", 1) if "register_tokens" in state else state


def _from_dinov3(state: State) -> State:
    state = dict(state)
    _check_rotation(state)
    masks = {key: state.pop(key) for key in list(state) if key.endswith("qkv.bias_mask")}
    for key in [key for key in state if key.endswith("qkv.bias")]:
        query, middle, value = state.pop(key).chunk(3)
        if f"{key}_mask" not in masks and middle.any():
            raise ValueError(f"{key} has a bias of the attention keys, which DINOv3 in timm has not")
        block = key.removesuffix("qkv.bias")
        state[f"{block}q_bias"], state[f"{block}v_bias"] = query, value
    return _substitute(
        state,
        (r"\.ls([12])\.gamma$", r".gamma_\1"),
        (r"^storage_tokens$", "reg_token"),
        (r"\.mlp\.w1\.", ".mlp.fc1_g."),
        (r"\.mlp\.w2\.", ".mlp.fc1_x."),
        (r"\.mlp\.w3\.", ".mlp.fc2."),
    )


def _check_rotation(state: State) -> None:
    """DINOv3's file holds the periods of its rotary embedding; timm's network computes them."""
    periods = state.pop("rope_embed.periods", None)
    if periods is None:
        return
    expected = 100.0 ** (torch.arange(len(periods)) / len(periods))
    if not torch.allclose(periods.float(), expected, rtol=0.02):
        raise ValueError(
            "rope_embed.periods are not those of a rotary embedding with base 100, which is what DINOv3 in timm has: "
            f"they run from {periods.min():.3g} to {periods.max():.3g}"
        )


def _heads_of_dinov3(state: State) -> int | None:
    """The rotary embedding has a period for every four channels of a head."""
    periods = state.get("rope_embed.periods")
    return None if periods is None else len(state["norm.weight"]) // (4 * len(periods))


_HF_RULES: Replacements = (
    # The names in files, and those in memory since transformers 5.
    (r"^(?:model\.|encoder\.)?layers?\.(\d+)\.", r"blocks.\1."),
    (r"^embeddings\.(cls_token|register_tokens)$", r"\1"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.(?:projection\.)?(weight|bias)$", r"patch_embed.proj.\1"),
    (r"\.attention\.(?:attention\.)?(?:(query|key|value)|([qkv])_proj)\.", lambda m: f".attn.{(m[1] or m[2])[0]}."),
    (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
    (r"^(blocks\.\d+)\.(?:intermediate\.dense|mlp\.weights_in|mlp\.fc1)\.", r"\1.mlp.fc1."),
    (r"^(blocks\.\d+)\.(?:output\.dense|mlp\.weights_out|mlp\.fc2|mlp\.down_proj)\.", r"\1.mlp.fc2."),
    (r"\.(?:layernorm_before|norm1)\.", ".norm1."),
    (r"\.(?:layernorm_after|norm2)\.", ".norm2."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
)


def _from_huggingface(state: State) -> State:
    state = _substitute(state, *_HF_RULES)
    for kind in ("weight", "bias"):
        state = _join(state, f".attn.{{}}.{kind}", "qkv", f".attn.qkv.{kind}")
        state = _join(state, f".mlp.{{}}.{kind}", ("gate_proj", "up_proj"), f".mlp.fc1.{kind}")
    return fold_positions(state, "register_tokens", 1) if "register_tokens" in state else state


def _from_huggingface_dinov3(state: State) -> State:
    state = _substitute(
        state,
        *_HF_RULES,
        (r"\.ls([12])\.gamma$", r".gamma_\1"),
        (r"\.attn\.([qv])\.bias$", r".attn.\1_bias"),
        (r"\.mlp\.gate_proj\.", ".mlp.fc1_g."),
        (r"^register_tokens$", "reg_token"),
    )
    gated = any(".mlp.fc1_g." in key for key in state)
    state = _substitute(state, (r"\.mlp\.up_proj\.", ".mlp.fc1_x." if gated else ".mlp.fc1."))
    if "reg_token" in state and not state["reg_token"].numel():
        del state["reg_token"]
    return _join(state, ".attn.{}.weight", "qkv", ".attn.qkv.weight")


def _join(state: State, pattern: str, parts: Sequence[str], name: str) -> State:
    """Put the parts of each block that a project keeps apart under one name, where it has all of them."""
    state = dict(state)
    first, *others = (pattern.format(part) for part in parts)
    for key in [key for key in state if key.endswith(first)]:
        block = key.removesuffix(first)
        if all(block + other in state for other in others):
            state[block + name] = torch.cat([state.pop(key), *(state.pop(block + other) for other in others)])
    return state


def _from_mmsegmentation(state: State) -> State:
    return _substitute(
        state,
        (r"^layers\.", "blocks."),
        (r"^patch_embed\.projection\.", "patch_embed.proj."),
        (r"^ln1\.", "norm."),
        (r"\.ln([12])\.", r".norm\1."),
        (r"\.attn\.attn\.in_proj_", ".attn.qkv."),
        (r"\.attn\.attn\.out_proj\.", ".attn.proj."),
        (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
        (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
    )


def _from_flax(state: State) -> State:
    """JAX keeps kernels as (in, out), attention by head, and numbers the modules of a block in two ways."""
    state = _substitute(
        state,
        (r"^(?:Transformer/)?encoderblock_(\d+)/", r"blocks.\1."),
        (r"^(?:Transformer/)?encoder_norm/", "norm."),
        (r"^(?:ToTokenSequence_0/)?embedding/", "patch_embed.proj."),
        (r"^(?:ToTokenSequence_0|Transformer)/posembed_input(?:/pos_embedding)?$", "pos_embed"),
        (r"^cls$", "cls_token"),
        (r"\.LayerNorm_0/", ".norm1."),
        (r"\.LayerNorm_[12]/", ".norm2."),
        (r"\.MultiHeadDotProductAttention_[01]/(query|key|value)/", lambda m: f".attn.{m[1][0]}."),
        (r"\.MultiHeadDotProductAttention_[01]/out/", ".attn.proj."),
        (r"\.MlpBlock_[0-3]/Dense_0/", ".mlp.fc1."),
        (r"\.MlpBlock_[0-3]/Dense_1/", ".mlp.fc2."),
        (r"\.scale$", ".weight"),
    )
    state = {key.replace(".kernel", ".weight"): _from_kernel(key, value) for key, value in state.items()}
    state["pos_embed"] = state["pos_embed"].flatten(1, -2)
    for kind in ("weight", "bias"):
        state = _join(state, f".attn.{{}}.{kind}", "qkv", f".attn.qkv.{kind}")
    return state


def _heads_of_flax(state: State) -> int | None:
    kernels = (value for key, value in state.items() if key.endswith("/query/kernel"))
    return next((kernel.shape[1] for kernel in kernels), None)


def _from_kernel(key: str, value: Tensor) -> Tensor:
    if re.search(r"\.attn\.[qkv]\.bias$", key):
        return value.flatten()
    if not key.endswith(".kernel"):
        return value
    if key == "patch_embed.proj.kernel":
        return value.permute(3, 2, 0, 1)
    return (value.flatten(0, -2) if ".attn.proj." in key else value.flatten(1)).T


def _same(state: State) -> State:
    return state


_MASK: Rules = (("mask token", r"^(mask_token|masked_embed|embeddings\.mask_token)$"),)
# The head of a network that is kept with it.
_HEAD: Rules = (
    ("head", r"^(\w*head\w*|fc|classifier|pooler|pre_logits|projection_head|projector|predictor|prototypes)[./]"),
    ("head", r"^(head|fc)\d*[./]"),
)
# Decoders that lie beside the encoder without a name of their own in front of it.
_DECODER: Rules = (("decoder", r"^decoder_\w+([./]|$)"),)

_PATCH_EMBEDDING = r"patch_embed\.proj\.weight"
_HF_EMBEDDING = r"embeddings\.patch_embeddings\.projection\.weight"

_DINOV3 = Dialect(
    "DINOv3",
    _PATCH_EMBEDDING,
    _from_dinov3,
    needs=(r"^blocks\.0\.ls1\.gamma$", r"^(storage_tokens|rope_embed\.periods)$"),
    dropped=(*_MASK, *_HEAD, ("norm of local crops", r"^local_cls_norm\.")),
    count_heads=_heads_of_dinov3,
)
# Weights do not show whether they are of web or of satellite images, which are normalised in different ways. Of those
# that are released, the ViT-L of satellite images and both ViT-7B have a norm of local crops, and only the ViT-7B has
# no bias in its attention.
_DINOV3_SATELLITE = replace(
    _DINOV3,
    name="DINOv3 SAT-493M",
    needs=(*_DINOV3.needs, r"^local_cls_norm\.", r"^blocks\.0\.attn\.qkv\.bias$"),
    mean=(0.430, 0.411, 0.296),
    std=(0.213, 0.156, 0.143),
    note="took the normalisation of satellite images, for which the only released weights of this form are",
)
_DINOV3_EITHER = replace(
    _DINOV3,
    needs=(*_DINOV3.needs, r"^local_cls_norm\."),
    note="took ImageNet's normalisation; if these are the weights for satellite images (SAT-493M), give the name "
    "of timm's copy instead",
)

DIALECTS: tuple[Dialect, ...] = (
    _DINOV3_SATELLITE,
    _DINOV3_EITHER,
    _DINOV3,
    Dialect(
        "timm DINOv3",
        _PATCH_EMBEDDING,
        _same,
        needs=(r"^blocks\.0\.gamma_1$", r"^blocks\.0\.attn\.qkv\.weight$", r"^reg_token$"),
        dropped=_HEAD,
    ),
    Dialect(
        "DINOv2",
        _PATCH_EMBEDDING,
        _from_dinov2,
        needs=(r"^blocks\.0\.(\d+\.)?ls1\.gamma$", r"^(mask_token|register_tokens|blocks\.0\.\d+\.norm1\.weight)$"),
        dropped=(*_MASK, *_HEAD),
        note=BICUBIC_OFFSET,
    ),
    Dialect(
        "timm ViT",
        _PATCH_EMBEDDING,
        _from_vit,
        needs=(r"^blocks\.0\.norm1\.weight$", r"^pos_embed$"),
        dropped=(*_MASK, *_HEAD, *_DECODER),
    ),
    Dialect(
        "Hugging Face DINOv2",
        _HF_EMBEDDING,
        _from_huggingface,
        needs=(r"\.layer_scale1\.lambda1$",),
        dropped=(*_MASK, *_HEAD),
        note=BICUBIC_PLAIN,
    ),
    Dialect(
        "Hugging Face ViT",
        _HF_EMBEDDING,
        _from_huggingface,
        needs=(r"\.layernorm_before\.weight$",),
        dropped=(*_MASK, *_HEAD),
        norm_eps=1e-12,
        mean=HALF,
        std=HALF,
        note=BICUBIC_PLAIN,
    ),
    Dialect(
        "Hugging Face DINOv3",
        r"embeddings\.patch_embeddings\.weight",
        _from_huggingface_dinov3,
        needs=(r"\.layer_scale1\.lambda1$",),
        dropped=(*_MASK, *_HEAD),
    ),
    Dialect(
        "MMSegmentation ViT",
        r"patch_embed\.projection\.weight",
        _from_mmsegmentation,
        needs=(r"^layers\.0\.attn\.attn\.in_proj_weight$",),
        note=BICUBIC_PLAIN,
    ),
    Dialect(
        "LOCA",
        r"ToTokenSequence_0/embedding/kernel",
        _from_flax,
        dropped=(
            ("position predictor", r"^(cross_attention_block|final_norm|position_predictor)/"),
            ("head", r"^projection_head_for_clustering_prediction/"),
        ),
        act_layer="gelu_tanh",
        count_heads=_heads_of_flax,
        note=BILINEAR_ANTIALIASED,
    ),
    Dialect(
        "JAX ViT",
        r"embedding/kernel",
        _from_flax,
        needs=(r"^Transformer/encoderblock_0/",),
        dropped=(("head", r"^(head|pre_logits|output_projection)/"),),
        act_layer="gelu_tanh",
        count_heads=_heads_of_flax,
        mean=HALF,
        std=HALF,
    ),
    Dialect(
        "ResNet",
        r"layer1\.0\.conv1\.weight",
        _same,
        needs=(r"^conv1\.weight$", r"^bn1\.running_mean$"),
        dropped=(("head", r"^(fc\w*|head\w*|projector|projection_head|prototypes)\."),),
    ),
)

# The names of timm, for networks that are built before their weights are read.
OWN = Dialect("timm", "", _same, dropped=(*_MASK, *_HEAD, *_DECODER))
