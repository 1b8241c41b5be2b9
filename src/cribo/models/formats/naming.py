"""Functions that change a network's tensors from a project's layout to timm's; rows of the table replace names."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from cribo.base.errors import InputError

State = dict[str, Tensor]
Rename = Callable[[State], State]


def in_steps(steps: Iterable[Rename]) -> Rename:
    """Return the function that applies functions one after the other."""
    steps = tuple(steps)
    return lambda state: reduce(lambda changed, step: step(changed), steps, state)


def substitute(rules: Mapping[str, str | Callable[[re.Match[str]], str]], state: State) -> State:
    """Replace regular expressions in every key, one after the other; raise InputError if two keys become the same."""
    renamed: State = {}
    for key, value in state.items():
        for pattern, replacement in rules.items():
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


def fold_distillation_token(state: State) -> State:
    """Make a register of DeiT's distillation token, if there is one."""
    return fold_positions(state, "dist_token", 2) if "dist_token" in state else state


def fold_registers(state: State) -> State:
    """Add the position of [CLS] to it, if there are registers, which have no position."""
    return fold_positions(state, "register_tokens", 1) if "register_tokens" in state else state


def split_biases(state: State) -> State:
    """Split the biases of queries and values of DINOv3; keep a trained key bias (`mask_k_bias: false`)."""
    state = dict(state)
    masks = {key: state.pop(key) for key in list(state) if key.endswith("qkv.bias_mask")}
    biases = {key: value.chunk(3) for key, value in state.items() if key.endswith("qkv.bias")}
    if not any(f"{key}_mask" not in masks and parts[1].any() for key, parts in biases.items()):
        for key, (query, _, value) in biases.items():
            block = key.removesuffix("qkv.bias")
            del state[key]
            state[f"{block}q_bias"], state[f"{block}v_bias"] = query, value
    return state


def count_heads_of_dinov3(state: State) -> int | None:
    """Return the number of heads: the rotary embedding has one period per four channels of a head."""
    periods = state.get("rope_embed.periods")
    return None if periods is None else len(state["norm.weight"]) // (4 * len(periods))


def count_heads_of_beit(state: State) -> int | None:
    """Return the number of heads: a table of position biases has one column per head."""
    tables = (value for key, value in state.items() if key.endswith("relative_position_bias_table"))
    return next((table.shape[1] for table in tables), None)


def name_up_projections(state: State) -> State:
    """Name the first layer of MLPs, which may be gated, and remove empty registers."""
    gated = any(".mlp.fc1_g." in key for key in state)
    state = substitute({r"\.mlp\.up_proj\.": ".mlp.fc1_x." if gated else ".mlp.fc1."}, state)
    if "reg_token" in state and not state["reg_token"].numel():
        del state["reg_token"]
    return state


def join_attention(state: State) -> State:
    """Join queries, keys and values."""
    for kind in ("weight", "bias"):
        state = _join(state, f".attn.{{}}.{kind}", "qkv", f".attn.qkv.{kind}")
    return state


def join_gates(state: State) -> State:
    """Join the two parts of the first layer of gated MLPs."""
    for kind in ("weight", "bias"):
        state = _join(state, f".mlp.{{}}.{kind}", ("gate_proj", "up_proj"), f".mlp.fc1.{kind}")
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


def split_pooling(state: State) -> State:
    """Split queries from keys and values of attention pooling."""
    state = dict(state)
    for kind in ("weight", "bias"):
        if (joint := state.pop(f"attn_pool.qkv.{kind}", None)) is not None:
            dim = len(joint) // 3
            state[f"attn_pool.q.{kind}"], state[f"attn_pool.kv.{kind}"] = joint[:dim], joint[dim:]
    return state


def add_batch_dimension(state: State) -> State:
    """Add the batch dimension to [CLS] (D,) and positions (N, D)."""
    shapes = {"cls_token": (1, 1, -1), "pos_embed": (1, *state["pos_embed"].shape[-2:])}
    return {key: value.reshape(shapes[key]) if key in shapes else value for key, value in state.items()}


def flatten_response_norms(state: State) -> State:
    """Flatten the response norms of ConvNeXt V2, whose parameters have four dimensions."""
    return {key: value.flatten() if ".grn." in key else value for key, value in state.items()}


def number_layers_of_huggingface_resnet(state: State) -> State:
    """Number stages and layers from 1; a convolution and its norm are one layer."""

    def numbered(match: re.Match[str]) -> str:
        kind = "conv" if match[2] == "convolution" else "bn"
        return f".{kind}{int(match[1]) + 1}."

    rules = {
        r"^encoder\.stages\.(\d+)\.layers\.": lambda match: f"layer{int(match[1]) + 1}.",
        r"\.layer\.(\d+)\.(convolution|normalization)\.": numbered,
    }
    return substitute(rules, state)


def move_downsampling(state: State) -> State:
    """Move the merging of Swin's patches from the end of a stage to the start of the next one."""
    return substitute({r"^layers\.(\d+)\.downsample\.": lambda m: f"layers.{int(m[1]) + 1}.downsample."}, state)


def number_stages_of_detectron2(state: State) -> State:
    """Number the stages of ResNet from 1 instead of 2."""
    return substitute({r"^res(\d)\.": lambda match: f"layer{int(match[1]) - 1}."}, state)


def add_projection_bias(state: State) -> State:
    """Add a zero bias to the patch projection of MMSegmentation's ViT if it has none (`patch_bias=False`, default)."""
    projection = state["patch_embed.projection.weight"]
    return {"patch_embed.projection.bias": projection.new_zeros(len(projection)), **state}


def without_cls_token(state: State) -> State:
    """Remove [CLS], for networks whose blocks never read it."""
    state = dict(state)
    del state["cls_token"]
    return {**state, "pos_embed": state["pos_embed"][:, 1:]}


def from_kernels(state: State) -> State:
    """Change the tensors of Flax: kernels are (in, out), and attention is per head."""
    state = {key.replace(".kernel", ".weight"): _from_kernel(key, value) for key, value in state.items()}
    state["pos_embed"] = state["pos_embed"].flatten(1, -2)
    return state


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
