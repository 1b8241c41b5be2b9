"""Networks of other projects in plain PyTorch, from the tensors of their files under their own names.

Each function implements one project's network, written from its public code (given in its docstring), independently of
the readers of files. Images are normalised; the result is (global token, patch tokens).
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import scipy.interpolate
import scipy.ndimage
import torch
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]
Outputs = tuple[Tensor, Tensor]
Resize = Callable[[Tensor, int, int], Tensor]
"""(h, w, D) of the patches' positions and the new height and width to (h', w', D)."""


# ---------------------------------------------------------------------------------------------------- positions


def _interpolate(grid: Tensor, **options: object) -> Tensor:
    return F.interpolate(grid.permute(2, 0, 1)[None], **options)[0].permute(1, 2, 0)  # pyright: ignore[reportArgumentType]


def scaled_bicubic(grid: Tensor, h: int, w: int) -> Tensor:
    """facebookresearch/dino, vision_transformer.py: adds a tenth of a patch to avoid rounding errors."""
    scale = ((h + 0.1) / len(grid), (w + 0.1) / len(grid))
    return _interpolate(grid, scale_factor=scale, mode="bicubic")


def antialiased_bicubic(grid: Tensor, h: int, w: int) -> Tensor:
    """facebookresearch/dinov2, hub/backbones.py (with registers); huggingface/pytorch-image-models, pos_embed.py."""
    return _interpolate(grid, size=(h, w), mode="bicubic", antialias=True)


def bicubic(grid: Tensor, h: int, w: int) -> Tensor:
    """facebookresearch/mae, util/pos_embed.py; open-mmlab/mmsegmentation, backbones/vit.py."""
    return _interpolate(grid, size=(h, w), mode="bicubic")


def bilinear(grid: Tensor, h: int, w: int) -> Tensor:
    """rstrudel/segmenter, segm/model/utils.py; open-mmlab/mmsegmentation, configs/_base_/models/setr_pup.py."""
    return _interpolate(grid, size=(h, w), mode="bilinear")


def jax_image_resize(grid: Tensor, h: int, w: int) -> Tensor:
    """google-research/scenic, projects/loca/vit.py: `jax.image.resize`, a triangle at least as wide as a new patch."""
    for axis, new in ((0, h), (1, w)):
        old = grid.shape[axis]
        centres = (torch.arange(new) + 0.5) * old / new - 0.5
        distances = (centres[:, None] - torch.arange(old)[None]).abs() / max(old / new, 1.0)
        weights = (1 - distances).clamp(min=0)
        weights = weights / weights.sum(dim=1, keepdim=True)
        grid = (weights @ grid.transpose(axis, -2)).transpose(axis, -2)
    return grid


def scipy_zoom(grid: Tensor, h: int, w: int) -> Tensor:
    """google-research/vision_transformer, vit_jax/checkpoint.py."""
    zoomed = scipy.ndimage.zoom(grid.numpy(), (h / grid.shape[0], w / grid.shape[1], 1), order=1)
    return torch.from_numpy(np.ascontiguousarray(zoomed))


def _add_positions(tokens: Tensor, positions: Tensor, h: int, w: int, resize: Resize) -> Tensor:
    """Add positions, prefix tokens first; not resized for square images of the training size."""
    side = math.isqrt(positions.shape[1])
    prefix = positions.shape[1] - side * side
    grid = positions[0, prefix:].unflatten(0, (side, side))
    resized = grid if (h, w) == (side, side) else resize(grid, h, w)
    return tokens + torch.cat([positions[0, :prefix], resized.flatten(0, 1)])


# ------------------------------------------------------------------------------------------------------- parts


