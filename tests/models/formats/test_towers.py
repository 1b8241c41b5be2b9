"""Image towers of CLIP and SigLIP, in the files of each project, against the project's own network."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from cribo.models import Backbone, build_backbone, load_backbone, load_pretrained

State = dict[str, Tensor]
SIZES = ((48, 48), (80, 80), (32, 64))
TOWER: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "image_size": 48,
    "patch_size": 16,
}
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 10,
}
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)


def randomise(module: nn.Module, seed: int = 0) -> None:
    """With the zeros and ones of an initialisation, a wrong name can be right by chance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, value in sorted(module.state_dict().items()):
            if value.is_floating_point():
                value.add_(0.1 * torch.randn(value.shape, generator=generator))


def images(size: tuple[int, int]) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


def assert_agrees(backbone: Backbone, size: tuple[int, int], tokens: Tensor, global_token: Tensor) -> None:
    found = backbone.eval().encode(images(size))
    torch.testing.assert_close(found.tokens, tokens, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.global_token, global_token, rtol=0, atol=1e-5)


def notes(backbone: Backbone) -> str:
    assert backbone.loaded is not None
    return str(backbone.loaded)


# --------------------------------------------------------------------------------------------------- Hugging Face


def clip(**config: Any) -> transformers.CLIPModel:
    tower = {**TOWER, "num_attention_heads": 4, **config}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=TEXT, vision_config=tower)).eval()
    randomise(model)
    return model


