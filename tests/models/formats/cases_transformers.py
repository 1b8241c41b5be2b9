"""Cases of transformers other than plain ViTs: MoCo v3 with a convolutional stem, XCiT and CAPI."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .architectures import (
    Draw,
    Outputs,
    State,
    _attend,
    _by_head,
    _depth,
    _gelu_mlp,
    _linear,
    _norm,
    antialiased_bicubic,
    batch_norm,
    vit_state,
)
from .cases import DINO_HEAD, MOCO_HEAD, OPTIMISER, RESNET_SIZES, case, fixed, junk, multi_crop, save, under, vit

# --------------------------------------------------------------------------------- MoCo v3's convolutional stem


def conv_stem_state(seed: int, dim: int = 384) -> State:
    """Tensors with MoCo v3's positions; the last convolution of the stem is 1 x 1."""
    state = fixed(vit_state(seed, dim=dim, patch=1), rows_first=True)
    for part in ("weight", "bias"):
        state[f"patch_embed.proj.12.{part}"] = state.pop(f"patch_embed.proj.{part}")
    draw, widths = Draw(seed + 10), (3, 48, 96, 192, 384)
    state["patch_embed.proj.12.weight"] = draw(dim, dim, 1, 1, std=1 / math.sqrt(dim))
    for number in range(4):
        name, next_name = (f"patch_embed.proj.{3 * number + offset}" for offset in (0, 1))
        state |= draw.convolution(name, widths[number], widths[number + 1], 3)
        state |= draw.batch_norm(next_name, widths[number + 1])
    return state


def conv_stem_vit(state: State, images: Tensor) -> Outputs:
    """facebookresearch/moco-v3, vits.py: after four convolutions of stride 2, each position is a patch.

    The original supports only the training size; other sizes are compared with timm's resizing.
    """
    for number in range(4):
        images = F.conv2d(images, state[f"patch_embed.proj.{3 * number}.weight"], stride=2, padding=1)
        images = F.relu(batch_norm(images, state, f"patch_embed.proj.{3 * number + 1}"))
    patches = {f"patch_embed.proj.{part}": state[f"patch_embed.proj.12.{part}"] for part in ("weight", "bias")}
    return vit({**state, **patches}, antialiased_bicubic, heads=12)(images)


@case("ViT with a convolutional stem", positions="timm")
def conv_stem(folder: Path):
    """As written by MoCo v3's convert_to_deit.py."""
    state = conv_stem_state(1)
    return save(folder, {"model": state}), partial(conv_stem_vit, state), None


@case("MoCo v3", "convolutional stem", positions="timm")
def moco_v3_conv_stem(folder: Path):
    teacher, student = conv_stem_state(1), conv_stem_state(2)
    state = {
        **under("module.base_encoder.", {**student, **MOCO_HEAD}),
        **under("module.momentum_encoder.", {**teacher, **MOCO_HEAD}),
        **junk("module.predictor.0.weight"),
    }
    content = {"epoch": 300, "arch": "vit_conv_small", "state_dict": state, "optimizer": OPTIMISER}
    return save(folder, content, "vit-conv-s.pth.tar"), partial(conv_stem_vit, teacher), partial(conv_stem_vit, student)


# ----------------------------------------------------------------------------------------------------------- XCiT


