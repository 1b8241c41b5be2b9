"""ConvNeXt, ResNet and Swin in the files of each project, against the project's own network."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from cribo.models import Backbone, load_backbone

State = dict[str, Tensor]
SIZES = ((64, 64), (96, 96), (64, 128))


def randomise(module: nn.Module, seed: int = 0) -> None:
    """With the zeros and ones of an initialisation, a wrong name can be right by chance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in sorted(module.state_dict().items()):
            if value.is_floating_point():
                value.add_(0.1 * torch.randn(value.shape, generator=generator))
                if key.endswith("running_var"):
                    value.abs_()


def images(size: tuple[int, int]) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


def assert_agrees(backbone: Backbone, size: tuple[int, int], feature_map: Tensor, global_token: Tensor) -> None:
    found = backbone.eval().encode(images(size).to(feature_map.dtype))
    assert found.grid == tuple(feature_map.shape[2:])
    torch.testing.assert_close(found.tokens, feature_map.flatten(2).mT, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.global_token, global_token, rtol=0, atol=1e-5)


def format_of(backbone: Backbone) -> str:
    assert backbone.loaded is not None
    return backbone.loaded.format


# -------------------------------------------------------------------------------------------------- Hugging Face

MAPS: dict[str, Any] = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 2, 1, 1]}
OF_HUGGING_FACE = {
    "ConvNeXt": lambda: transformers.ConvNextModel(transformers.ConvNextConfig(**MAPS)),
    "ConvNeXt V2": lambda: transformers.ConvNextV2Model(transformers.ConvNextV2Config(**MAPS)),
    "ResNet, bottlenecks": lambda: transformers.ResNetModel(
        transformers.ResNetConfig(hidden_sizes=[32, 64, 96, 128], depths=[1, 2, 1, 1])
    ),
    "ResNet, basic": lambda: transformers.ResNetModel(transformers.ResNetConfig(**MAPS, layer_type="basic")),
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("of_classifier", [False, True])
@pytest.mark.parametrize("build", OF_HUGGING_FACE.values(), ids=OF_HUGGING_FACE)
def test_networks_of_hugging_face(tmp_path: Path, build: Any, of_classifier: bool, size: tuple[int, int]):
    model: Any = build().eval()
    randomise(model)
    if of_classifier:  # one file without its configuration
        prefix = "resnet." if "ResNet" in type(model).__name__ else "convnext."
        state = {prefix + key: value for key, value in model.state_dict().items()}
        torch.save({**state, "classifier.weight": torch.ones(2, 32)}, tmp_path / "weights.pth")
    else:
        model.save_pretrained(tmp_path)
    backbone = load_backbone(tmp_path / "weights.pth" if of_classifier else tmp_path)
    if "ResNet" in type(model).__name__:  # its features are in the hundreds
        model, backbone = model.double(), backbone.double()
    with torch.no_grad():
        output = model(images(size).to(next(model.parameters()).dtype))
    feature_map = output.last_hidden_state
    if hasattr(model, "layernorm"):  # the pooled features are normalised, and so is each place here
        feature_map = model.layernorm(feature_map.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        assert (backbone.numerics.norm_eps, backbone.numerics.final_norm_eps) == (1e-6, 1e-12)
    assert_agrees(backbone, size, feature_map, output.pooler_output.flatten(1))
    assert format_of(backbone).startswith("Hugging Face")


def test_a_resnet_that_timm_does_not_have_is_refused(tmp_path: Path):
    config = transformers.ResNetConfig(
        hidden_sizes=[32, 64, 96, 128], depths=[1, 1, 1, 1], downsample_in_bottleneck=True
    )
    transformers.ResNetModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="downsample_in_bottleneck set: timm has no such ResNet"):
        load_backbone(tmp_path)


SWIN: dict[str, Any] = {"embed_dim": 16, "depths": [1, 2, 2], "num_heads": [1, 2, 4], "window_size": 4}


@pytest.mark.parametrize("is_bare", [False, True])
@pytest.mark.parametrize("size", [*SIZES, (80, 128)], ids=str)  # windows of 4 x 4: 64, 96 and 128 pixels give 4, 6, 8
def test_swin_of_hugging_face(tmp_path: Path, size: tuple[int, int], is_bare: bool):
    model: Any = transformers.SwinModel(transformers.SwinConfig(**SWIN, image_size=64)).eval()
    randomise(model)
    if is_bare:  # with the names that transformers 5 has in memory
        torch.save({f"swin.{key}": value for key, value in model.state_dict().items()}, tmp_path / "weights.pth")
    else:
        model.save_pretrained(tmp_path)
    backbone = load_backbone(tmp_path / "weights.pth" if is_bare else tmp_path)
    assert backbone.image_size == 64
    # Its modules keep the shift of the last image, so a model is compared at one size only.
    with torch.no_grad():
        output = model(images(size))
    grid = (size[0] // 16, size[1] // 16)
    assert_agrees(backbone, size, output.last_hidden_state.mT.unflatten(2, grid), output.pooler_output)
    assert format_of(backbone) == "Hugging Face Swin"
    with pytest.raises(ValueError, match=r"a map of 3x4 places, fewer than the 4 of a window"):
        backbone.encode(images((48, 64)))


# --------------------------------------------------------------------------------------------- ConvNeXt's own code


class ConvNeXt(nn.Module):
    """Both versions in the original's names: `downsample_layers`, `stages`, `norm`."""

    def __init__(self, version: int, dims: tuple[int, ...] = (8, 16, 24, 32), depths: tuple[int, ...] = (1, 2, 1, 1)):
        super().__init__()
        self.version = version
        self.downsample_layers: Any = nn.ModuleList()
        self.stages: Any = nn.ModuleList()
        for index, (dim, depth) in enumerate(zip(dims, depths, strict=True)):
            norm = nn.LayerNorm(dims[index - 1] if index else dim, eps=1e-6)
            convolution = nn.Conv2d(dims[index - 1], dim, 2, 2) if index else nn.Conv2d(3, dim, 4, 4)
            self.downsample_layers.append(nn.ModuleList([norm, convolution] if index else [convolution, norm]))
            self.stages.append(nn.ModuleList(self.block(dim) for _ in range(depth)))
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6)

    def block(self, dim: int) -> Any:
        block: Any = nn.Module()
        block.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        block.norm = nn.LayerNorm(dim, eps=1e-6)
        block.pwconv1, block.pwconv2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        if self.version == 1:
            block.gamma = nn.Parameter(torch.ones(dim))
        else:
            block.grn = nn.Module()
            block.grn.gamma = nn.Parameter(torch.zeros(1, 1, 1, 4 * dim))
            block.grn.beta = nn.Parameter(torch.zeros(1, 1, 1, 4 * dim))
        return block

    def branch(self, block: Any, x: Tensor) -> Tensor:
        y = F.gelu(block.pwconv1(block.norm(block.dwconv(x).permute(0, 2, 3, 1))))
        if self.version == 2:
            energy = y.square().sum(dim=(1, 2), keepdim=True).sqrt()
            y = block.grn.gamma * y * energy / (energy.mean(dim=-1, keepdim=True) + 1e-6) + block.grn.beta + y
        y = block.pwconv2(y)
        return (block.gamma * y if self.version == 1 else y).permute(0, 3, 1, 2)

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for downsample, stage in zip(self.downsample_layers, self.stages, strict=True):
            for layer in downsample:
                is_norm = isinstance(layer, nn.LayerNorm)
                x = layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if is_norm else layer(x)
            for block in stage:
                x = x + self.branch(block, x)
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), self.norm(x.mean(dim=(2, 3)))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("version", [1, 2])
def test_convnext(tmp_path: Path, version: int, size: tuple[int, int]):
    model = ConvNeXt(version).eval()
    randomise(model)
    content = {"model": {**model.state_dict(), "head.weight": torch.ones(2, 32), "head.bias": torch.ones(2)}}
    torch.save(content, tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth")
    assert_agrees(backbone, size, *model(images(size)))
    assert format_of(backbone) == "ConvNeXt"


@pytest.mark.parametrize("name", ["convnext_tiny", "convnext_atto", "convnextv2_atto", "convnext_tiny_hnf"])
def test_convnext_of_timm_without_a_name(tmp_path: Path, name: str):
    args: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
    model: Any = timm.create_model(name, **args).eval()
    randomise(model)
    # As in open_clip's files, whose towers are timm's.
    state = {f"visual.trunk.{key}": value for key, value in model.state_dict().items()}
    torch.save({**state, "logit_scale": torch.tensor(1.0)}, tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth")
    with torch.no_grad():
        feature_map = model.forward_features(images(SIZES[2]))
        pooled = model.forward_head(feature_map, pre_logits=True)
        normed = model.head.norm(feature_map) if hasattr(model.head, "norm") else feature_map
    assert_agrees(backbone, SIZES[2], normed, pooled)
    assert backbone.mean == (0.48145466, 0.4578275, 0.40821073)


# ------------------------------------------------------------------------------------------------- Swin's own code


class Swin(nn.Module):
    """Swin in the original's names, built for one size of images; stages merge patches at their end."""

    def __init__(self, size: tuple[int, int], window: int = 4, dim: int = 16, heads: tuple[int, ...] = (1, 2, 4)):
        super().__init__()
        self.size, self.window, self.heads = size, window, heads
        self.patch_embed: Any = nn.Module()
        self.patch_embed.proj, self.patch_embed.norm = nn.Conv2d(3, dim, 4, 4), nn.LayerNorm(dim)
        self.layers: Any = nn.ModuleList()
        for stage, count in enumerate(heads):
            layer: Any = nn.Module()
            width = dim * 2**stage
            layer.blocks = nn.ModuleList(self.block(width, count) for _ in range(2))
            if stage + 1 < len(heads):
                layer.downsample = nn.Module()
                layer.downsample.norm = nn.LayerNorm(4 * width)
                layer.downsample.reduction = nn.Linear(4 * width, 2 * width, bias=False)
            self.layers.append(layer)
        self.norm = nn.LayerNorm(dim * 2 ** (len(heads) - 1))

    def block(self, dim: int, heads: int) -> Any:
        block: Any = nn.Module()
        block.norm1, block.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        block.attn = nn.Module()
        block.attn.qkv, block.attn.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        block.attn.relative_position_bias_table = nn.Parameter(torch.zeros((2 * self.window - 1) ** 2, heads))
        places = torch.cartesian_prod(torch.arange(self.window), torch.arange(self.window))
        offsets = places[:, None] - places[None] + self.window - 1
        block.attn.register_buffer("relative_position_index", offsets[..., 0] * (2 * self.window - 1) + offsets[..., 1])
        block.mlp = nn.Module()
        block.mlp.fc1, block.mlp.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        return block

    def attend(self, attention: Any, x: Tensor, heads: int, shift: int) -> Tensor:
        """Each place attends to the places of its window that are its neighbours in the image, too."""
        _, height, width, dim = x.shape
        w = self.window
        rolled = torch.roll(x, (-shift, -shift), (1, 2))
        region = torch.zeros(height, width)
        if shift:  # places from the other side of the image are regions of their own
            for axis, length in ((0, height), (1, width)):
                far = (torch.arange(length) >= length - shift).float() * (axis + 1)
                region = region + (far[:, None] if axis == 0 else far[None])

        def windows(values: Tensor) -> Tensor:
            return values.unflatten(1, (-1, w)).unflatten(3, (-1, w)).transpose(2, 3).flatten(3, 4).flatten(1, 2)

        parts = windows(rolled)  # (B, windows, w * w, D)
        same = windows(region[None, ..., None])[0, ..., 0]
        q, k, v = attention.qkv(parts).unflatten(-1, (3, heads, -1)).permute(3, 0, 1, 4, 2, 5)
        index = attention.relative_position_index.flatten()
        bias = attention.relative_position_bias_table[index].unflatten(0, (w * w, w * w)).permute(2, 0, 1)
        scores = q @ k.mT / (dim // heads) ** 0.5 + bias
        scores = scores - 100.0 * (same[:, None, :, None] != same[:, None, None, :])
        mixed = attention.proj((scores.softmax(-1) @ v).transpose(2, 3).flatten(3))
        grid = mixed.unflatten(1, (height // w, width // w)).unflatten(3, (w, w)).transpose(2, 3)
        return torch.roll(grid.flatten(3, 4).flatten(1, 2), (shift, shift), (1, 2))

    @torch.no_grad()
    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patch_embed.norm(self.patch_embed.proj(images).permute(0, 2, 3, 1))
        for layer, heads in zip(self.layers, self.heads, strict=True):
            for index, block in enumerate(layer.blocks):
                shift = self.window // 2 if index % 2 and min(x.shape[1:3]) > self.window else 0
                x = x + self.attend(block.attn, block.norm1(x), heads, shift)
                x = x + block.mlp.fc2(F.gelu(block.mlp.fc1(block.norm2(x))))
            if hasattr(layer, "downsample"):
                corners = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
                x = layer.downsample.reduction(layer.downsample.norm(torch.cat(corners, dim=-1)))
        x = self.norm(x).permute(0, 3, 1, 2)
        return x, x.mean(dim=(2, 3))


# Sizes that windows of 4 x 4 divide on every map: the original takes no others.
@pytest.mark.parametrize("size", [(64, 64), (128, 128), (64, 128), (128, 192)], ids=str)
@pytest.mark.parametrize("is_simmim", [False, True])
def test_swin(tmp_path: Path, size: tuple[int, int], is_simmim: bool):
    model = Swin(size).eval()
    randomise(model)
    state = {**model.state_dict(), "layers.0.blocks.1.attn_mask": torch.zeros(16, 16, 16)}
    if is_simmim:
        state = {f"encoder.{key}": value for key, value in {**state, "mask_token": torch.ones(1, 1, 16)}.items()}
        state |= {"decoder.0.weight": torch.ones(3, 64, 1, 1), "decoder.0.bias": torch.ones(3)}
    else:
        state |= {"head.weight": torch.ones(2, 64), "head.bias": torch.ones(2)}
    torch.save({"model": state, "optimizer": {}, "epoch": 1}, tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth")
    assert_agrees(backbone, size, *model(images(size)))
    assert backbone.image_size == 64
    if is_simmim:
        assert backbone.mean == (0.485, 0.456, 0.406)


def test_swin_of_timm_without_a_name(tmp_path: Path):
    model: Any = timm.create_model("swin_tiny_patch4_window7_224", embed_dim=32, num_heads=(2, 2, 4, 4)).eval()
    randomise(model)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth")
    with torch.no_grad():
        feature_map = model.forward_features(images((224, 224))).permute(0, 3, 1, 2)
    assert_agrees(backbone, (224, 224), feature_map, feature_map.mean(dim=(2, 3)))


@pytest.mark.parametrize(
    "name",
    ["swin_tiny_patch4_window7_224", "swin_base_patch4_window12_384", "convnext_base", "convnextv2_huge"],
)
def test_networks_with_a_name_are_recognised(name: str):
    from cribo.models.formats.architecture import infer_architecture

    state = timm.create_model(name, device="meta", num_classes=0).state_dict()
    found = infer_architecture(state)
    assert (found.name, found.args) == (name, {})