def features_of_clip(model: Any, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        output = model.vision_model(images(size), interpolate_pos_encoding=True)
        return model.vision_model.post_layernorm(output.last_hidden_state[:, 1:]), output.pooler_output


@pytest.mark.parametrize("hidden_act", ["quick_gelu", "gelu"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_clip_of_hugging_face(tmp_path: Path, size: tuple[int, int], hidden_act: str):
    model = clip(hidden_act=hidden_act)
    model.save_pretrained(tmp_path)
    backbone = load_backbone(tmp_path)
    with torch.no_grad():
        assert_agrees(backbone, size, *features_of_clip(model, size))
    assert (backbone.mean, backbone.numerics.norm_eps) == (CLIP_MEAN, 1e-5)
    assert backbone.args.get("act_layer", "gelu") == hidden_act
    assert backbone.loaded is not None
    assert backbone.loaded.format == "Hugging Face CLIP"
    assert set(backbone.loaded.dropped) == {"text encoder", "projection"}
    assert "positions are resized to other sizes as the original does (bicubic)" in notes(backbone)


def test_a_configuration_may_leave_out_the_defaults(tmp_path: Path):
    model = clip(num_attention_heads=4)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("hidden_act", "layer_norm_eps"):
        del config["vision_config"][key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        assert_agrees(load_backbone(tmp_path), SIZES[1], *features_of_clip(model, SIZES[1]))
    del config["vision_config"]["num_attention_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="12"):  # heads of 128 channels, as transformers would build
        load_backbone(tmp_path)


def test_a_bare_file_of_clip_has_quick_gelu_and_says_so(tmp_path: Path):
    model = clip(num_attention_heads=2)
    # As files were until transformers 5: under a prefix, and with the numbers of the positions.
    state = {f"vision_model.{key}": value for key, value in model.vision_model.state_dict().items()}
    state["vision_model.embeddings.position_ids"] = torch.arange(10)[None]
    torch.save(state, tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth")
    assert_agrees(backbone, SIZES[2], *features_of_clip(model, SIZES[2]))
    assert "do not show the activation of their MLPs: took quick_gelu" in notes(backbone)
    other = load_backbone(tmp_path / "weights.pth", args={"act_layer": "gelu"})
    assert "took quick_gelu" not in notes(other)
    assert (other.encode(images(SIZES[0])).tokens - backbone.encode(images(SIZES[0])).tokens).abs().max() > 1e-3


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_siglip_of_hugging_face(tmp_path: Path, size: tuple[int, int], has_head: bool):
    config = transformers.SiglipVisionConfig(**TOWER, num_attention_heads=4, vision_use_head=has_head)
    model: Any = transformers.SiglipVisionModel(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    backbone = load_backbone(tmp_path)
    with torch.no_grad():
        output = model(images(size), interpolate_pos_encoding=True)
    tokens = output.last_hidden_state
    assert_agrees(backbone, size, tokens, output.pooler_output if has_head else tokens.mean(dim=1))
    assert (backbone.mean, backbone.args["act_layer"]) == ((0.5, 0.5, 0.5), "gelu_tanh")


def test_siglip_with_its_text_tower(tmp_path: Path):
    tower = {**TOWER, "num_attention_heads": 2}
    model: Any = transformers.SiglipModel(transformers.SiglipConfig(text_config=TEXT, vision_config=tower)).eval()
    randomise(model)
    safetensors.torch.save_file(
        {key: value.contiguous() for key, value in model.state_dict().items()}, tmp_path / "bare.safetensors"
    )
    backbone = load_backbone(tmp_path / "bare.safetensors")  # its heads and activation are SigLIP's usual ones
    with torch.no_grad():
        output = model.vision_model(images(SIZES[1]), interpolate_pos_encoding=True)
    assert_agrees(backbone, SIZES[1], output.last_hidden_state, output.pooler_output)
    assert set(backbone.loaded.dropped) == {"text encoder"} if backbone.loaded else False


# ------------------------------------------------------------------------------------------- open_clip and OpenAI


class OpenTower(nn.Module):
    """The image tower as OpenAI and open_clip define it, of `nn.MultiheadAttention` and their names."""

    def __init__(self, activation: Any, heads: int = 2, width: int = 128, grid: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 16, 16, bias=False)
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.positional_embedding = nn.Parameter(torch.zeros(grid**2 + 1, width))
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.transformer: Any = nn.ModuleDict({"resblocks": nn.ModuleList(self.block(width, heads) for _ in range(2))})
        self.proj = nn.Parameter(torch.zeros(width, 16))
        self.activation, self.grid = activation, grid

    def block(self, width: int, heads: int) -> Any:
        mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})
        attention = nn.MultiheadAttention(width, heads, batch_first=True)
        return nn.ModuleDict({"ln_1": nn.LayerNorm(width), "attn": attention, "ln_2": nn.LayerNorm(width), "mlp": mlp})

    def positions(self, height: int, width: int) -> Tensor:
        """open_clip's `resize_pos_embed`, which it calls when a model is built for images of another size."""
        own = self.positional_embedding[1:].reshape(1, self.grid, self.grid, -1).permute(0, 3, 1, 2)
        if (height, width) != (self.grid, self.grid):
            own = F.interpolate(own, size=(height, width), mode="bicubic", antialias=True, align_corners=False)
        return torch.cat([self.positional_embedding[:1], own[0].flatten(1).T])

    @torch.no_grad()
    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        patches = self.conv1(batch)
        tokens = torch.cat([self.class_embedding.expand(len(batch), 1, -1), patches.flatten(2).mT], dim=1)
        x = self.ln_pre(tokens + self.positions(*patches.shape[2:]))
        for block in self.transformer["resblocks"]:
            y = block["ln_1"](x)
            x = x + block["attn"](y, y, y, need_weights=False)[0]
            x = x + block["mlp"]["c_proj"](self.activation(block["mlp"]["c_fc"](block["ln_2"](x))))
        x = self.ln_post(x)
        return x[:, 1:], x[:, 0]


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


TEXT_TOWER = {
    "positional_embedding": torch.ones(4, 8),
    "text_projection": torch.ones(8, 16),
    "logit_scale": torch.tensor(1.0),
    "token_embedding.weight": torch.ones(5, 8),
    "ln_final.weight": torch.ones(8),
    "transformer.resblocks.0.ln_1.weight": torch.ones(8),
    "transformer.resblocks.0.attn.in_proj_weight": torch.ones(24, 8),
}


def whole(tower: nn.Module) -> State:
    return {**TEXT_TOWER, **{f"visual.{key}": value for key, value in tower.state_dict().items()}}


def tower_of(activation: Any, heads: int = 2) -> OpenTower:
    tower = OpenTower(activation, heads).eval()
    randomise(tower)
    return tower


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_open_clip(tmp_path: Path, size: tuple[int, int]):
    tower = tower_of(F.gelu)
    # Its training prefixes everything with `module.` and keeps the state of the optimiser.
    state = {f"module.{key}": value for key, value in whole(tower).items()}
    torch.save({"epoch": 1, "name": "run", "state_dict": state, "optimizer": {"state": {}}}, tmp_path / "epoch_1.pt")
    backbone = load_backbone(tmp_path / "epoch_1.pt")
    assert_agrees(backbone, size, *tower(images(size)))
    assert backbone.mean == CLIP_MEAN
    assert "took gelu; if it is another, give args={'act_layer': ...}" in notes(backbone)
    assert backbone.loaded is not None
    assert backbone.loaded.format == "open_clip"
    assert set(backbone.loaded.dropped) == {"text encoder", "projection"}


def test_open_clip_with_its_configuration(tmp_path: Path):
    tower = tower_of(quick_gelu, heads=4)
    safetensors.torch.save_file(whole(tower), tmp_path / "open_clip_model.safetensors")
    vision = {"image_size": 48, "layers": 2, "width": 128, "head_width": 32, "patch_size": 16}
    config = {
        "model_cfg": {"embed_dim": 16, "quick_gelu": True, "vision_cfg": vision, "text_cfg": {}},
        "preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]},
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    backbone = load_backbone(tmp_path / "open_clip_model.safetensors")
    assert_agrees(backbone, SIZES[0], *tower(images(SIZES[0])))
    assert (backbone.mean, backbone.std) == ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    assert "took" not in notes(backbone)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_openai_has_quick_gelu(tmp_path: Path, size: tuple[int, int]):
    tower = tower_of(quick_gelu)
    numbers = {"input_resolution": torch.tensor(48), "context_length": torch.tensor(77), "vocab_size": torch.tensor(5)}
    torch.save({**whole(tower), **numbers}, tmp_path / "clip.pt")
    backbone = load_backbone(tmp_path / "clip.pt")
    assert_agrees(backbone, size, *tower(images(size)))
    assert "activation" not in notes(backbone)
    assert backbone.loaded is not None
    assert backbone.loaded.format == "OpenAI CLIP"
    plain = build_backbone(
        "vit_base_patch16_clip_224", args={"embed_dim": 128, "depth": 2, "num_heads": 2}, image_size=48
    )
    with pytest.raises(ValueError, match=r"OpenAI CLIP.* act_layer quick_gelu, the backbone has gelu"):
        load_pretrained(plain, tmp_path / "clip.pt")


# ------------------------------------------------------------------------------------------------------------ timm

TIMM: dict[str, Any] = {"embed_dim": 128, "depth": 2, "num_heads": 2}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("vit_base_patch16_clip_quickgelu_224", ""),
        ("vit_base_patch16_siglip_224", ""),
        ("vit_base_patch16_siglip_224", "visual.trunk."),  # open_clip's SigLIP
        ("vit_base_patch16_siglip_gap_224", "visual.trunk."),
    ],
)
def test_towers_of_timm(tmp_path: Path, name: str, prefix: str, size: tuple[int, int]):
    model: Any = timm.create_model(name, num_classes=0, img_size=48, dynamic_img_size=True, **TIMM).eval()
    randomise(model)
    text = {"text.transformer.resblocks.0.ln_1.weight": torch.ones(8), "logit_bias": torch.ones(1)} if prefix else {}
    torch.save({**text, **{prefix + key: value for key, value in model.state_dict().items()}}, tmp_path / "weights.pth")
    is_clip = "clip_" in name and "siglip" not in name
    if is_clip:
        with pytest.raises(ValueError, match=r"a norm before the first block.*args=\{'act_layer': 'gelu'\}"):
            load_backbone(tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth", args={"act_layer": "quick_gelu"} if is_clip else None)
    with torch.no_grad():
        tokens = model.forward_features(images(size))
        pooled = model.forward_head(tokens, pre_logits=True)
    assert_agrees(backbone, size, tokens[:, model.num_prefix_tokens :], pooled)
    if prefix or "gap" not in name:
        assert backbone.mean == (CLIP_MEAN if is_clip else (0.5, 0.5, 0.5))