def _linear(x: Tensor, weights: State, name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _norm(x: Tensor, weights: State, name: str, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)


def batch_norm(x: Tensor, weights: State, name: str) -> Tensor:
    """Normalise a map by the running mean and variance."""
    mean, variance, scale, bias = (
        weights[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
    )
    return F.batch_norm(x, mean, variance, scale, bias, eps=1e-5)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Softmax attention of (B, heads, N, D / heads); returns (B, N, D)."""
    similarity = query @ key.mT / math.sqrt(query.shape[-1]) + bias
    return (similarity.softmax(-1) @ value).transpose(1, 2).flatten(2)


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _multihead_attention(x: Tensor, weights: State, name: str, heads: int) -> Tensor:
    """`nn.MultiheadAttention` with one input."""
    qkv = F.linear(x, weights[f"{name}.in_proj_weight"], weights[f"{name}.in_proj_bias"])
    return _linear(_attend(*(_by_head(part, heads) for part in qkv.chunk(3, dim=-1))), weights, f"{name}.out_proj")


def _depth(weights: State, prefix: str) -> int:
    return 1 + max(int(key.removeprefix(prefix).partition(".")[0]) for key in weights if key.startswith(prefix))


def _gelu_mlp(x: Tensor, weights: State, block: str) -> Tensor:
    return _linear(F.gelu(_linear(x, weights, f"{block}.mlp.fc1")), weights, f"{block}.mlp.fc2")


def _dinov2_swiglu(x: Tensor, weights: State, block: str) -> Tensor:
    """facebookresearch/dinov2, layers/swiglu_ffn.py."""
    gate, value = _linear(x, weights, f"{block}.mlp.w12").chunk(2, dim=-1)
    return _linear(F.silu(gate) * value, weights, f"{block}.mlp.w3")


def _dinov3_swiglu(x: Tensor, weights: State, block: str) -> Tensor:
    """facebookresearch/dinov3, layers/ffn_layers.py."""
    hidden = F.silu(_linear(x, weights, f"{block}.mlp.w1")) * _linear(x, weights, f"{block}.mlp.w2")
    return _linear(hidden, weights, f"{block}.mlp.w3")


# ---------------------------------------------------------------------------------------------------- networks


@torch.no_grad()
def vit(weights: State, images: Tensor, *, heads: int, resize: Resize, eps: float = 1e-6) -> Outputs:
    """The vision transformer of timm and of projects that copied it.

    facebookresearch/dino, vision_transformer.py; bytedance/ibot (`gamma_1`, `gamma_2`); facebookresearch/dinov2 (`ls1`,
    `ls2`, registers, which come after [CLS] got its position); facebookresearch/mae, models_vit.py (`fc_norm` of the
    mean of the patches); rstrudel/segmenter; facebookresearch/deit (`dist_token`, with a position of its own).
    """
    patches = weights["patch_embed.proj.weight"].shape[-1]
    grid = F.conv2d(images, weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"], stride=patches)
    h, w = grid.shape[2:]
    prefix = [weights[name] for name in ("cls_token", "dist_token") if name in weights]
    tokens = torch.cat([*(token.expand(len(images), -1, -1) for token in prefix), grid.flatten(2).mT], dim=1)
    x = _add_positions(tokens, weights["pos_embed"], h, w, resize)
    if "register_tokens" in weights:
        x = torch.cat([x[:, :1], weights["register_tokens"].expand(len(x), -1, -1), x[:, 1:]], dim=1)
    for block in (f"blocks.{number}" for number in range(_depth(weights, "blocks."))):
        scales = [
            weights.get(f"{block}.gamma_{i}", weights.get(f"{block}.ls{i}.gamma", torch.ones(()))) for i in (1, 2)
        ]
        qkv = _linear(_norm(x, weights, f"{block}.norm1", eps), weights, f"{block}.attn.qkv")
        mixed = _attend(*(_by_head(part, heads) for part in qkv.chunk(3, dim=-1)))
        x = x + scales[0] * _linear(mixed, weights, f"{block}.attn.proj")
        mlp = _dinov2_swiglu if f"{block}.mlp.w12.weight" in weights else _gelu_mlp
        x = x + scales[1] * mlp(_norm(x, weights, f"{block}.norm2", eps), weights, block)
    if "fc_norm.weight" in weights:
        return _norm(x[:, -h * w :].mean(1), weights, "fc_norm", eps), _norm(x[:, -h * w :], weights, "fc_norm", eps)
    x = _norm(x, weights, "norm", eps)
    return x[:, 0], x[:, -h * w :]


@torch.no_grad()
def dinov3(weights: State, images: Tensor, *, heads: int, eps: float = 1e-5, coordinates: str = "separate") -> Outputs:
    """facebookresearch/dinov3: models/vision_transformer.py, layers/attention.py, layers/rope_position_encoding.py.

    The released weights are built with `norm_layer="layernormbf16"`, an epsilon of 1e-5, and compute their rotary
    embedding in float32 from periods that are stored in bfloat16 (hub/backbones.py).
    """
    kernel = weights["patch_embed.proj.weight"]
    grid = F.conv2d(images, kernel, weights["patch_embed.proj.bias"], stride=kernel.shape[-1])
    h, w = grid.shape[2:]
    prefix = [weights[name].expand(len(images), -1, -1) for name in ("cls_token", "storage_tokens") if name in weights]
    x = torch.cat([*prefix, grid.flatten(2).mT], dim=1)
    rows, columns = {"separate": (h, w), "max": (max(h, w),) * 2, "min": (min(h, w),) * 2}[coordinates]
    places = torch.cartesian_prod((torch.arange(h) + 0.5) / rows, (torch.arange(w) + 0.5) / columns) * 2 - 1
    angles = 2 * math.pi * places[:, :, None] / weights["rope_embed.periods"].float()
    angles = angles.flatten(1).tile(2)  # (N, D / heads): rows, columns, rows, columns

    def rotate(by_head: Tensor) -> Tensor:
        kept, patches = by_head[:, :, : -h * w], by_head[:, :, -h * w :]
        first, second = patches.chunk(2, dim=-1)
        patches = patches * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
        return torch.cat([kept, patches], dim=2)

    for block in (f"blocks.{number}" for number in range(_depth(weights, "blocks."))):
        bias = weights.get(f"{block}.attn.qkv.bias")
        if bias is not None:
            bias = bias * weights.get(f"{block}.attn.qkv.bias_mask", torch.ones(()))
        qkv = F.linear(_norm(x, weights, f"{block}.norm1", eps), weights[f"{block}.attn.qkv.weight"], bias)
        query, key, value = (_by_head(part, heads) for part in qkv.chunk(3, dim=-1))
        mixed = _attend(rotate(query), rotate(key), value)
        x = x + weights[f"{block}.ls1.gamma"] * _linear(mixed, weights, f"{block}.attn.proj")
        mlp = _dinov3_swiglu if f"{block}.mlp.w1.weight" in weights else _gelu_mlp
        x = x + weights[f"{block}.ls2.gamma"] * mlp(_norm(x, weights, f"{block}.norm2", eps), weights, block)
    x = _norm(x, weights, "norm", eps)
    return x[:, 0], x[:, -h * w :]


def quick_gelu(x: Tensor) -> Tensor:
    """openai/CLIP, clip/model.py."""
    return x * torch.sigmoid(1.702 * x)


@torch.no_grad()
def open_clip(
    weights: State, images: Tensor, *, heads: int, activation: Callable[[Tensor], Tensor], eps: float = 1e-5
) -> Outputs:
    """openai/CLIP, clip/model.py; mlfoundations/open_clip, transformer.py (`ls_1`, `ls_2`) and pos_embed.py.

    open_clip resizes positions when it builds a network for images of another size.
    """
    kernel = weights["conv1.weight"]
    grid = F.conv2d(images, kernel, stride=kernel.shape[-1])
    h, w = grid.shape[2:]
    tokens = torch.cat([weights["class_embedding"].expand(len(images), 1, -1), grid.flatten(2).mT], dim=1)
    x = _add_positions(tokens, weights["positional_embedding"][None], h, w, antialiased_bicubic)
    x = _norm(x, weights, "ln_pre", eps)
    blocks = "transformer.resblocks."
    for block in (f"{blocks}{number}" for number in range(_depth(weights, blocks))):
        scales = [weights.get(f"{block}.ls_{i}.gamma", torch.ones(())) for i in (1, 2)]
        normed = _norm(x, weights, f"{block}.ln_1", eps)
        x = x + scales[0] * _multihead_attention(normed, weights, f"{block}.attn", heads)
        hidden = activation(_linear(_norm(x, weights, f"{block}.ln_2", eps), weights, f"{block}.mlp.c_fc"))
        x = x + scales[1] * _linear(hidden, weights, f"{block}.mlp.c_proj")
    x = _norm(x, weights, "ln_post", eps)
    return x[:, 0], x[:, 1:]


def _biases_of_beit(table: Tensor) -> Tensor:
    """Biases (heads, 1 + N, 1 + N), entry by entry from the positions of two patches; three rows are [CLS]'s."""
    width = math.isqrt(len(table) - 3)
    side = (width + 1) // 2
    places = [None, *((row, column) for row in range(side) for column in range(side))]
    rows: list[int] = []
    for one in places:
        for other in places:
            if one is None or other is None:
                rows.append(-1 if one is other else -3 if one is None else -2)
            else:
                down, across = (a - b + side - 1 for a, b in zip(one, other, strict=True))
                rows.append(down * width + across)
    return table[rows].unflatten(0, (len(places),) * 2).permute(2, 0, 1)


@torch.no_grad()
def beit(weights: State, images: Tensor, *, eps: float = 1e-6) -> Outputs:
    """microsoft/unilm, beit/modeling_finetune.py; microsoft/SimMIM, models/vision_transformer.py. For one size.

    Position biases are per block, or shared by all (`rel_pos_bias`). With `fc_norm` the original returns the
    norm of the mean; each token gets the same norm.
    """
    patches = F.conv2d(images, weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"], stride=16)
    x = torch.cat([weights["cls_token"].expand(len(images), -1, -1), patches.flatten(2).mT], dim=1)
    x = x + weights.get("pos_embed", torch.zeros(()))
    for block in (f"blocks.{number}" for number in range(_depth(weights, "blocks."))):
        owner = "rel_pos_bias" if "rel_pos_bias.relative_position_bias_table" in weights else f"{block}.attn"
        table = weights[f"{owner}.relative_position_bias_table"]
        query_bias, value_bias = weights[f"{block}.attn.q_bias"], weights[f"{block}.attn.v_bias"]
        bias = torch.cat([query_bias, torch.zeros_like(query_bias), value_bias])
        qkv = _linear(_norm(x, weights, f"{block}.norm1", eps), weights, f"{block}.attn.qkv") + bias
        heads = (_by_head(part, table.shape[1]) for part in qkv.chunk(3, dim=-1))
        mixed = _attend(*heads, bias=_biases_of_beit(table))
        x = x + weights[f"{block}.gamma_1"] * _linear(mixed, weights, f"{block}.attn.proj")
        x = x + weights[f"{block}.gamma_2"] * _gelu_mlp(_norm(x, weights, f"{block}.norm2", eps), weights, block)
    if "fc_norm.weight" in weights:
        return _norm(x[:, 1:].mean(1), weights, "fc_norm", eps), _norm(x[:, 1:], weights, "fc_norm", eps)
    x = _norm(x, weights, "norm", eps)
    return x[:, 0], x[:, 1:]


def resize_beit(weights: State, old: int, new: int) -> State:
    """microsoft/unilm, beit/run_class_finetuning.py: positions for `new` patches a side, when weights are loaded.

    Biases by a cubic spline along each axis, over distances whose steps grow by a constant factor.
    """
    old_side, new_side = 2 * old - 1, 2 * new - 1
    low, high, middle = 1.01, 1.5, 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        reach = sum(middle**power for power in range(old_side // 2))
        low, high = (low, middle) if reach > new_side // 2 else (middle, high)
    half = torch.cumsum(middle ** torch.arange(old_side // 2, dtype=torch.float64), 0)
    known = torch.cat([-half.flip(0), torch.zeros(1), half]).numpy()
    wanted = (torch.arange(new_side) - new_side // 2).clamp(known[0], known[-1]).numpy()

    def resize_biases(table: Tensor) -> Tensor:
        values = table[:-3].unflatten(0, (old_side, old_side)).double().numpy()
        for axis in (0, 1):
            values = scipy.interpolate.make_interp_spline(known, values, k=3, axis=axis)(wanted)
        return torch.cat([torch.from_numpy(values).float().flatten(0, 1), table[-3:]])

    resized = {key: resize_biases(value) for key, value in weights.items() if key.endswith("bias_table")}
    if "pos_embed" in weights:
        grid = bicubic(weights["pos_embed"][0, 1:].unflatten(0, (old, old)), new, new)
        resized["pos_embed"] = torch.cat([weights["pos_embed"][0, :1], grid.flatten(0, 1)])[None]
    return {**weights, **resized}


@torch.no_grad()
def mmsegmentation_vit(
    weights: State, images: Tensor, *, heads: int, resize: Resize = bicubic, eps: float = 1e-6, has_cls: bool = True
) -> Outputs:
    """open-mmlab/mmsegmentation, mmseg/models/backbones/vit.py.

    Without `final_norm` the last block's tokens are the output; without `with_cls_token` (SETR-MLA) [CLS] gets its
    position and is removed before the first block.
    """
    kernel = weights["patch_embed.projection.weight"]
    grid = F.conv2d(images, kernel, weights.get("patch_embed.projection.bias"), stride=kernel.shape[-1])
    h, w = grid.shape[2:]
    tokens = torch.cat([weights["cls_token"].expand(len(images), -1, -1), grid.flatten(2).mT], dim=1)
    x = _add_positions(tokens, weights["pos_embed"], h, w, resize)
    x = x if has_cls else x[:, 1:]
    for layer in (f"layers.{number}" for number in range(_depth(weights, "layers."))):
        x = x + _multihead_attention(_norm(x, weights, f"{layer}.ln1", eps), weights, f"{layer}.attn.attn", heads)
        hidden = F.gelu(_linear(_norm(x, weights, f"{layer}.ln2", eps), weights, f"{layer}.ffn.layers.0.0"))
        x = x + _linear(hidden, weights, f"{layer}.ffn.layers.1")
    if "ln1.weight" in weights:
        x = _norm(x, weights, "ln1", eps)
    patches = x[:, -h * w :]
    return x[:, 0] if has_cls else patches.mean(1), patches


@torch.no_grad()
def flax_vit(arrays: dict[str, np.ndarray], images: Tensor, *, resize: Resize) -> Outputs:
    """google-research/vision_transformer, vit_jax/models_vit.py; google-research/scenic, projects/loca/vit.py.

    Flax's layer norm has an epsilon of 1e-6, its `gelu` is the approximation by tanh, and the kernels of attention are
    (D, heads, D / heads) and (heads, D / heads, D). LOCA has neither [CLS] nor, in its positions, a place for it.
    """
    weights = {key: torch.from_numpy(value) for key, value in arrays.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}/scale"], weights[f"{name}/bias"], 1e-6)

    def dense(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]

    is_loca = "ToTokenSequence_0/embedding/kernel" in weights
    stem, root = ("ToTokenSequence_0/", "") if is_loca else ("", "Transformer/")
    kernel = weights[f"{stem}embedding/kernel"]  # (P, P, 3, D)
    grid = F.conv2d(images, kernel.permute(3, 2, 0, 1), weights[f"{stem}embedding/bias"], stride=len(kernel))
    h, w = grid.shape[2:]
    tokens = grid.flatten(2).mT
    if "cls" in weights:
        tokens = torch.cat([weights["cls"].expand(len(images), -1, -1), tokens], dim=1)
    if is_loca:
        positions = weights["ToTokenSequence_0/posembed_input"].flatten(1, 2)
    else:
        positions = weights["Transformer/posembed_input/pos_embedding"]
    x = _add_positions(tokens, positions, h, w, resize)
    last_norm, attention, mlp = (
        ("LayerNorm_1", "MultiHeadDotProductAttention_0", "MlpBlock_0")
        if is_loca
        else ("LayerNorm_2", "MultiHeadDotProductAttention_1", "MlpBlock_3")
    )
    depth = len([key for key in weights if key.endswith("/LayerNorm_0/scale") and "encoderblock_" in key])
    for block in (f"{root}encoderblock_{number}" for number in range(depth)):
        normed = norm(x, f"{block}/LayerNorm_0")
        query, key, value = (
            (
                torch.einsum("bnd,dhc->bnhc", normed, weights[f"{block}/{attention}/{part}/kernel"])
                + weights[f"{block}/{attention}/{part}/bias"]
            ).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        out = weights[f"{block}/{attention}/out/kernel"]
        mixed = _attend(query, key, value).unflatten(2, out.shape[:2])
        x = x + torch.einsum("bnhc,hcd->bnd", mixed, out) + weights[f"{block}/{attention}/out/bias"]
        hidden = F.gelu(dense(norm(x, f"{block}/{last_norm}"), f"{block}/{mlp}/Dense_0"), approximate="tanh")
        x = x + dense(hidden, f"{block}/{mlp}/Dense_1")
    x = norm(x, f"{root}encoder_norm")
    return x[:, 0] if "cls" in weights else x.mean(1), x[:, -h * w :]


@torch.no_grad()
def resnet(
    weights: State, images: Tensor, *, dilations: tuple[int, ...] = (1, 1, 1, 1), contracts: bool = False
) -> Outputs:
    """pytorch/vision, torchvision/models/resnet.py: ResNet v1.5, its stride in the 3 x 3 convolution.

    A dilated stage has no stride, and all its blocks have the same dilation, as in CVMI-Lab/SlotCon, models/resnet.py
    (`resnet50_16s`: the last stage by 2), and open-mmlab/mmsegmentation, mmseg/models/utils/res_layer.py. With
    `contract_dilation` of MMSegmentation, the first block has half the dilation. Its ResNetV1c and V1d,
    backbones/resnet.py, begin with three convolutions (`stem`); V1d averages in a shortcut before its convolution.

    In float64: the rounding errors of convolutions in float32 are as large as the tolerance of the tests.
    """
    weights, images = {key: value.double() for key, value in weights.items()}, images.double()
    x = images
    if "stem.0.weight" in weights:
        for number, stride in ((0, 2), (3, 1), (6, 1)):
            x = F.conv2d(x, weights[f"stem.{number}.weight"], stride=stride, padding=1)
            x = F.relu(batch_norm(x, weights, f"stem.{number + 1}"))
    else:
        x = F.relu(batch_norm(F.conv2d(x, weights["conv1.weight"], stride=2, padding=3), weights, "bn1"))
    x = F.max_pool2d(x, 3, stride=2, padding=1)
    for stage, dilation in enumerate(dilations, 1):
        for number in range(_depth(weights, f"layer{stage}.")):
            block = f"layer{stage}.{number}"
            stride = 2 if stage > 1 and number == 0 and dilation == 1 else 1
            own = dilation // 2 if contracts and number == 0 and dilation > 1 else dilation
            inner = F.relu(batch_norm(F.conv2d(x, weights[f"{block}.conv1.weight"]), weights, f"{block}.bn1"))
            inner = F.conv2d(inner, weights[f"{block}.conv2.weight"], stride=stride, padding=own, dilation=own)
            inner = F.conv2d(F.relu(batch_norm(inner, weights, f"{block}.bn2")), weights[f"{block}.conv3.weight"])
            inner = batch_norm(inner, weights, f"{block}.bn3")
            if f"{block}.downsample.2.weight" in weights:
                x = F.avg_pool2d(x, stride, stride, ceil_mode=True, count_include_pad=False)
                x = F.conv2d(x, weights[f"{block}.downsample.1.weight"])
                x = batch_norm(x, weights, f"{block}.downsample.2")
            elif f"{block}.downsample.0.weight" in weights:
                x = F.conv2d(x, weights[f"{block}.downsample.0.weight"], stride=stride)
                x = batch_norm(x, weights, f"{block}.downsample.1")
            x = F.relu(x + inner)
    return x.mean((2, 3)), x.flatten(2).mT


# --------------------------------------------------------------------------------------------- tensors of files


class Draw:
    """Random tensors for a file, of a scale at which every bias, scale, position and epsilon affects the features."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, std: float = 0.1, mean: float = 0.0) -> Tensor:
        return mean + std * torch.randn(shape, generator=self.generator)

    def linear(self, name: str, inputs: int, outputs: int, *, bias: bool = True) -> State:
        state = {f"{name}.weight": self(outputs, inputs, std=1.5 / math.sqrt(inputs))}
        return {**state, f"{name}.bias": self(outputs)} if bias else state

    def norm(self, name: str, dim: int) -> State:
        return {f"{name}.weight": self(dim, mean=1.0), f"{name}.bias": self(dim)}

    def batch_norm(self, name: str, dim: int) -> State:
        statistics = {f"{name}.running_mean": self(dim), f"{name}.running_var": self(dim, std=0.3).abs() + 0.5}
        return {**self.norm(name, dim), **statistics, f"{name}.num_batches_tracked": torch.tensor(1)}

    def convolution(self, name: str, inputs: int, outputs: int, size: int, *, bias: bool = False) -> State:
        state = {f"{name}.weight": self(outputs, inputs, size, size, std=1.0 / math.sqrt(inputs * size * size))}
        return {**state, f"{name}.bias": self(outputs)} if bias else state

    def patches(self, name: str, dim: int, size: int, *, bias: bool = True) -> State:
        """Draw small values, so that the epsilon of the first norms has an effect."""
        state = {f"{name}.weight": self(dim, 3, size, size, std=0.02 / size)}
        return {**state, f"{name}.bias": self(dim, std=0.01)} if bias else state


def vit_state(
    seed: int,
    *,
    dim: int = 128,
    depth: int = 2,
    patch: int = 16,
    side: int = 3,
    registers: int = 0,
    scale: str | None = None,
    swiglu: bool = False,
    last_norm: str = "norm",
) -> State:
    """Tensors of `vit`; `scale` names the layer scale of block and branch (`gamma_{}`, `ls{}.gamma`)."""
    draw = Draw(seed)
    state = {
        "cls_token": draw(1, 1, dim, std=0.02),
        "pos_embed": draw(1, 1 + side * side, dim, std=0.02),
        **({"register_tokens": draw(1, registers, dim, std=0.02)} if registers else {}),
        **draw.patches("patch_embed.proj", dim, patch),
        **draw.norm(last_norm, dim),
    }
    for block in (f"blocks.{number}" for number in range(depth)):
        state |= {**draw.norm(f"{block}.norm1", dim), **draw.norm(f"{block}.norm2", dim)}
        state |= {**draw.linear(f"{block}.attn.qkv", dim, 3 * dim), **draw.linear(f"{block}.attn.proj", dim, dim)}
        if swiglu:  # as wide as DINOv2's: two thirds of four times the width, rounded up to eight
            hidden = (int(4 * dim * 2 / 3) + 7) // 8 * 8
            state |= {**draw.linear(f"{block}.mlp.w12", dim, 2 * hidden), **draw.linear(f"{block}.mlp.w3", hidden, dim)}
        else:
            state |= {**draw.linear(f"{block}.mlp.fc1", dim, 4 * dim), **draw.linear(f"{block}.mlp.fc2", 4 * dim, dim)}
        if scale:
            state |= {f"{block}.{scale.format(branch)}": draw(dim, mean=0.8) for branch in (1, 2)}
    return state


def dinov3_state(
    seed: int,
    *,
    dim: int = 128,
    heads: int = 2,
    depth: int = 2,
    registers: int = 4,
    swiglu: bool = False,
    bias: str | None = "masked",
    base: float = 100.0,
) -> State:
    """Tensors of `dinov3`; `bias` of queries and values (`masked`, as released), also of keys (`plain`), or none."""
    draw = Draw(seed)
    state = {
        "cls_token": draw(1, 1, dim, std=0.02),
        "mask_token": draw(1, dim),
        **({"storage_tokens": draw(1, registers, dim, std=0.02)} if registers else {}),
        "rope_embed.periods": (base ** (torch.arange(dim // heads // 4) / (dim // heads // 4))).bfloat16(),
        **draw.patches("patch_embed.proj", dim, 16),
        **draw.norm("norm", dim),
    }
    for block in (f"blocks.{number}" for number in range(depth)):
        state |= {**draw.norm(f"{block}.norm1", dim), **draw.norm(f"{block}.norm2", dim)}
        state |= draw.linear(f"{block}.attn.qkv", dim, 3 * dim, bias=bias is not None)
        if bias == "masked":
            state[f"{block}.attn.qkv.bias_mask"] = torch.cat([torch.ones(dim), torch.zeros(dim), torch.ones(dim)])
        state |= draw.linear(f"{block}.attn.proj", dim, dim)
        if swiglu:
            hidden = (int(4 * dim * 2 / 3) + 7) // 8 * 8
            state |= {**draw.linear(f"{block}.mlp.w1", dim, hidden), **draw.linear(f"{block}.mlp.w2", dim, hidden)}
            state |= draw.linear(f"{block}.mlp.w3", hidden, dim)
        else:
            state |= {**draw.linear(f"{block}.mlp.fc1", dim, 4 * dim), **draw.linear(f"{block}.mlp.fc2", 4 * dim, dim)}
        state |= {f"{block}.ls{branch}.gamma": draw(dim, mean=0.8) for branch in (1, 2)}
    return state


def open_clip_state(seed: int, *, dim: int = 128, scale: bool = False) -> State:
    """Tensors of `open_clip`, with its projection; `scale`: with layer scale."""
    draw = Draw(seed)
    state = {
        "class_embedding": draw(dim, std=0.02),
        "positional_embedding": draw(10, dim, std=0.02),
        "proj": draw(dim, 16),
        **draw.patches("conv1", dim, 16, bias=False),
        **draw.norm("ln_pre", dim),
        **draw.norm("ln_post", dim),
    }
    for block in (f"transformer.resblocks.{number}" for number in range(2)):
        state |= {**draw.norm(f"{block}.ln_1", dim), **draw.norm(f"{block}.ln_2", dim)}
        qkv = draw.linear("", dim, 3 * dim)
        state |= {f"{block}.attn.in_proj_{kind.removeprefix('.')}": value for kind, value in qkv.items()}
        state |= draw.linear(f"{block}.attn.out_proj", dim, dim)
        state |= {**draw.linear(f"{block}.mlp.c_fc", dim, 4 * dim), **draw.linear(f"{block}.mlp.c_proj", 4 * dim, dim)}
        if scale:
            state |= {f"{block}.ls_{branch}.gamma": draw(dim, mean=0.8) for branch in (1, 2)}
    return state


def beit_state(
    seed: int, *, shared: bool, mean_pooling: bool, absolute: bool = False, side: int = 4, dim: int = 64, heads: int = 4
) -> State:
    """Tensors of `beit`: shared position biases, the norm of the mean instead of [CLS]'s, absolute positions."""
    draw = Draw(seed)
    entries = (2 * side - 1) ** 2 + 3

    def biases(owner: str) -> State:
        index = torch.zeros(side**2 + 1, side**2 + 1, dtype=torch.long)
        table = draw(entries, heads, std=1.0)
        return {f"{owner}.relative_position_bias_table": table, f"{owner}.relative_position_index": index}

    state = {"cls_token": draw(1, 1, dim, std=0.02), "mask_token": draw(1, 1, dim)}
    state |= {**draw.patches("patch_embed.proj", dim, 16), **draw.norm("fc_norm" if mean_pooling else "norm", dim)}
    state |= {"pos_embed": draw(1, side**2 + 1, dim, std=0.02)} if absolute else {}
    state |= biases("rel_pos_bias") if shared else {}
    for block in (f"blocks.{number}" for number in range(2)):
        state |= {**draw.norm(f"{block}.norm1", dim), **draw.norm(f"{block}.norm2", dim)}
        state |= {} if shared else biases(f"{block}.attn")
        state |= {f"{block}.attn.q_bias": draw(dim), f"{block}.attn.v_bias": draw(dim)}
        state |= draw.linear(f"{block}.attn.qkv", dim, 3 * dim, bias=False)
        state |= draw.linear(f"{block}.attn.proj", dim, dim)
        state |= {**draw.linear(f"{block}.mlp.fc1", dim, 4 * dim), **draw.linear(f"{block}.mlp.fc2", 4 * dim, dim)}
        state |= {f"{block}.gamma_{branch}": draw(dim, mean=0.8) for branch in (1, 2)}
    return state


def mmsegmentation_state(seed: int, *, dim: int = 128, final_norm: bool = True, patch_bias: bool = True) -> State:
    """Tensors of `mmsegmentation_vit`."""
    draw = Draw(seed)
    state = {"cls_token": draw(1, 1, dim, std=0.02), "pos_embed": draw(1, 10, dim, std=0.02)}
    state |= draw.patches("patch_embed.projection", dim, 16, bias=patch_bias)
    for layer in ("layers.0", "layers.1"):
        state |= {**draw.norm(f"{layer}.ln1", dim), **draw.norm(f"{layer}.ln2", dim)}
        qkv = draw.linear("", dim, 3 * dim)
        state |= {f"{layer}.attn.attn.in_proj_{kind.removeprefix('.')}": value for kind, value in qkv.items()}
        state |= draw.linear(f"{layer}.attn.attn.out_proj", dim, dim)
        state |= draw.linear(f"{layer}.ffn.layers.0.0", dim, 4 * dim)
        state |= draw.linear(f"{layer}.ffn.layers.1", 4 * dim, dim)
    return {**state, **draw.norm("ln1", dim)} if final_norm else state


def flax_arrays(
    seed: int, *, is_loca: bool, dim: int = 128, heads: int = 4, has_cls: bool = True
) -> dict[str, np.ndarray]:
    """Tensors of `flax_vit`."""
    draw = Draw(seed)
    stem, root = ("ToTokenSequence_0/", "") if is_loca else ("", "Transformer/")
    names = (
        ("LayerNorm_1", "MultiHeadDotProductAttention_0", "MlpBlock_0")
        if is_loca
        else ("LayerNorm_2", "MultiHeadDotProductAttention_1", "MlpBlock_3")
    )
    state = {
        f"{stem}embedding/kernel": draw(16, 16, 3, dim, std=0.02 / 16),
        f"{stem}embedding/bias": draw(dim, std=0.01),
        f"{root}encoder_norm/scale": draw(dim, mean=1.0),
        f"{root}encoder_norm/bias": draw(dim),
    }
    if is_loca:
        state["ToTokenSequence_0/posembed_input"] = draw(1, 3, 3, dim, std=0.02)
    else:
        state["Transformer/posembed_input/pos_embedding"] = draw(1, 9 + has_cls, dim, std=0.02)
        state |= {"cls": draw(1, 1, dim, std=0.02)} if has_cls else {}
    wide = partial(draw, std=1.5 / math.sqrt(dim))
    for block in (f"{root}encoderblock_{number}" for number in range(2)):
        for norm in ("LayerNorm_0", names[0]):
            state |= {f"{block}/{norm}/scale": draw(dim, mean=1.0), f"{block}/{norm}/bias": draw(dim)}
        for part in ("query", "key", "value"):
            state[f"{block}/{names[1]}/{part}/kernel"] = wide(dim, heads, dim // heads)
            state[f"{block}/{names[1]}/{part}/bias"] = draw(heads, dim // heads)
        state[f"{block}/{names[1]}/out/kernel"] = wide(heads, dim // heads, dim)
        state[f"{block}/{names[1]}/out/bias"] = draw(dim)
        for layer, (inputs, outputs) in enumerate(((dim, 4 * dim), (4 * dim, dim))):
            state[f"{block}/{names[2]}/Dense_{layer}/kernel"] = draw(inputs, outputs, std=1.5 / math.sqrt(inputs))
            state[f"{block}/{names[2]}/Dense_{layer}/bias"] = draw(outputs)
    return {key: value.numpy() for key, value in state.items()}


def resnet_state(
    seed: int,
    *,
    blocks: tuple[int, ...] = (1, 2, 1, 1),
    channels: int = 24,
    stem: int = 64,
    has_deep_stem: bool = False,
    averages: bool = False,
) -> State:
    """Tensors of `resnet` with bottlenecks; `has_deep_stem` as ResNetV1c, `averages` in shortcuts as ResNetV1d."""
    draw = Draw(seed)
    if has_deep_stem:
        state = {**draw.convolution("stem.0", 3, 32, 3), **draw.batch_norm("stem.1", 32)}
        state |= {**draw.convolution("stem.3", 32, 32, 3), **draw.batch_norm("stem.4", 32)}
        state |= {**draw.convolution("stem.6", 32, stem, 3), **draw.batch_norm("stem.7", stem)}
    else:
        state = {**draw.convolution("conv1", 3, stem, 7), **draw.batch_norm("bn1", stem)}
    width = stem
    for stage, count in enumerate(blocks):
        inner = channels * 2**stage
        for number in range(count):
            block = f"layer{stage + 1}.{number}"
            state |= {**draw.convolution(f"{block}.conv1", width, inner, 1), **draw.batch_norm(f"{block}.bn1", inner)}
            state |= {**draw.convolution(f"{block}.conv2", inner, inner, 3), **draw.batch_norm(f"{block}.bn2", inner)}
            state |= draw.convolution(f"{block}.conv3", inner, 4 * inner, 1)
            state |= draw.batch_norm(f"{block}.bn3", 4 * inner)
            if number == 0:
                state |= draw.convolution(f"{block}.downsample.{0 + averages}", width, 4 * inner, 1)
                state |= draw.batch_norm(f"{block}.downsample.{1 + averages}", 4 * inner)
            width = 4 * inner
    return state


def sines_and_cosines(side: int, dim: int, *, rows_first: bool) -> Tensor:
    """Rows first: facebookresearch/moco-v3, vits.py; columns first: facebookresearch/mae, util/pos_embed.py."""
    frequencies = 1 / 10_000 ** (torch.arange(dim // 4) / (dim // 4))
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    order = (rows, columns) if rows_first else (columns, rows)
    angles = [place.flatten()[:, None] * frequencies for place in order]
    grid = torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1)
    return torch.cat([torch.zeros(1, dim), grid])[None]
