"""Tensors that are used, ignored or rejected in files of other projects.

Features are compared with the projects' own in `formats/test_rows.py`.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.models.formats.cases import Case, deviation, load_cases
from torch import Tensor, nn

from cribo.models import Backbone, build_backbone, load_backbone, load_pretrained

State = dict[str, Tensor]
VIT = "vit_small_patch16_224"
SMALL = {"embed_dim": 128, "depth": 2, "num_heads": 2}
SIZE = 48


def network(seed: int, name: str = VIT, args: dict[str, Any] | None = None, size: int = SIZE) -> Backbone:
    """Randomise every tensor: with initial zeros and ones, wrong names could give right features."""
    backbone = build_backbone(name, args=SMALL if args is None else args, image_size=size)
    randomise(backbone.model, seed)
    return backbone.eval()


def randomise(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in sorted(module.state_dict().items()):
            if value.is_floating_point():
                value.add_(0.05 * torch.randn(value.shape, generator=generator))
                if key.endswith("running_var"):
                    value.abs_()


def images(size: int = SIZE) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def assert_same_features(backbone: Backbone, expected: Backbone, size: int = SIZE) -> None:
    found, wanted = backbone.eval().encode(images(size)), expected.encode(images(size))
    torch.testing.assert_close(found.tokens, wanted.tokens, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.global_token, wanted.global_token, rtol=0, atol=1e-5)


def under(prefix: str, state: State) -> State:
    return {prefix + key: value for key, value in state.items()}


def tensors(*keys: str) -> State:
    return {key: torch.ones(2, 2) for key in keys}


CASES = {case.name: case for case in load_cases()}


def written(name: str, folder: Path) -> tuple[Path, Case, Any]:
    """Write the file of a case; return its path, the case and its teacher."""
    path, teacher, _ = CASES[name].write(folder)
    return path, CASES[name], teacher


LEFT_OUT = {
    "CrIBo": {"head", "student", "training state", "loss", "queue"},
    "CrIBo or CrOC": {"head", "student", "training state", "loss"},
    "DINO": {"head", "student", "training state", "loss"},
    "DINO, ResNet": {"head", "student", "training state"},
    "iBOT": {"head", "student", "training state", "loss"},
    "MAE": {"decoder", "mask token", "training state"},
    "NeCo or Leopart": {"head", "student", "metric", "training state"},
    "TimeT": {"head", "student", "queue"},
    "MoCo v3": {"head", "student", "training state"},
    "DINOv2": {"mask token"},
    "DINOv2 or DINOv3 training, DINOv2's teacher": {"mask token", "head"},
    "DINOv3 SAT-493M": {"mask token", "norm of local crops"},
    "SlotCon": {"student", "head", "prototypes", "centre", "training state"},
    "DenseCL": {"student", "other network", "head", "queue", "training state"},
    "MoCo": {"student", "head", "queue", "training state"},
    "ORL or BYOL": {"student", "other network", "head", "training state"},
    "Segmenter": {"head", "decoder", "training state"},
    "MMSegmentation": {"head", "training state"},
    "LOCA": {"position predictor", "head", "student", "training state"},
    "timm ViT": {"head"},
    "ResNet": {"head"},
}


@pytest.mark.parametrize(("name", "groups"), LEFT_OUT.items(), ids=LEFT_OUT)
def test_ignored_keys_are_listed(tmp_path: Path, name: str, groups: set[str]):
    path, case, _ = written(name, tmp_path)
    loaded = load_backbone(path, **case.options).loaded
    assert loaded is not None
    assert set(loaded.dropped) == groups
    assert case.row in str(loaded)
    has_student = "student" in groups or loaded.network is not None
    assert loaded.network == ("teacher" if has_student else None)


@pytest.mark.parametrize("name", ["DINO", "MAE", "NeCo or Leopart", "TimeT", "timm ViT"])
def test_unknown_tensors_of_the_network_are_refused_and_others_ignored(tmp_path: Path, name: str):
    path, case, teacher = written(name, tmp_path)
    content = torch.load(path, weights_only=False)
    beside = {"best_score": torch.tensor(0.7), "my_optimiser": {"moments": torch.ones(3)}}
    torch.save({**content, **beside, "class_weights": torch.ones(4)}, path)
    backbone = load_backbone(path)
    assert deviation(backbone, teacher, case.sizes[0]) < 1e-5
    assert backbone.loaded is not None
    assert "my_optimiser/moments" in str(backbone.loaded)
    inner: Any = content
    while not any(key.endswith("cls_token") for key in inner):
        inner = inner[next(key for key in ("state_dict", "teacher", "model") if key in inner)]
    prefix = next(key for key in reversed(inner) if key.endswith("cls_token")).removesuffix("cls_token")
    inner[f"{prefix}surprise.weight"] = torch.ones(2)
    torch.save(content, path)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}.*{re.escape(prefix)}surprise\.weight.*ignore"):
        load_backbone(path)
    backbone = load_backbone(path, ignore=[r"surprise\."])
    assert deviation(backbone, teacher, case.sizes[0]) < 1e-5
    assert backbone.loaded is not None
    assert backbone.loaded.dropped["ignored by request"][0].endswith("surprise.weight")


def test_a_moving_average_of_the_network_is_used(tmp_path: Path):
    student, teacher = network(2), network(1)
    content = {"model": student.model.state_dict(), "model_ema": teacher.model.state_dict()}
    torch.save(content, tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth")
    assert_same_features(backbone, teacher)
    assert backbone.loaded is not None
    assert (backbone.loaded.network, set(backbone.loaded.dropped)) == ("teacher", {"other network"})


def test_a_network_with_other_heads_than_the_file_is_refused(tmp_path: Path):
    path, case, teacher = written("MoCo v3", tmp_path)
    with pytest.raises(ValueError, match=r"MoCo v3, .* num_heads 12 .*the backbone has 6: .*args=\{'num_heads': 12\}"):
        load_pretrained(network(3, args={"depth": 2}), path)
    with pytest.raises(ValueError, match=r"num_heads 12 .*the backbone has 6"):
        load_backbone(path, name=VIT, args={"depth": 2})
    named = load_backbone(path, name=VIT, args={"depth": 2, "num_heads": 12}, image_size=SIZE)
    assert deviation(named, teacher, case.sizes[0]) < 1e-5


def test_heads_assumed_from_positions_are_noted(tmp_path: Path):
    path, _, _ = written("timm ViT, MoCo v3's ViT-S by convert_to_deit", tmp_path)
    assert "assumed the 12 attention heads of MoCo v3's ViT-S" in str(load_backbone(path).loaded)


@pytest.mark.parametrize("name", ["DINO", "MAE", "timm ViT, MAE's encoder as released", "LOCA", "Segmenter"])
def test_the_resizing_of_positions_is_noted(tmp_path: Path, name: str):
    path, case, _ = written(name, tmp_path)
    assert f"as the original does ({case.positions})" in str(load_backbone(path).loaded)
    assert "as requested (bilinear_corners)" in str(load_backbone(path, positions="bilinear_corners").loaded)
    assert "as requested (timm)" in str(load_backbone(path, positions="timm").loaded)


def test_positions_of_weights_of_unknown_origin(tmp_path: Path):
    path, _, _ = written("timm ViT", tmp_path)
    assert "add --backbone.positions bicubic_offset" in str(load_backbone(path).loaded)
    assert "as requested (timm)" in str(load_backbone(path, positions="timm").loaded)


def test_dinov3_weights_for_unknown_images_have_a_note(tmp_path: Path):
    """As ViT-7B: without attention bias, with a norm of local crops."""
    path, _, _ = written("DINOv3, no bias, two registers, four heads, base 50", tmp_path)
    backbone = load_backbone(path)
    assert backbone.mean == (0.485, 0.456, 0.406)
    assert "assumed ImageNet's normalisation" in str(backbone.loaded)
    path, _, _ = written("DINOv3", tmp_path)
    plain = load_backbone(path).loaded
    assert plain is not None
    assert plain.notes == ()


@pytest.mark.parametrize("name", ["Hugging Face ViT", "Hugging Face DINOv2, gated", "Hugging Face DINOv3"])
def test_files_beside_weights_of_hugging_face(tmp_path: Path, name: str):
    pytest.importorskip("transformers")
    folder, case, network = written(name, tmp_path)
    assert "no preprocessor_config.json beside it" in str(load_backbone(folder).loaded)
    images_config = {"image_mean": [0.4] * 3, "image_std": [0.2] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(images_config))
    backbone = load_backbone(folder)
    assert (backbone.mean, backbone.std) == ((0.4, 0.4, 0.4), (0.2, 0.2, 0.2))
    # Heads must be given if the configuration is missing.
    (folder / "alone").mkdir()
    (folder / "model.safetensors").rename(folder / "alone/weights.safetensors")
    alone = load_backbone(folder / "alone/weights.safetensors", args={"num_heads": 4})
    assert deviation(alone, network, case.sizes[0]) < 1e-5


def test_a_width_with_a_name_has_its_usual_heads(tmp_path: Path):
    source = network(1, args={"depth": 3})  # ViT-S/16: 384 channels, 6 heads
    torch.save(source.model.state_dict(), tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth")
    assert_same_features(backbone, source)
    assert backbone.loaded is not None
    assert [note for note in backbone.loaded.notes if "heads" in note] == []
    assert "the file has 3 blocks, networks of this width usually 12" in str(backbone.loaded)


def test_heads_that_weights_do_not_show_come_from_the_caller(tmp_path: Path):
    source = network(1, args={"embed_dim": 96, "depth": 2, "num_heads": 4})
    torch.save(source.model.state_dict(), tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"a width of 96 is no multiple .* give args=\{'num_heads': ...\}"):
        load_backbone(tmp_path / "weights.pth")
    assert_same_features(load_backbone(tmp_path / "weights.pth", args={"num_heads": 4}), source)
    wide = network(1, args={"embed_dim": 128, "depth": 2, "num_heads": 4})
    torch.save(wide.model.state_dict(), tmp_path / "weights.pth")
    guessed = load_backbone(tmp_path / "weights.pth").loaded
    assert guessed is not None
    assert "assumed 2 of 64 channels each" in guessed.notes[0]
    assert_same_features(load_backbone(tmp_path / "weights.pth", args={"num_heads": 4}), wide)


@pytest.mark.parametrize(
    "args",
    [
        {"class_token": False, "global_pool": "avg", "fc_norm": False},
        {"global_pool": "avg", "fc_norm": True},
        {"qkv_bias": False},
        {"mlp_ratio": 3.3},
        {"qk_norm": True},
        {"init_values": 0.1, "reg_tokens": 2, "no_embed_class": True},
        {"final_norm": False},
    ],
    ids=str,
)
def test_variants_of_the_vit_are_inferred_from_weights(tmp_path: Path, args: dict[str, Any]):
    source = network(1, args={**SMALL, **args})
    torch.save(source.model.state_dict(), tmp_path / "weights.pth")
    backbone = load_backbone(tmp_path / "weights.pth", args={"act_layer": "gelu"})
    assert_same_features(backbone, source)


def test_an_activation_that_is_not_known_is_refused(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, hidden_act="silu")
    transformers.ViTModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has hidden_act 'silu': it must be one of gelu, gelu_new"):
        load_backbone(tmp_path)


def test_a_folder_of_timm_on_the_hub(tmp_path: Path):
    convnext = {"depths": (1, 1, 1, 1), "dims": (8, 16, 32, 64)}
    source = network(1, "convnext_tiny", convnext, 64)
    state = {key: value.contiguous() for key, value in source.model.state_dict().items()}
    safetensors.torch.save_file({**state, **tensors("head.fc.weight")}, tmp_path / "model.safetensors")
    about = {
        "architecture": "convnext_tiny",
        "model_args": convnext,
        "pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 64, 64]},
    }
    (tmp_path / "config.json").write_text(json.dumps(about))
    backbone = load_backbone(tmp_path)
    assert_same_features(backbone, source, 64)
    assert backbone.mean == (0.5, 0.5, 0.5)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "my convnext"}))  # from another program
    assert_same_features(load_backbone(tmp_path), source, 64)
    assert_same_features(load_backbone(tmp_path, name="convnext_tiny", args=convnext), source, 64)


# ------------------------------------------------------------------------------------------------ errors


def test_keys_that_differ_only_in_wrapper_prefixes_are_rejected(tmp_path: Path):
    state = network(1).model.state_dict()
    torch.save({**state, "module.norm.weight": torch.zeros(128)}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"differ only in wrapper prefixes: norm\.weight"):
        load_backbone(tmp_path / "weights.pth")


def test_files_with_several_networks_of_which_none_is_the_teacher(tmp_path: Path):
    state = network(1).model.state_dict()
    torch.save({**under("first.", state), **under("second.", state)}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"contains several networks, .*'first\.', 'second\.', none marked"):
        load_backbone(tmp_path / "weights.pth")
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"contains one network, .* and no student"):
        load_backbone(tmp_path / "weights.pth", network="student")
    wrong: dict[str, Any] = {"network": "foo"}
    with pytest.raises(ValueError, match=r"weights\.pth.*network .*'foo'"):
        load_backbone(tmp_path / "weights.pth", **wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {key: value for key, value in state.items() if "blocks.0." not in key}, "no network"),
        (lambda state: {key: value for key, value in state.items() if "blocks.1.mlp" not in key}, "4 keys missing"),
        (lambda state: {**state, "norm.weight": torch.ones(5)}, r"norm\.weight \(5,\) instead of \(128,\)"),
        (lambda state: {**state, "norm.weight": torch.full((128,), math.nan)}, "1 keys that are not finite: norm"),
        (lambda state: {**state, "pos_embed": torch.ones(1, 8, 128)}, "8 positions, .* is not a square grid"),
        (lambda state: {**state, "patch_embed.proj.weight": torch.ones(128, 1, 16, 16)}, "for square patches"),
    ],
)
def test_incomplete_networks_are_rejected(tmp_path: Path, change: Callable[[State], State], message: str):
    torch.save(change(dict(network(1).model.state_dict())), tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=message):
        load_backbone(tmp_path / "weights.pth")


def test_a_missing_block_in_the_middle_is_named(tmp_path: Path):
    state = network(1, args={**SMALL, "depth": 3}).model.state_dict()
    torch.save({key: value for key, value in state.items() if "blocks.1." not in key}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"blocks are numbered to 2, but \[1\] are missing"):
        load_backbone(tmp_path / "weights.pth")
