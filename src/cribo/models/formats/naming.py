"""Functions that rename a network's tensors from a project's names to timm's; facts are from the repositories."""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cribo.base.errors import InputError

State = dict[str, Tensor]
Replacements = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]


def substitute(state: State, *rules: tuple[str, str | Callable[[re.Match[str]], str]]) -> State:
    """Apply regular expressions to every key, one after the other; raise InputError if two keys become the same."""
    renamed: State = {}
    for key, value in state.items():
        for pattern, replacement in rules:
            key = re.sub(pattern, replacement, key)
        if key in renamed:
            raise InputError(f"two keys of the file map to {key}: it contains parts of two formats")
        renamed[key] = value
    return renamed


def fold_positions(state: State, token: str, positions: int) -> State:
    """Rename `token` to timm's registers, and add the first `positions` position embeddings to [CLS] and registers."""
    state = dict(state)
    position = state.pop("pos_embed")
    tokens = torch.cat([state["cls_token"], state.pop(token)], dim=1)
    tokens[:, :positions] += position[:, :positions]
    state["cls_token"], state["reg_token"] = tokens[:, :1], tokens[:, 1:]
    state["pos_embed"] = position[:, positions:]
    return state


def from_vit(state: State) -> State:
    """Rename the layer scale of iBOT and BEiT, and DeiT's distillation token to a register."""
    state = substitute(state, (r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma"))
    return fold_positions(state, "dist_token", 2) if "dist_token" in state else state


def from_dinov2(state: State) -> State:
    """Rename tensors of DINOv2, including training checkpoints."""
    state = substitute(
        state,
        (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),  # chunked training, blocks keep their number
        (r"\.mlp\.w12\.", ".mlp.fc1."),
        (r"\.mlp\.w3\.", ".mlp.fc2."),
    )
    return fold_positions(state, "register_tokens", 1) if "register_tokens" in state else state


def from_dinov3(state: State) -> State:
    """Rename tensors of DINOv3, including training checkpoints; keep a trained key bias (`mask_k_bias: false`)."""
    state = dict(state)
    masks = {key: state.pop(key) for key in list(state) if key.endswith("qkv.bias_mask")}
    biases = {key: value.chunk(3) for key, value in state.items() if key.endswith("qkv.bias")}
    if not any(f"{key}_mask" not in masks and parts[1].any() for key, parts in biases.items()):
        for key, (query, _, value) in biases.items():
            block = key.removesuffix("qkv.bias")
            del state[key]
            state[f"{block}q_bias"], state[f"{block}v_bias"] = query, value
    return substitute(
        state,
        (r"\.ls([12])\.gamma$", r".gamma_\1"),
        (r"^storage_tokens$", "reg_token"),
        (r"\.mlp\.w1\.", ".mlp.fc1_g."),
        (r"\.mlp\.w2\.", ".mlp.fc1_x."),
        (r"\.mlp\.w3\.", ".mlp.fc2."),
    )


def count_heads_of_dinov3(state: State) -> int | None:
    """Return the number of heads: the rotary embedding has one period per four channels of a head."""
    periods = state.get("rope_embed.periods")
    return None if periods is None else len(state["norm.weight"]) // (4 * len(periods))


_HF_RULES: Replacements = (
    # Names in files, and in memory since transformers 5.
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


def from_huggingface(state: State) -> State:
    """Rename tensors of ViT, DINOv2, and DINOv2 with registers."""
    state = substitute(state, *_HF_RULES)
    state = _join_attention(state)
    for kind in ("weight", "bias"):
        state = _join(state, f".mlp.{{}}.{kind}", ("gate_proj", "up_proj"), f".mlp.fc1.{kind}")
    return fold_positions(state, "register_tokens", 1) if "register_tokens" in state else state


def count_heads_of_beit(state: State) -> int | None:
    """Return the number of heads: a table of position biases has one column per head."""
    tables = (value for key, value in state.items() if key.endswith("relative_position_bias_table"))
    return next((table.shape[1] for table in tables), None)


def from_huggingface_beit(state: State) -> State:
    """Rename tensors of BEiT. The mean's norm is in the pooler; with a head for masked patches, at the top level."""
    state = substitute(
        state,
        (r"^beit\.", ""),
        (r"^(?:encoder\.relative_position_bias|shared_position_bias)\.", "rel_pos_bias."),
        (r"^((?:encoder\.)?layers?\.\d+)\.(?:attention\.attention\.)?relative_position_bias\.", r"\1.attn."),
        *_HF_RULES,
        (r"\.lambda_([12])$", r".gamma_\1"),
        (r"\.attn\.([qv])\.bias$", r".attn.\1_bias"),
        (r"^pooler\.layernorm\.", "fc_norm."),
    )
    return _join_attention(state)


def from_huggingface_dinov3(state: State) -> State:
    """Rename tensors of DINOv3, with separate queries, keys and values, of which only some have a bias."""
    state = substitute(
        state,
        *_HF_RULES,
        (r"\.ls([12])\.gamma$", r".gamma_\1"),
        (r"\.attn\.([qv])\.bias$", r".attn.\1_bias"),
        (r"\.mlp\.gate_proj\.", ".mlp.fc1_g."),
        (r"^register_tokens$", "reg_token"),
    )
    gated = any(".mlp.fc1_g." in key for key in state)
    state = substitute(state, (r"\.mlp\.up_proj\.", ".mlp.fc1_x." if gated else ".mlp.fc1."))
    if "reg_token" in state and not state["reg_token"].numel():
        del state["reg_token"]
    return _join_attention(state)


def _join_attention(state: State) -> State:
    """Join queries, keys and values."""
    for kind in ("weight", "bias"):
        state = _join(state, f".attn.{{}}.{kind}", "qkv", f".attn.qkv.{kind}")
    return state


def _join(state: State, pattern: str, parts: Sequence[str], name: str) -> State:
    """Concatenate the parts of each block that a project stores separately, if all of them exist."""
    state = dict(state)
    first, *others = (pattern.format(part) for part in parts)
    for key in [key for key in state if key.endswith(first)]:
        block = key.removesuffix(first)
        if all(block + other in state for other in others):
            state[block + name] = torch.cat([state.pop(key), *(state.pop(block + other) for other in others)])
    return state


def from_open_clip(state: State) -> State:
    """Rename tensors of the image tower, including OpenAI's."""
    state = substitute(
        state,
        (r"^class_embedding$", "cls_token"),
        (r"^positional_embedding$", "pos_embed"),
        (r"^conv1\.", "patch_embed.proj."),
        (r"^ln_pre\.", "norm_pre."),
        (r"^ln_post\.", "norm."),
        (r"^transformer\.resblocks\.(\d+)\.", r"blocks.\1."),
        (r"\.ln_([12])\.", r".norm\1."),
        (r"\.ls_([12])\.", r".ls\1."),
        (r"\.attn\.in_proj_", ".attn.qkv."),
        (r"\.attn\.out_proj\.", ".attn.proj."),
        (r"\.mlp\.c_fc\.", ".mlp.fc1."),
        (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    )
    return _with_batch_dimension(state)


def from_huggingface_clip(state: State) -> State:
    """The image tower."""
    state = substitute(
        state,
        (r"^embeddings\.class_embedding$", "cls_token"),
        (r"^embeddings\.position_embedding\.weight$", "pos_embed"),
        (r"^embeddings\.patch_embedding\.", "patch_embed.proj."),
        (r"^pre_layrnorm\.", "norm_pre."),
        (r"^post_layernorm\.", "norm."),
        (r"^encoder\.layers\.(\d+)\.", r"blocks.\1."),
        (r"\.layer_norm([12])\.", r".norm\1."),
        (r"\.self_attn\.([qkv])_proj\.", r".attn.\1."),
        (r"\.self_attn\.out_proj\.", ".attn.proj."),
    )
    return _with_batch_dimension(_join_attention(state))


def from_huggingface_siglip(state: State) -> State:
    """Rename tensors of the image tower, including attention pooling."""
    state = substitute(
        from_huggingface_clip(state),
        (r"^head\.probe$", "attn_pool.latent"),
        (r"^head\.attention\.in_proj_", "attn_pool.qkv."),
        (r"^head\.attention\.out_proj\.", "attn_pool.proj."),
        (r"^head\.layernorm\.", "attn_pool.norm."),
        (r"^head\.mlp\.", "attn_pool.mlp."),
    )
    for kind in ("weight", "bias"):
        if (joint := state.pop(f"attn_pool.qkv.{kind}", None)) is not None:
            dim = len(joint) // 3
            state[f"attn_pool.q.{kind}"], state[f"attn_pool.kv.{kind}"] = joint[:dim], joint[dim:]
    return state


def _with_batch_dimension(state: State) -> State:
    """Add the batch dimension to [CLS] (D,) and positions (N, D)."""
    shapes = {"cls_token": (1, 1, -1), "pos_embed": (1, *state["pos_embed"].shape[-2:])}
    return {key: value.reshape(shapes[key]) if key in shapes else value for key, value in state.items()}


def from_convnext(state: State) -> State:
    """Rename tensors of both versions; the second's response norm has parameters with four dimensions."""
    state = substitute(
        state,
        (r"^downsample_layers\.0\.", "stem."),
        (r"^downsample_layers\.(\d+)\.", r"stages.\1.downsample."),
        (r"^stages\.(\d+)\.(\d+)\.", r"stages.\1.blocks.\2."),
        (r"\.dwconv\.", ".conv_dw."),
        (r"\.pwconv([12])\.", r".mlp.fc\1."),
        (r"\.grn\.gamma$", ".mlp.grn.weight"),
        (r"\.grn\.beta$", ".mlp.grn.bias"),
        (r"^norm\.", "head.norm."),
    )
    return {key: value.flatten() if ".grn." in key else value for key, value in state.items()}


def from_huggingface_convnext(state: State) -> State:
    """Rename tensors of both versions."""
    state = substitute(
        state,
        (r"^embeddings\.patch_embeddings\.", "downsample_layers.0.0."),
        (r"^embeddings\.layernorm\.", "downsample_layers.0.1."),
        (r"^encoder\.stages\.(\d+)\.downsampling_layer\.", r"downsample_layers.\1."),
        (r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.", r"stages.\1.\2."),
        (r"^layernorm\.", "norm."),
        (r"\.layernorm\.", ".norm."),
        (r"\.layer_scale_parameter$", ".gamma"),
        (r"\.grn\.weight$", ".grn.gamma"),
        (r"\.grn\.bias$", ".grn.beta"),
    )
    return from_convnext(state)


def from_huggingface_resnet(state: State) -> State:
    """Rename tensors of ResNet, where a convolution and its norm are one layer."""

    def numbered(match: re.Match[str]) -> str:
        kind = "conv" if match[2] == "convolution" else "bn"
        return f".{kind}{int(match[1]) + 1}."

    return substitute(
        state,
        (r"^embedder\.embedder\.convolution\.", "conv1."),
        (r"^embedder\.embedder\.normalization\.", "bn1."),
        (r"^encoder\.stages\.(\d+)\.layers\.", lambda m: f"layer{int(m[1]) + 1}."),
        (r"\.layer\.(\d+)\.(convolution|normalization)\.", numbered),
        (r"\.shortcut\.convolution\.", ".downsample.0."),
        (r"\.shortcut\.normalization\.", ".downsample.1."),
    )


def from_swin(state: State) -> State:
    """Rename tensors of Swin, where a stage merges patches at its end, and in timm at its start."""
    return substitute(state, (r"^layers\.(\d+)\.downsample\.", lambda m: f"layers.{int(m[1]) + 1}.downsample."))


def from_huggingface_swin(state: State) -> State:
    """Rename tensors of Swin, with names in files, or in memory since transformers 5."""
    state = substitute(
        state,
        (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
        (r"^embeddings\.norm\.", "patch_embed.norm."),
        (r"^encoder\.layers\.", "layers."),
        (r"\.attention\.(?:self\.)?(?:(query|key|value)|([qkv])_proj)\.", lambda m: f".attn.{(m[1] or m[2])[0]}."),
        (r"\.attention\.(?:self\.|relative_position_bias\.)relative_position_", ".attn.relative_position_"),
        (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
        (r"\.(?:intermediate\.dense|mlp\.fc1)\.", ".mlp.fc1."),
        (r"\.(?:output\.dense|mlp\.fc2)\.", ".mlp.fc2."),
        (r"\.layernorm_before\.", ".norm1."),
        (r"\.layernorm_after\.", ".norm2."),
        (r"^layernorm\.", "norm."),
    )
    return from_swin(_join_attention(state))


def from_mmsegmentation(state: State) -> State:
    """Rename tensors of ViT; add a zero bias to the patch projection if it has none (`patch_bias=False`, default)."""
    projection = state["patch_embed.projection.weight"]
    state = {"patch_embed.projection.bias": projection.new_zeros(len(projection)), **state}
    return substitute(
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


def without_cls_token(state: State) -> State:
    """Remove [CLS], for networks whose blocks never read it."""
    state = dict(state)
    del state["cls_token"]
    return {**state, "pos_embed": state["pos_embed"][:, 1:]}


def from_resnet_v1c(state: State) -> State:
    """Rename tensors of MMSegmentation's ResNet with a stem of three convolutions."""
    return substitute(state, (r"^stem\.7\.", "bn1."), (r"^stem\.(\d)\.", r"conv1.\1."))


def from_detectron2(state: State) -> State:
    """Rename tensors of ResNet, where stages are numbered from 2 and norms are inside convolutions."""
    return substitute(
        state,
        (r"^stem\.conv1\.", "conv1."),
        (r"^res(\d)\.", lambda match: f"layer{int(match[1]) - 1}."),
        (r"\.shortcut\.norm\.", ".downsample.1."),
        (r"\.shortcut\.", ".downsample.0."),
        (r"(^|\.)conv(\d)\.norm\.", r"\1bn\2."),
    )


def from_flax(state: State) -> State:
    """Rename tensors of Flax: kernels are (in, out), attention is per head, and modules are numbered in two ways."""
    state = substitute(
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
    return _join_attention(state)


def count_heads_of_flax(state: State) -> int | None:
    """Return the number of heads: query kernels are (D, heads, D / heads)."""
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


def unchanged(state: State) -> State:
    """Return the tensors unchanged, for networks with timm's names."""
    return state