def xcit_state(seed: int, *, dim: int = 128, depth: int = 2, heads: int = 4, patch: int = 16) -> State:
    """Tensors of `xcit`."""
    draw = Draw(seed)
    state = {"cls_token": draw(1, 1, dim), **draw.norm("norm", dim)}
    state |= draw.convolution("pos_embeder.token_projection", 64, dim, 1, bias=True)
    steps = int(math.log2(patch))
    for number in range(steps):
        inputs, outputs = (dim // 2 ** (steps - number - each) for each in (0, 1))
        state |= draw.convolution(f"patch_embed.proj.{2 * number}.0", inputs if number else 3, outputs, 3)
        state |= draw.batch_norm(f"patch_embed.proj.{2 * number}.1", outputs)
    for block in (*(f"blocks.{number}" for number in range(depth)), "cls_attn_blocks.0", "cls_attn_blocks.1"):
        state |= {**draw.norm(f"{block}.norm1", dim), **draw.norm(f"{block}.norm2", dim)}
        state |= {**draw.linear(f"{block}.attn.qkv", dim, 3 * dim), **draw.linear(f"{block}.attn.proj", dim, dim)}
        state |= {**draw.linear(f"{block}.mlp.fc1", dim, 4 * dim), **draw.linear(f"{block}.mlp.fc2", 4 * dim, dim)}
        state |= {f"{block}.gamma{branch}": draw(dim, mean=0.8) for branch in (1, 2)}
        if block.startswith("blocks"):
            state |= {f"{block}.gamma3": draw(dim, mean=0.8), f"{block}.attn.temperature": draw(heads, 1, 1, mean=1.0)}
            state |= {**draw.norm(f"{block}.norm3", dim), **draw.batch_norm(f"{block}.local_mp.bn", dim)}
            for name in ("conv1", "conv2"):
                state |= {f"{block}.local_mp.{name}.weight": draw(dim, 1, 3, 3, std=0.3)}
                state |= {f"{block}.local_mp.{name}.bias": draw(dim)}
    return state


def xcit_positions(h: int, w: int) -> Tensor:
    """Return (1, 64, h, w): sines and cosines of positions counted from one, first by row, then by column."""
    rates = 10_000.0 ** (2 * (torch.arange(32) // 2) / 32)

    def waves(size: int) -> Tensor:
        angles = torch.arange(1, size + 1)[:, None] / (size + 1e-6) * 2 * math.pi / rates
        return torch.stack([angles[:, 0::2].sin(), angles[:, 1::2].cos()], dim=2).flatten(1)

    rows, columns = waves(h)[:, None].expand(-1, w, -1), waves(w)[None].expand(h, -1, -1)
    return torch.cat([rows, columns], dim=2).permute(2, 0, 1)[None]


def cross_covariance(state: State, block: str, x: Tensor, heads: int) -> Tensor:
    """Attention between the channels of a head, over all tokens."""
    qkv = _linear(_norm(x, state, f"{block}.norm1", 1e-6), state, f"{block}.attn.qkv").chunk(3, dim=-1)
    query, key, value = (_by_head(part, heads).mT for part in qkv)  # (B, heads, D / heads, N)
    weights = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT * state[f"{block}.attn.temperature"]
    return _linear((weights.softmax(-1) @ value).permute(0, 3, 1, 2).flatten(2), state, f"{block}.attn.proj")


def local_interaction(state: State, block: str, x: Tensor, h: int, w: int) -> Tensor:
    """Two depth-wise convolutions."""
    local = _norm(x, state, f"{block}.norm3", 1e-6).mT.unflatten(2, (h, w))
    for name in ("conv1", "conv2"):
        weight, bias = (state[f"{block}.local_mp.{name}.{part}"] for part in ("weight", "bias"))
        local = F.conv2d(local, weight, bias, padding=1, groups=len(weight))
        if name == "conv1":
            local = batch_norm(F.gelu(local), state, f"{block}.local_mp.bn")
    return local.flatten(2).mT


@torch.no_grad()
def xcit(state: State, images: Tensor, *, heads: int, norms_all: bool = True) -> Outputs:
    """facebookresearch/xcit, xcit.py.

    The last two blocks change [CLS] only and return the patches, with a norm unless `norms_all` is off (`tokens_norm`,
    which only the smallest network has off).
    """
    x = images
    for number in range(_depth(state, "patch_embed.proj.") // 2 + 1):
        x = F.conv2d(F.gelu(x) if number else x, state[f"patch_embed.proj.{2 * number}.0.weight"], stride=2, padding=1)
        x = batch_norm(x, state, f"patch_embed.proj.{2 * number}.1")
    h, w = x.shape[2:]
    weight, bias = (state[f"pos_embeder.token_projection.{part}"] for part in ("weight", "bias"))
    x = (x + F.conv2d(xcit_positions(h, w), weight, bias)).flatten(2).mT
    for block in (f"blocks.{number}" for number in range(_depth(state, "blocks."))):
        x = x + state[f"{block}.gamma1"] * cross_covariance(state, block, x, heads)
        x = x + state[f"{block}.gamma3"] * local_interaction(state, block, x, h, w)
        x = x + state[f"{block}.gamma2"] * _gelu_mlp(_norm(x, state, f"{block}.norm2", 1e-6), state, block)
    x = torch.cat([state["cls_token"].expand(len(x), -1, -1), x], dim=1)
    for block in ("cls_attn_blocks.0", "cls_attn_blocks.1"):
        normed = _norm(x, state, f"{block}.norm1", 1e-6)
        query, key, value = (_by_head(part, heads) for part in _linear(normed, state, f"{block}.attn.qkv").chunk(3, -1))
        mixed = _linear(_attend(query[:, :, :1], key, value), state, f"{block}.attn.proj")
        x = x + state[f"{block}.gamma1"] * torch.cat([mixed, normed[:, 1:]], dim=1)
        normed = _norm(x, state, f"{block}.norm2", 1e-6)
        x = normed if norms_all else torch.cat([normed[:, :1], x[:, 1:]], dim=1)
        x = x + torch.cat([state[f"{block}.gamma2"] * _gelu_mlp(x[:, :1], state, block), x[:, 1:]], dim=1)
    x = _norm(x, state, "norm", 1e-6)
    return x[:, 0], x[:, 1:]


XCIT_SIZES_8 = ((48, 48), (64, 64), (32, 64))


@case("XCiT", sizes=RESNET_SIZES)
def xcit_of_unusual_size(folder: Path):
    """Weights do not show `tokens_norm`; all networks except the smallest have it."""
    state = xcit_state(1)
    content = {"model": {**state, **junk("head.weight", "head.bias")}}
    return save(folder, content), partial(xcit, state, heads=4), None


@case("XCiT", "tiny, 8 pixels a patch", sizes=XCIT_SIZES_8)
def xcit_tiny(folder: Path):
    state = xcit_state(1, dim=192, depth=12, patch=8)
    return save(folder, state, "dino_xcit_pretrain.pth"), partial(xcit, state, heads=4), None


@case("XCiT", "nano", sizes=RESNET_SIZES)
def xcit_nano(folder: Path):
    state = xcit_state(1, depth=12)
    return save(folder, state), partial(xcit, state, heads=4, norms_all=False), None


@case("DINO", "XCiT", sizes=RESNET_SIZES)
def dino_xcit(folder: Path):
    teacher, student = xcit_state(1), xcit_state(2)
    networks = (partial(xcit, state, heads=4) for state in (teacher, student))
    return save(folder, multi_crop(teacher, student, DINO_HEAD)), *networks


# ----------------------------------------------------------------------------------------------------------- CAPI


def capi_state(seed: int, *, dim: int = 64, depth: int = 2, heads: int = 4, patch: int = 14) -> State:
    """Tensors of `capi`, with its predictor (`decoder`)."""
    draw = Draw(seed)
    state = {"registers": draw(1, 8, dim), "mask_token": draw(1, dim), **draw.patches("patch_embed", dim, patch)}
    for block in (f"{part}.blocks.{number}" for part in ("encoder", "decoder") for number in range(depth)):
        attention, mlp = f"{block}.residual1", f"{block}.residual2"
        state |= {f"{residual}.norm.weight": draw(dim, mean=1.0) for residual in (attention, mlp)}
        for name in ("q_proj", "k_proj", "v_proj", "proj"):
            state |= draw.linear(f"{attention}.fn.{name}", dim, dim, bias=False)
        state[f"{attention}.fn.rope.freqs"] = draw(2, dim // heads, std=10.0)
        state |= draw.linear(f"{mlp}.fn.fc1", dim, 4 * dim, bias=False)
        state |= draw.linear(f"{mlp}.fn.fc2", 4 * dim, dim, bias=False)
    return state


EDGE = ((0, 0), (0.5, 0), (1, 0), (1, 0.5), (1, 1), (0.5, 1), (0, 1), (0, 0.5))


def capi_places(h: int, w: int) -> Iterator[tuple[float, float]]:
    """Positions of eight registers along the edges of the unit square, then of patches across it."""
    yield from EDGE
    yield from ((row / (h - 1), column / (w - 1)) for row in range(h) for column in range(w))


@torch.no_grad()
def capi(state: State, images: Tensor, *, heads: int) -> Outputs:
    """facebookresearch/capi, model.py: its encoder.

    CAPI's own global token comes from its predictor, which is not included: here, it is the mean of the patches.
    """

    def rms(x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    kernel = state["patch_embed.weight"]
    grid = F.conv2d(images, kernel, state["patch_embed.bias"], stride=kernel.shape[-1])
    x = torch.cat([state["registers"].expand(len(images), -1, -1), grid.flatten(2).mT], dim=1)
    places = torch.tensor(list(capi_places(*grid.shape[2:])))

    def rotate(by_head: Tensor, frequencies: Tensor) -> Tensor:
        angles = places @ frequencies
        first, second = by_head.chunk(2, dim=-1)
        return by_head * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

    for block in (f"encoder.blocks.{number}" for number in range(_depth(state, "encoder.blocks."))):
        attention, mlp = f"{block}.residual1", f"{block}.residual2"
        normed = rms(x) * state[f"{attention}.norm.weight"]
        parts = (_linear(normed, state, f"{attention}.fn.{name}") for name in ("q_proj", "k_proj", "v_proj"))
        query, key, value = (_by_head(part, heads) for part in parts)
        frequencies = state[f"{attention}.fn.rope.freqs"]
        mixed = _attend(rotate(query, frequencies), rotate(key, frequencies), value)
        x = x + _linear(mixed, state, f"{attention}.fn.proj")
        hidden = F.gelu(_linear(rms(x) * state[f"{mlp}.norm.weight"], state, f"{mlp}.fn.fc1"))
        x = x + _linear(hidden, state, f"{mlp}.fn.fc2")
    patches = rms(x)[:, len(EDGE) :]
    return patches.mean(1), patches


@case("CAPI", sizes=((70, 70), (98, 98), (70, 126)), norm_eps=None)
def capi_of_a_training(folder: Path):
    """With RMS norms. The file of a training contains the average of the student's weights."""
    state = capi_state(1)
    content = {**under("backbone.", state), **junk("head.last_layer.weight_g", "head.last_layer.weight_v")}
    return save(folder, content, "student_ema_checkpoint.pth"), partial(capi, state, heads=4), None
