from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import YolosForObjectDetection

from cribo.base.errors import ConfigError
from cribo.evaluation.detection.model import build_yolos
from cribo.models import Backbone, build_backbone
from cribo.models.numerics import Numerics

Make = Callable[..., Backbone]


def tokens_without_detection(model: Any, images: torch.Tensor) -> torch.Tensor:
    """Return [CLS] and patches after the last norm, without detection tokens."""
    vit = model.vit
    number = model.config.num_detection_tokens
    with torch.no_grad():
        hidden = vit.embeddings(images)[:, :-number]
        for layer in vit.encoder.layer:
            output = layer(hidden)
            hidden = output[0] if isinstance(output, tuple) else output  # in older versions
        return vit.layernorm(hidden)


def assert_same_tokens(backbone: Backbone, *, atol: float = 1e-5) -> None:
    model = build_yolos(backbone, ["a", "b"], positions=(backbone.image_size, backbone.image_size), tokens=5).eval()
    images = torch.randn(2, 3, backbone.image_size, backbone.image_size)
    with torch.no_grad():
        features = backbone.eval().encode(images)
    tokens = tokens_without_detection(model, images)
    if not isinstance(backbone.model.norm, torch.nn.Identity):  # otherwise it pools its patches
        torch.testing.assert_close(tokens[:, 0], features.global_token, atol=atol, rtol=1e-4)
    torch.testing.assert_close(tokens[:, 1:], features.tokens, atol=atol, rtol=1e-4)


def test_without_detection_tokens_it_equals_the_backbone(tiny_vit: Make) -> None:
    assert_same_tokens(tiny_vit())


@pytest.mark.parametrize(
    "args",
    [
        {"qkv_bias": False},
        {"init_values": 0.3},  # layer scale
        {"no_embed_class": True},
        {"global_pool": "avg"},  # the final norm follows the pooling
        {"mlp_ratio": 3},
    ],
)
def test_variants_of_the_network(tiny_vit: Make, args: dict[str, Any]) -> None:
    backbone = tiny_vit(**args)
    for parameter in backbone.parameters():
        torch.nn.init.normal_(parameter.data, std=0.2)
    backbone.set_numerics(Numerics(norm_eps=1e-3))
    assert_same_tokens(backbone, atol=1e-4)


def test_the_real_vit_s() -> None:
    assert_same_tokens(build_backbone("vit_small_patch16_224", args={"depth": 2}, image_size=64))


def between_blocks(model: Any) -> torch.Tensor:
    """Return the position embeddings added between blocks, for any version of transformers."""
    (found,) = (value for name, value in model.named_parameters() if name.endswith("mid_position_embeddings"))
    return found


def test_positions_are_resized_and_new_ones_initialised(tiny_vit: Make) -> None:
    backbone = tiny_vit()
    model = build_yolos(backbone, ["a"], positions=(27, 40), tokens=7, seed=1)
    assert model.config.image_size == [24, 40]
    own = backbone.model.pos_embed
    positions = model.vit.embeddings.position_embeddings
    assert positions.shape == (1, 1 + 3 * 5 + 7, 32)
    grid = own[:, 1:].mT.unflatten(2, (4, 4))
    expected = F.interpolate(grid, size=(3, 5), mode="bicubic", align_corners=False).flatten(2).mT
    torch.testing.assert_close(positions[:, 1:16], expected)
    torch.testing.assert_close(positions[:, :1], own[:, :1])
    between = between_blocks(model)
    assert between.shape == (1, 1, 23, 32)
    for new in (positions[:, 16:], between, model.vit.embeddings.detection_tokens):
        assert float(new.detach().std()) == pytest.approx(0.02, rel=0.2)
    other = build_yolos(backbone, ["a"], positions=(27, 40), tokens=7, seed=2)
    again = build_yolos(backbone, ["a"], positions=(27, 40), tokens=7, seed=1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert not torch.equal(between, between_blocks(other))


def test_building_changes_neither_global_generator_nor_backbone(tiny_vit: Make) -> None:
    backbone = tiny_vit()
    before = backbone.fingerprint()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    build_yolos(backbone, ["a"], positions=(32, 32))
    assert torch.equal(torch.rand(4), expected)
    assert backbone.fingerprint() == before


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("resnet18", {"channels": (8, 8, 8, 8)}, "it is not a plain vision transformer"),
        ("vit_small_patch14_reg4_dinov2", {"depth": 1}, "it has 4 register tokens"),
        ("vit_small_patch16_224", {"depth": 1, "class_token": False, "global_pool": "avg"}, r"it has no \[CLS\] token"),
        ("vit_base_patch16_clip_224", {"depth": 1}, "it has a norm before its blocks"),
        ("vit_small_patch16_224", {"depth": 1, "qk_norm": True}, "its attention is not plain self-attention"),
        ("vit_small_patch16_dinov3", {"depth": 1}, "it is not a plain vision transformer"),
    ],
)
def test_other_networks_are_refused_with_advice(name: str, args: dict[str, Any], said: str) -> None:
    backbone = build_backbone(name, args=args, image_size=56 if "14" in name else 64)
    with pytest.raises(ConfigError, match=f"cannot be built on {name}: {said}; choose a vision transformer"):
        build_yolos(backbone, ["a"], positions=(64, 64))


def test_a_position_embedding_smaller_than_a_patch(tiny_vit: Make) -> None:
    with pytest.raises(ConfigError, match=r"at least a patch of 8 pixels, got \(7, 40\)"):
        build_yolos(tiny_vit(), ["a"], positions=(7, 40))


def test_it_is_saved_in_the_format_of_transformers(tiny_vit: Make, tmp_path: Path) -> None:
    model = build_yolos(tiny_vit(), ["cat", "dog"], positions=(24, 40), tokens=5).eval()
    model.save_pretrained(tmp_path)
    loaded = YolosForObjectDetection.from_pretrained(tmp_path).eval()
    assert loaded.config.id2label == {0: "cat", 1: "dog"}
    images = torch.randn(1, 3, 48, 40)
    with torch.no_grad():
        torch.testing.assert_close(loaded(images).pred_boxes, model(images).pred_boxes)
