from typing import Any

import pytest
import timm
import torch

from cribo.models.formats.architecture import infer_architecture

NAMES = [
    *(f"vit_{size}_patch16_224" for size in ("tiny", "small", "base", "large")),
    *("vit_small_patch8_224", "vit_base_patch32_224", "vit_huge_patch14_224"),
    *(f"vit_{size}_patch14_dinov2" for size in ("small", "base", "large", "giant")),
    *("vit_small_patch14_reg4_dinov2", "vit_giant_patch14_reg4_dinov2"),
    *(f"vit_{size}_patch16_dinov3" for size in ("small", "base", "large", "small_plus", "huge_plus", "7b")),
    *("vit_tiny_patch16_dinov3_qkvb", "vit_small_plus_patch16_dinov3_qkvb"),
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
]


@pytest.mark.parametrize("name", NAMES)
def test_networks_with_a_timm_name_get_it(name: str):
    if not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} does not know {name} yet")
    options: dict[str, Any] = {} if "resnet" in name or "dinov3" in name else {"img_size": 16 * 14}
    model = timm.create_model(name, num_classes=0, device="meta", **options)
    architecture = infer_architecture(model.state_dict())
    assert architecture == (name, {}, 224, ())


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("resnext50_32x4d", {}, ("resnet50", {"cardinality": 32, "base_width": 4})),
        ("wide_resnet50_2", {}, ("resnet50", {"base_width": 128})),
        ("resnet18", {"layers": (1, 2, 1, 1)}, ("resnet18", {"layers": (1, 2, 1, 1)})),
        ("vit_small_patch16_224", {"patch_size": 4}, ("vit_small_patch16_224", {"patch_size": 4})),
        ("vit_huge_patch14_224", {"patch_size": 16}, ("vit_huge_patch14_224", {"patch_size": 16})),
        ("vit_giant_patch14_224", {}, None),
        ("vit_medium_patch16_gap_256", {}, None),
        ("vit_so400m_patch14_siglip_gap_224", {}, None),
        ("vit_giant_patch14_dinov2", {"embed_dim": 64, "depth": 1, "num_heads": 1, "mlp_ratio": 4.0}, None),
        ("vit_small_plus_patch16_dinov3", {"embed_dim": 64, "depth": 1, "num_heads": 1}, None),
        ("vit_7b_patch16_dinov3", {"depth": 1, "qkv_bias": True}, None),
    ],
)
def test_other_networks_are_built_with_the_same_tensors(
    name: str, args: dict[str, Any], expected: tuple[str, dict[str, Any]] | None
):
    source: Any = timm.create_model(name, num_classes=0, device="meta", **args)
    found = infer_architecture(source.state_dict())
    if expected is not None:
        assert found[:2] == expected
    size = {"img_size": found.image_size} if "pos_embed" in source.state_dict() else {}
    built: Any = timm.create_model(found.name, num_classes=0, device="meta", **size, **found.args)
    shapes = [{key: value.shape for key, value in model.state_dict().items()} for model in (built, source)]
    assert shapes[0] == shapes[1]
    if hasattr(source, "blocks"):
        assert built.blocks[0].attn.num_heads == source.blocks[0].attn.num_heads


def test_other_kinds_of_networks_are_refused():
    state = timm.create_model("regnety_002", device="meta").state_dict()
    with pytest.raises(ValueError, match=r"not weights of a vision transformer .* or ResNet: give the timm name"):
        infer_architecture(state)
    clip = timm.create_model("vit_base_patch16_clip_224", depth=1, device="meta").state_dict()
    with pytest.raises(ValueError, match=r"a norm before the first block, as in CLIP, .* give the timm name"):
        infer_architecture(clip)


def test_assumptions_are_noted():
    model = timm.create_model("vit_small_patch16_224", embed_dim=512, num_heads=8, depth=1, device="meta")
    found = infer_architecture(model.state_dict())
    assert found.args["num_heads"] == 8
    assert "assumed 8 of 64 channels each" in found.notes[0]
    assert infer_architecture(model.state_dict(), num_heads=4) == (found.name, {**found.args, "num_heads": 4}, 224, ())
    assert infer_architecture(model.state_dict(), heads={512: 16}).args["num_heads"] == 16
    assert infer_architecture(model.state_dict(), act_layer="gelu_tanh").args["act_layer"] == "gelu_tanh"
    state = {**model.state_dict(), "pos_embed": torch.empty(1, 199, 512)}
    with pytest.raises(ValueError, match="199 positions, which is not a square grid with 1 prefix tokens"):
        infer_architecture(state)
