"""Formats beside the usual ones: files in each project's layout, against its arithmetic written out in plain torch."""

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cribo.models import Backbone, load_backbone, save_backbone

State = dict[str, Tensor]


def draw(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> State:
    """Random tensors; scales lie near 1, variances above 0."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        if key.endswith("running_var"):
            value = 1 + value.abs()
        elif len(shape) == 1 and (key.endswith(".weight") or "gamma" in key):
            value = 1 + 0.1 * value
        elif len(shape) > 1:
            value = value / math.sqrt(math.prod(shape[1:]))
        else:
            value = 0.1 * value
        state[key] = value
    return state


def under(prefix: str, state: State) -> State:
    return {prefix + key: value for key, value in state.items()}


def images(height: int, width: int) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(height * 1000 + width))


def assert_tokens(
    backbone: Backbone, expected: Callable[[Tensor], Tensor], sizes: list[tuple[int, int]], atol: float = 1e-5
) -> None:
    """Of a map (B, D, h, w) or of tokens (B, N, D), whose first may be [CLS]."""
    for height, width in sizes:
        batch = images(height, width)
        with torch.no_grad():
            found, wanted = backbone.eval().encode(batch), expected(batch)
        if wanted.ndim == 4:
            wanted = wanted.flatten(2).mT
        if wanted.shape[1] == found.tokens.shape[1] + 1:
            torch.testing.assert_close(found.global_token, wanted[:, 0], rtol=0, atol=atol)
            wanted = wanted[:, 1:]
        torch.testing.assert_close(found.tokens, wanted, rtol=0, atol=atol)


def linear(state: State, name: str, tokens: Tensor) -> Tensor:
    return F.linear(tokens, state[f"{name}.weight"], state.get(f"{name}.bias"))


def layer_norm(state: State, name: str, tokens: Tensor, eps: float = 1e-6) -> Tensor:
    return F.layer_norm(tokens, tokens.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)


def batch_norm(state: State, name: str, value: Tensor) -> Tensor:
    mean, var, weight, bias = (state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
    return F.batch_norm(value, mean, var, weight, bias, eps=1e-5)


def norm_shapes(name: str, width: int, *, is_batch: bool = False) -> dict[str, tuple[int, ...]]:
    parts = ("weight", "bias", *(("running_mean", "running_var") if is_batch else ()))
    return {f"{name}.{part}": (width,) for part in parts}


def linear_shapes(name: str, inputs: int, outputs: int, *, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), **({f"{name}.bias": (outputs,)} if bias else {})}


# --------------------------------------------------------------------------------------------------------- ResNets

# How a bottleneck names its three convolutions, their norms, and the shortcut with its norm.
TORCHVISION = (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"), ("downsample.0", "downsample.1"))
RESNET_D = (*TORCHVISION[:3], ("downsample.1", "downsample.2"))
DETECTRON2 = tuple((name, f"{name}.norm") for name in ("conv1", "conv2", "conv3", "shortcut"))


def resnet_shapes(stages: list[str], stem: int, names: Any, width: int = 8, groups: int = 1) -> dict[str, Any]:
    """Stages of one and two bottlenecks, as 16, 32, 64 and 128 channels for a width of 4 each."""
    shapes: dict[str, tuple[int, ...]] = {}
    inputs = stem
    for number, stage in enumerate(stages):
        inner = width * 2**number
        for block in range(1 + number % 2):
            convolutions = [(inner, inputs, 1, 1), (inner, inner // groups, 3, 3), (4 * inner, inner, 1, 1)]
            convolutions += [(4 * inner, inputs, 1, 1)] if block == 0 else []
            for (convolution, norm), shape in zip(names, convolutions, strict=False):
                shapes[f"{stage}.{block}.{convolution}.weight"] = shape
                shapes |= norm_shapes(f"{stage}.{block}.{norm}", shape[0], is_batch=True)
            inputs = 4 * inner
    return shapes


def resnet(
    state: State, batch: Tensor, stages: list[str], names: Any, *, dilated: bool = False, averages: bool = False
) -> Tensor:
    """The stages of a ResNet, behind its stem. Strides lie in the 3x3 convolution.

    `dilated`: the last two stages keep their size, and the first block of each keeps the dilation before it.
    `averages`: shortcuts of stride 2 average first (ResNet-D).
    """
    value = batch
    before = 1
    for number, stage in enumerate(stages):
        stride, dilation = (1, 1) if number == 0 else (2, 1)
        if dilated and number >= 2:
            stride, dilation = 1, 2 ** (number - 1)
        for block in range(1 + number % 2):
            name = f"{stage}.{block}"
            own_stride, own_dilation = (stride, before) if block == 0 else (1, dilation)
            out = value
            for index, (convolution, norm) in enumerate(names[:3]):
                options: dict[str, Any] = {}
                if index == 1:
                    options = {"stride": own_stride, "padding": own_dilation, "dilation": own_dilation}
                out = F.conv2d(out, state[f"{name}.{convolution}.weight"], **options)
                out = batch_norm(state, f"{name}.{norm}", out)
                out = F.relu(out) if index < 2 else out
            if block == 0:
                if averages and own_stride == 2:
                    value = F.avg_pool2d(value, 2, 2, ceil_mode=True, count_include_pad=False)
                    own_stride = 1
                convolution, norm = names[3]
                value = F.conv2d(value, state[f"{name}.{convolution}.weight"], stride=own_stride)
                value = batch_norm(state, f"{name}.{norm}", value)
            value = F.relu(value + out)
        before = dilation
    return value


LAYERS = ["layer1", "layer2", "layer3", "layer4"]


@pytest.mark.parametrize("stem", [128, 256])
def test_a_wide_resnet_of_swav(tmp_path: Path, stem: int):
    """RN50w2 and RN50w4 multiply the channels of the stem, too, which are 64 in any other ResNet."""
    shapes = {"conv1.weight": (stem, 3, 7, 7), **norm_shapes("bn1", stem, is_batch=True)}
    state = draw(shapes | resnet_shapes(LAYERS, stem, TORCHVISION))
    head = {"projection_head.0.weight": torch.ones(2, 2), "prototypes.weight": torch.ones(2, 2)}
    torch.save(under("module.", {**state, **head}), tmp_path / "swav_RN50w2_400ep_pretrain.pth.tar")

    def expected(batch: Tensor) -> Tensor:
        # Padded by 1 and then, in the convolution, by 2.
        value = F.conv2d(F.pad(batch, (1, 1, 1, 1)), state["conv1.weight"], stride=2, padding=2)
        value = F.max_pool2d(F.relu(batch_norm(state, "bn1", value)), 3, 2, 1)
        return resnet(state, value, LAYERS, TORCHVISION)

    backbone = load_backbone(tmp_path / "swav_RN50w2_400ep_pretrain.pth.tar")
    assert_tokens(backbone, expected, [(64, 64), (96, 96), (64, 128)])
    assert backbone.loaded is not None
    assert set(backbone.loaded.dropped) == {"head"}
    save_backbone(backbone, tmp_path / "saved")
    assert_tokens(load_backbone(tmp_path / "saved"), expected, [(64, 64)])


@pytest.mark.parametrize("dilated", [True, False])
@pytest.mark.parametrize("averages", [False, True])
def test_mmsegmentation_resnets_with_a_deep_stem(tmp_path: Path, dilated: bool, averages: bool):
    """ResNetV1c and V1d; strides and dilations stand in the configuration that the file keeps."""
    names = RESNET_D if averages else TORCHVISION
    shapes: dict[str, tuple[int, ...]] = {}
    for number, (inputs, outputs) in enumerate(((3, 32), (32, 32), (32, 64))):
        shapes[f"stem.{3 * number}.weight"] = (outputs, inputs, 3, 3)
        shapes |= norm_shapes(f"stem.{3 * number + 1}", outputs, is_batch=True)
    state = draw(shapes | resnet_shapes(LAYERS, 64, names))

    def expected(batch: Tensor) -> Tensor:
        value = batch
        for number in range(3):
            value = F.conv2d(value, state[f"stem.{3 * number}.weight"], stride=2 if number == 0 else 1, padding=1)
            value = F.relu(batch_norm(state, f"stem.{3 * number + 1}", value))
        return resnet(state, F.max_pool2d(value, 3, 2, 1), LAYERS, names, dilated=dilated, averages=averages)

    strides, dilations = ("(1, 2, 1, 1)", "(1, 1, 2, 4)") if dilated else ("(1, 2, 2, 2)", "(1, 1, 1, 1)")
    config = (
        f"model = dict(type='EncoderDecoder', backbone=dict(type='ResNetV1c', depth=50, dilations={dilations},\n"
        f"    strides={strides}, norm_cfg=dict(type='SyncBN'), contract_dilation=True),\n"
        "    decode_head=dict(type='ASPPHead', dilations=(1, 12)))"
    )
    content = {**under("backbone.", state), "decode_head.conv_seg.weight": torch.ones(2, 2)}
    for meta in ({"config": config}, {"cfg": config}):  # of MMCV and of MMEngine
        torch.save({"meta": meta, "state_dict": content}, tmp_path / "pspnet.pth")
        if dilated and averages:
            with pytest.raises(ValueError, match=r"pspnet\.pth.*timm averages in the shortcuts of a dilated ResNet-D"):
                load_backbone(tmp_path / "pspnet.pth")
            continue
        backbone = load_backbone(tmp_path / "pspnet.pth")
        assert backbone.patch_size == (8 if dilated else 32)
        assert_tokens(backbone, expected, [(64, 64), (96, 96), (64, 128)])
    torch.save({"state_dict": content}, tmp_path / "pspnet.pth")
    backbone = load_backbone(tmp_path / "pspnet.pth")
    assert "does not say which strides and dilations its ResNet has" in str(backbone.loaded)
    if dilated and not averages:
        backbone = load_backbone(tmp_path / "pspnet.pth", args={"output_stride": 8})
        assert_tokens(backbone, expected, [(64, 64)])


def detectron2_state() -> State:
    shapes = {"stem.conv1.weight": (64, 3, 7, 7), **norm_shapes("stem.conv1.norm", 64, is_batch=True)}
    return draw(shapes | resnet_shapes([f"res{number}" for number in range(2, 6)], 64, DETECTRON2))


def detectron2_tokens(state: State, batch: Tensor) -> Tensor:
    value = F.conv2d(batch, state["stem.conv1.weight"], stride=2, padding=3)
    value = F.max_pool2d(F.relu(batch_norm(state, "stem.conv1.norm", value)), 3, 2, 1)
    return resnet(state, value, [f"res{number}" for number in range(2, 6)], DETECTRON2)


def test_a_resnet_converted_for_detectron2(tmp_path: Path):
    """As its tool `convert-torchvision-to-d2.py` writes it: a pickle of NumPy arrays."""
    state = detectron2_state()
    arrays = {key: value.numpy() for key, value in {**state, "stem.fc.weight": torch.ones(3, 3)}.items()}
    content = {"model": arrays, "__author__": "DenseCL", "matching_heuristics": True}
    for protocol in (2, 4):
        (tmp_path / "r50.pkl").write_bytes(pickle.dumps(content, protocol))
        backbone = load_backbone(tmp_path / "r50.pkl")
        assert_tokens(backbone, lambda batch: detectron2_tokens(state, batch), [(64, 64), (96, 96), (64, 128)])
    assert backbone.mean == (0.485, 0.456, 0.406)
    assert "RGB" in str(backbone.loaded)


CONFIG = """
INPUT:
  FORMAT: {format}
MODEL:
  PIXEL_MEAN: {mean}
  PIXEL_STD: {std}
  RESNETS:
    STRIDE_IN_1X1: {stride}
"""


def test_a_network_trained_by_detectron2_needs_its_configuration(tmp_path: Path):
    state = detectron2_state()
    heads = {"proposal_generator.rpn_head.conv.weight": torch.ones(2, 2), "pixel_mean": torch.ones(3, 1, 1)}
    content = {**under("backbone.bottom_up.", state), **heads, "backbone.fpn_lateral2.weight": torch.ones(2, 2)}
    torch.save({"model": content, "iteration": 3}, tmp_path / "model_final.pth")
    with pytest.raises(ValueError, match=r"model_final\.pth .*config\.yaml .*colour"):
        load_backbone(tmp_path / "model_final.pth")
    # As networks of Caffe are: strides in another convolution.
    caffe = CONFIG.format(format="BGR", mean=[103.53, 116.28, 123.675], std=[1.0, 1.0, 1.0], stride="true")
    (tmp_path / "config.yaml").write_text(caffe)
    with pytest.raises(ValueError, match=r"STRIDE_IN_1X1.*no network of timm"):
        load_backbone(tmp_path / "model_final.pth")
    mean, std = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
    (tmp_path / "config.yaml").write_text(CONFIG.format(format="RGB", mean=mean, std=std, stride="false"))
    backbone = load_backbone(tmp_path / "model_final.pth")
    assert_tokens(backbone, lambda batch: detectron2_tokens(state, batch), [(64, 64)])
    assert backbone.mean == pytest.approx((0.485, 0.456, 0.406))
    (tmp_path / "config.yaml").write_text(
        CONFIG.format(format="BGR", mean=mean[::-1], std=[1.0, 2.0, 4.0], stride="false")
    )
    backbone = load_backbone(tmp_path / "model_final.pth")
    assert_tokens(backbone, lambda batch: detectron2_tokens(state, batch.flip(1)), [(64, 64)])
    assert backbone.mean == pytest.approx((0.485, 0.456, 0.406))
    assert backbone.std == pytest.approx((4 / 255, 2 / 255, 1 / 255))


# ---------------------------------------------------------------------------------------------------- transformers


def attention(state: State, name: str, tokens: Tensor, heads: int) -> Tensor:
    query, key, value = linear(state, f"{name}.qkv", tokens).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
    return linear(state, f"{name}.proj", (weights @ value).transpose(1, 2).flatten(2))


def mlp(state: State, name: str, tokens: Tensor) -> Tensor:
    return linear(state, f"{name}.fc2", F.gelu(linear(state, f"{name}.fc1", tokens)))


def vit_shapes(dim: int, depth: int, positions: int) -> dict[str, tuple[int, ...]]:
    shapes = {"cls_token": (1, 1, dim), "pos_embed": (1, positions, dim), **norm_shapes("norm", dim)}
    for block in (f"blocks.{number}" for number in range(depth)):
        shapes |= norm_shapes(f"{block}.norm1", dim) | norm_shapes(f"{block}.norm2", dim)
        shapes |= linear_shapes(f"{block}.attn.qkv", dim, 3 * dim) | linear_shapes(f"{block}.attn.proj", dim, dim)
        shapes |= linear_shapes(f"{block}.mlp.fc1", dim, 4 * dim) | linear_shapes(f"{block}.mlp.fc2", 4 * dim, dim)
    return shapes


def fixed_positions(side: int, dim: int) -> Tensor:
    """MoCo v3's sines and cosines, with zeros for [CLS]."""
    rates = 10_000.0 ** (-torch.arange(dim // 4) / (dim // 4))
    across = torch.arange(side).repeat_interleave(side)[:, None] * rates
    down = torch.arange(side).repeat(side)[:, None] * rates
    waves = torch.cat([across.sin(), across.cos(), down.sin(), down.cos()], dim=1)
    return torch.cat([torch.zeros(1, dim), waves])[None]


def test_moco_v3_with_a_convolutional_stem(tmp_path: Path):
    dim, depth = 384, 2
    shapes = vit_shapes(dim, depth, 10)
    for number, (inputs, outputs) in enumerate(((3, 48), (48, 96), (96, 192), (192, 384))):
        shapes[f"patch_embed.proj.{3 * number}.weight"] = (outputs, inputs, 3, 3)
        shapes |= norm_shapes(f"patch_embed.proj.{3 * number + 1}", outputs, is_batch=True)
    shapes |= {"patch_embed.proj.12.weight": (dim, dim, 1, 1), "patch_embed.proj.12.bias": (dim,)}
    state = {**draw(shapes), "pos_embed": fixed_positions(3, dim)}

    def expected(batch: Tensor) -> Tensor:
        value = batch
        for number in range(4):
            value = F.conv2d(value, state[f"patch_embed.proj.{3 * number}.weight"], stride=2, padding=1)
            value = F.relu(batch_norm(state, f"patch_embed.proj.{3 * number + 1}", value))
        value = F.conv2d(value, state["patch_embed.proj.12.weight"], state["patch_embed.proj.12.bias"])
        tokens = torch.cat([state["cls_token"].expand(len(batch), -1, -1), value.flatten(2).mT], dim=1)
        side = math.isqrt(value.shape[2] * value.shape[3])
        tokens = tokens + (state["pos_embed"] if side == 3 else fixed_positions(side, dim))
        for block in ("blocks.0", "blocks.1"):
            tokens = tokens + attention(state, f"{block}.attn", layer_norm(state, f"{block}.norm1", tokens), 12)
            tokens = tokens + mlp(state, f"{block}.mlp", layer_norm(state, f"{block}.norm2", tokens))
        return layer_norm(state, "norm", tokens)

    head = {"head.0.weight": torch.ones(2, 2)}
    content = {
        **under("module.base_encoder.", {**{key: value + 1 for key, value in state.items()}, **head}),
        **under("module.momentum_encoder.", {**state, **head}),
        "module.predictor.0.weight": torch.ones(2, 2),
    }
    torch.save({"arch": "vit_conv_small", "epoch": 300, "state_dict": content}, tmp_path / "vit-conv-s.pth.tar")
    backbone = load_backbone(tmp_path / "vit-conv-s.pth.tar")
    assert_tokens(backbone, expected, [(48, 48)])  # the original takes no other size
    assert backbone.loaded is not None
    assert (backbone.loaded.format, backbone.loaded.network) == ("MoCo v3", "teacher")
    assert backbone.encode(images(64, 96)).grid == (4, 6)
    save_backbone(backbone, tmp_path / "saved")
    assert_tokens(load_backbone(tmp_path / "saved"), expected, [(48, 48)])


def xcit_shapes(dim: int, depth: int, heads: int, patch_size: int) -> dict[str, tuple[int, ...]]:
    shapes = {"cls_token": (1, 1, dim), **norm_shapes("norm", dim)}
    steps = int(math.log2(patch_size))
    for number in range(steps):
        outputs = dim // 2 ** (steps - 1 - number)
        shapes[f"patch_embed.proj.{2 * number}.0.weight"] = (outputs, 3 if number == 0 else outputs // 2, 3, 3)
        shapes |= norm_shapes(f"patch_embed.proj.{2 * number}.1", outputs, is_batch=True)
    shapes |= {"pos_embeder.token_projection.weight": (dim, 64, 1, 1), "pos_embeder.token_projection.bias": (dim,)}
    for name in (*(f"blocks.{number}" for number in range(depth)), "cls_attn_blocks.0", "cls_attn_blocks.1"):
        shapes |= norm_shapes(f"{name}.norm1", dim) | norm_shapes(f"{name}.norm2", dim)
        shapes |= linear_shapes(f"{name}.attn.qkv", dim, 3 * dim) | linear_shapes(f"{name}.attn.proj", dim, dim)
        shapes |= linear_shapes(f"{name}.mlp.fc1", dim, 4 * dim) | linear_shapes(f"{name}.mlp.fc2", 4 * dim, dim)
        shapes |= {f"{name}.gamma1": (dim,), f"{name}.gamma2": (dim,)}
        if name.startswith("blocks"):
            shapes |= {f"{name}.gamma3": (dim,), f"{name}.attn.temperature": (heads, 1, 1)}
            shapes |= norm_shapes(f"{name}.norm3", dim) | norm_shapes(f"{name}.local_mp.bn", dim, is_batch=True)
            for convolution in ("conv1", "conv2"):
                shapes |= {f"{name}.local_mp.{convolution}.weight": (dim, 1, 3, 3)}
                shapes |= {f"{name}.local_mp.{convolution}.bias": (dim,)}
    return shapes


def xcit_tokens(state: State, batch: Tensor, depth: int, heads: int, *, norms_all: bool) -> Tensor:
    steps = sum(key.startswith("patch_embed.proj.") and key.endswith(".0.weight") for key in state)
    value = batch
    for number in range(steps):
        value = F.gelu(value) if number else value
        value = F.conv2d(value, state[f"patch_embed.proj.{2 * number}.0.weight"], stride=2, padding=1)
        value = batch_norm(state, f"patch_embed.proj.{2 * number}.1", value)
    height, width = value.shape[2:]
    rates = 10_000.0 ** (2 * (torch.arange(32) // 2) / 32)
    waves = []
    for size in (height, width):
        angles = torch.arange(1, size + 1)[:, None] / (size + 1e-6) * 2 * math.pi / rates
        waves.append(torch.stack([angles[:, 0::2].sin(), angles[:, 1::2].cos()], dim=2).flatten(1))
    grid = torch.cat([waves[0][:, None].expand(-1, width, -1), waves[1][None].expand(height, -1, -1)], dim=2).permute(
        2, 0, 1
    )
    projection = "pos_embeder.token_projection"
    value = value + F.conv2d(grid[None], state[f"{projection}.weight"], state[f"{projection}.bias"])
    tokens = value.flatten(2).mT
    for block in (f"blocks.{number}" for number in range(depth)):
        normed = layer_norm(state, f"{block}.norm1", tokens)
        query, key, values = linear(state, f"{block}.attn.qkv", normed).unflatten(2, (3, heads, -1)).unbind(2)
        query, key = (F.normalize(each, dim=1) for each in (query, key))
        weights = torch.einsum("bnhc,bnhd->bhcd", query, key) * state[f"{block}.attn.temperature"]
        mixed = torch.einsum("bhcd,bnhd->bnhc", weights.softmax(-1), values).flatten(2)
        tokens = tokens + state[f"{block}.gamma1"] * linear(state, f"{block}.attn.proj", mixed)
        local = layer_norm(state, f"{block}.norm3", tokens).mT.unflatten(2, (height, width))
        for number, convolution in enumerate((f"{block}.local_mp.conv1", f"{block}.local_mp.conv2")):
            weight, bias = state[f"{convolution}.weight"], state[f"{convolution}.bias"]
            local = F.conv2d(local, weight, bias, padding=1, groups=len(weight))
            if number == 0:
                local = batch_norm(state, f"{block}.local_mp.bn", F.gelu(local))
        tokens = tokens + state[f"{block}.gamma3"] * local.flatten(2).mT
        changed = mlp(state, f"{block}.mlp", layer_norm(state, f"{block}.norm2", tokens))
        tokens = tokens + state[f"{block}.gamma2"] * changed
    tokens = torch.cat([state["cls_token"].expand(len(batch), -1, -1), tokens], dim=1)
    for block in ("cls_attn_blocks.0", "cls_attn_blocks.1"):
        normed = layer_norm(state, f"{block}.norm1", tokens)
        query, key, values = linear(state, f"{block}.attn.qkv", normed).unflatten(2, (3, heads, -1)).unbind(2)
        weights = torch.einsum("bhc,bnhc->bhn", query[:, 0], key) / math.sqrt(query.shape[-1])
        mixed = torch.einsum("bhn,bnhc->bhc", weights.softmax(-1), values).flatten(1)[:, None]
        changed = torch.cat([linear(state, f"{block}.attn.proj", mixed), normed[:, 1:]], dim=1)
        tokens = tokens + state[f"{block}.gamma1"] * changed
        normed = layer_norm(state, f"{block}.norm2", tokens)
        tokens = normed if norms_all else torch.cat([normed[:, :1], tokens[:, 1:]], dim=1)
        changed = state[f"{block}.gamma2"] * mlp(state, f"{block}.mlp", tokens[:, :1])
        tokens = tokens + torch.cat([changed, tokens[:, 1:]], dim=1)
    return layer_norm(state, "norm", tokens)


@pytest.mark.parametrize(("dim", "depth", "heads", "patch_size"), [(128, 2, 4, 16), (192, 12, 4, 8), (128, 12, 4, 16)])
def test_xcit(tmp_path: Path, dim: int, depth: int, heads: int, patch_size: int):
    state = draw(xcit_shapes(dim, depth, heads, patch_size))
    torch.save(state, tmp_path / "dino_xcit_pretrain.pth")
    backbone = load_backbone(tmp_path / "dino_xcit_pretrain.pth")
    norms_all = (dim, depth) != (128, 12)  # of the smallest network, only [CLS] is normalised

    def expected(batch: Tensor) -> Tensor:
        return xcit_tokens(state, batch, depth, heads, norms_all=norms_all)

    assert backbone.patch_size == patch_size
    assert_tokens(backbone, expected, [(224, 224), (96, 96), (64, 128)])
    head = {"head.mlp.0.weight": torch.ones(2, 2), "head.last_layer.weight_g": torch.ones(2, 2)}
    content = {
        "student": under("module.backbone.", {key: value + 1 for key, value in state.items()}) | under("module.", head),
        "teacher": under("backbone.", state) | head,
        "epoch": 3,
    }
    torch.save(content, tmp_path / "checkpoint.pth")
    trained = load_backbone(tmp_path / "checkpoint.pth")
    assert trained.loaded is not None
    assert trained.loaded.format == "DINO"
    assert_tokens(trained, expected, [(64, 128)])


def capi_shapes(dim: int, depth: int, heads: int, patch_size: int) -> dict[str, tuple[int, ...]]:
    shapes = {"registers": (1, 8, dim), "patch_embed.weight": (dim, 3, patch_size, patch_size)}
    shapes |= {"patch_embed.bias": (dim,), "mask_token": (1, dim)}
    for part in ("encoder", "decoder"):
        for number in range(depth):
            attn, feed = f"{part}.blocks.{number}.residual1", f"{part}.blocks.{number}.residual2"
            shapes |= {f"{attn}.norm.weight": (dim,), f"{feed}.norm.weight": (dim,)}
            for name in ("q_proj", "k_proj", "v_proj", "proj"):
                shapes[f"{attn}.fn.{name}.weight"] = (dim, dim)
            shapes[f"{attn}.fn.rope.freqs"] = (2, dim // heads)
            shapes |= {f"{feed}.fn.fc1.weight": (4 * dim, dim), f"{feed}.fn.fc2.weight": (dim, 4 * dim)}
    return shapes


def capi_tokens(state: State, batch: Tensor, depth: int, heads: int, patch_size: int) -> Tensor:
    def rms(value: Tensor) -> Tensor:
        return value * (value.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    patches = F.conv2d(batch, state["patch_embed.weight"], state["patch_embed.bias"], stride=patch_size)
    height, width = patches.shape[2:]
    places = [(i / max(height - 1, 1), j / max(width - 1, 1)) for i in range(height) for j in range(width)]
    edge = [(0, 0), (0.5, 0), (1, 0), (1, 0.5), (1, 1), (0.5, 1), (0, 1), (0, 0.5)]  # of eight registers
    coordinates = torch.tensor([*edge, *places])
    tokens = torch.cat([state["registers"].expand(len(batch), -1, -1), patches.flatten(2).mT], dim=1)
    for number in range(depth):
        name = f"encoder.blocks.{number}"
        attn = f"{name}.residual1.fn"
        normed = rms(tokens) * state[f"{name}.residual1.norm.weight"]
        query, key, value = (
            linear(state, f"{attn}.{part}", normed).unflatten(2, (heads, -1)) for part in ("q_proj", "k_proj", "v_proj")
        )
        angles = (coordinates @ state[f"{attn}.rope.freqs"])[:, None]
        half = query.shape[-1] // 2
        query, key = (
            each * angles.cos() + torch.cat([-each[..., half:], each[..., :half]], dim=-1) * angles.sin()
            for each in (query, key)
        )
        weights = torch.einsum("bnhc,bmhc->bhnm", query, key) / math.sqrt(2 * half)
        mixed = torch.einsum("bhnm,bmhc->bnhc", weights.softmax(-1), value).flatten(2)
        tokens = tokens + linear(state, f"{attn}.proj", mixed)
        normed = rms(tokens) * state[f"{name}.residual2.norm.weight"]
        tokens = tokens + mlp(state, f"{name}.residual2.fn", normed)
    return rms(tokens)[:, 8:]


def test_capi(tmp_path: Path):
    dim, depth, heads, patch_size = 64, 2, 4, 14
    state = draw(capi_shapes(dim, depth, heads, patch_size))
    for key in [key for key in state if key.endswith("freqs")]:
        state[key] *= 20
    head = {"head.last_layer.weight_g": torch.ones(2, 1), "head.last_layer.weight_v": torch.ones(2, 2)}
    torch.save({**under("backbone.", state), **head}, tmp_path / "student_ema_checkpoint.pth")
    backbone = load_backbone(tmp_path / "student_ema_checkpoint.pth")

    def expected(batch: Tensor) -> Tensor:
        return capi_tokens(state, batch, depth, heads, patch_size)

    assert (backbone.patch_size, backbone.image_size) == (14, 224)
    assert_tokens(backbone, expected, [(224, 224), (98, 98), (70, 126)])
    assert backbone.loaded is not None
    assert (backbone.loaded.format, set(backbone.loaded.dropped)) == ("CAPI", {"head", "decoder", "mask token"})
    assert "global token is the mean of the patch tokens" in str(backbone.loaded)
    save_backbone(backbone, tmp_path / "saved")
    assert_tokens(load_backbone(tmp_path / "saved"), expected, [(70, 126)])
