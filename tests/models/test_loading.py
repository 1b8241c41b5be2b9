import argparse
import json
import logging
import resource
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import safetensors.torch
import timm
import torch
from timm.data.config import resolve_model_data_config
from torch import nn

from cribo.base.errors import InputError
from cribo.models import Backbone, build_backbone, load_backbone, load_pretrained, save_backbone
from cribo.models.numerics import Numerics

VIT = "vit_small_patch16_224"
TINY_VIT = {"embed_dim": 64, "depth": 2, "num_heads": 2}
TINY_CONVNEXT = {"depths": (1, 1, 1, 1), "dims": (8, 16, 32, 64)}
TINY_RESNET = {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32), "output_stride": 16}


def vit(seed: int = 0, image_size: int = 64, **args) -> Backbone:
    return build_backbone(VIT, args={**TINY_VIT, **args}, image_size=image_size, seed=seed).eval()


def images(size: int = 64) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def agree(first: Backbone, second: Backbone, size: int = 64) -> bool:
    a, b = first.eval().encode(images(size)), second.eval().encode(images(size))
    return torch.equal(a.tokens, b.tokens) and torch.equal(a.global_token, b.global_token)


def prefixed(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + key: value for key, value in state.items()}


def unchanged_by(failing, backbone: Backbone) -> bool:
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    failing()
    return all(torch.equal(value, before[key]) for key, value in backbone.state_dict().items())


# Saving, and loading with plain timm


@pytest.mark.parametrize(
    ("name", "args"),
    [
        (VIT, TINY_VIT),
        (VIT, {**TINY_VIT, "norm_layer": "rmsnorm"}),
        ("vit_small_patch14_reg4_dinov2", TINY_VIT),
        ("convnext_tiny", TINY_CONVNEXT),
        ("resnet50", TINY_RESNET),
    ],
)
def test_plain_timm_loads_saved_backbones(tmp_path, name, args):
    size = 56 if "patch14" in name else 64
    backbone = build_backbone(name, args=args, image_size=size, drop_path=0.1).train()
    backbone.encode(images(size))  # updates the statistics of batch norms
    backbone.eval()
    assert save_backbone(backbone, tmp_path / "run") == tmp_path / "run" / "backbone.safetensors"
    about = json.loads((tmp_path / "run/backbone.json").read_text())
    model: Any = timm.create_model(about["name"], **about["args"]).eval()
    state = safetensors.torch.load_file(tmp_path / "run/backbone.safetensors")
    model.load_state_dict(state, strict=True)
    expected = model.forward_features(images(size))
    features = backbone.encode(images(size))
    if name == "convnext_tiny":
        expected = model.head.norm(expected)
    if expected.ndim == 4:
        assert torch.equal(features.tokens, expected.flatten(2).transpose(1, 2))
    else:
        assert torch.equal(features.global_token, expected[:, 0])
        assert torch.equal(features.tokens, expected[:, model.num_prefix_tokens :])
    assert (about["patch_size"], about["embed_dim"]) == (backbone.patch_size, backbone.embed_dim)
    assert about["timm"] == timm.__version__
    assert agree(load_backbone(tmp_path / "run"), backbone, size)


def test_the_snippet_in_the_description_runs(tmp_path, monkeypatch):
    save_backbone(vit(), tmp_path)
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    exec(json.loads((tmp_path / "backbone.json").read_text())["how_to_load"], scope)
    assert torch.equal(scope["model"].eval()(images()), vit().encode(images()).global_token)


def test_timm_gets_the_normalisation_of_saved_backbones(tmp_path):
    """Timm's own mean for this name is 0.5."""
    save_backbone(vit(), tmp_path)
    about = json.loads((tmp_path / "backbone.json").read_text())
    model = timm.create_model(about["name"], **about["args"])
    found = resolve_model_data_config(model)
    assert (list(found["mean"]), list(found["std"])) == (about["mean"], about["std"])
    assert about["mean"] == [0.485, 0.456, 0.406]


def test_load_backbone_restores_everything_except_drop_path(tmp_path):
    backbone = vit(seed=7)
    backbone.mean = (0.5, 0.5, 0.5)
    save_backbone(backbone, tmp_path)
    loaded = load_backbone(tmp_path / "backbone.safetensors", drop_path=0.2)
    assert agree(loaded, backbone)
    assert loaded.mean == (0.5, 0.5, 0.5)
    assert loaded.args == TINY_VIT
    assert loaded.num_drop_path_sites == 2
    save_backbone(loaded, tmp_path / "again")
    modes = {path.stat().st_mode for path in (tmp_path / "again").iterdir()}
    assert len(modes) == 1
    files = [json.loads((folder / "backbone.json").read_text()) for folder in (tmp_path, tmp_path / "again")]
    assert files[0] == files[1]


def test_arguments_that_json_cannot_hold_are_refused(tmp_path):
    backbone = vit(norm_layer=nn.LayerNorm)
    with pytest.raises(ValueError, match=r"cannot be written as JSON.*give names"):
        save_backbone(backbone, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_full_disk_does_not_change_older_files(tmp_path):
    save_backbone(vit(seed=1), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"backbone\.safetensors"):
            save_backbone(vit(seed=2), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    save_backbone(vit(seed=1), tmp_path / "a")
    save_backbone(vit(seed=2), tmp_path / "b")
    (tmp_path / "b/backbone.json").replace(tmp_path / "a/backbone.json")
    with pytest.raises(ValueError, match=r"does not match .*sha256 differs"):
        load_backbone(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match=r"no backbone\.json beside it"):
        load_backbone(tmp_path / "b")
    with pytest.raises(FileNotFoundError, match="no weights at"):
        load_backbone(tmp_path / "c")
    (tmp_path / "a/backbone.json").write_text("{")
    with pytest.raises(ValueError, match=r"backbone\.json is not valid JSON"):
        load_backbone(tmp_path / "a")
    (tmp_path / "a/backbone.json").write_text("{}")
    with pytest.raises(ValueError, match=r"lacks args, image_size"):
        load_backbone(tmp_path / "a")


# Files of other projects


def test_the_teacher_of_a_released_checkpoint_is_loaded(tmp_path, caplog):
    student, teacher = vit(seed=1), vit(seed=2)
    head = {"module.head.mlp.0.weight": torch.zeros(4, 64), "module.head.last_layer.weight_g": torch.ones(4, 1)}
    checkpoint = {
        "student": {**prefixed("module.backbone.", student.model.state_dict()), **head},
        "teacher": {**prefixed("module.backbone.", teacher.model.state_dict()), **head},
        "epoch": 300,
        "args": argparse.Namespace(arch="vit_small", patch_size=16),
        "fp16_scaler": None,
    }
    torch.save(checkpoint, tmp_path / "checkpoint.pth")
    backbone = vit(seed=3)
    with caplog.at_level(logging.INFO, "cribo.models.loading"):
        loaded = load_pretrained(backbone, tmp_path / "checkpoint.pth")
    assert agree(backbone, teacher)
    assert (loaded.network, loaded.part) == ("teacher", "teacher/module.backbone.")
    assert loaded.dropped["head"][2:] == ("teacher/module.head.mlp.0.weight", "teacher/module.head.last_layer.weight_g")
    assert "its teacher (teacher/module.backbone.)" in caplog.text
    assert load_pretrained(backbone, tmp_path / "checkpoint.pth", network="student").network == "student"
    assert agree(backbone, student)
    del checkpoint["teacher"]
    torch.save(checkpoint, tmp_path / "student.pth")
    backbone = vit(seed=3)
    loaded = load_pretrained(backbone, tmp_path / "student.pth")
    assert (loaded.network, loaded.part) == ("student", "student/module.backbone.")
    assert "no teacher: using its student" in loaded.notes[0]
    assert agree(backbone, student)


def test_each_loading_notes_unknown_positions_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    torch.save(vit(seed=1).model.state_dict(), tmp_path / "plain.pth")
    with caplog.at_level(logging.INFO, "cribo.models.loading"):
        noted = [load_pretrained(vit(seed=3), tmp_path / "plain.pth").notes for _ in range(2)]
    assert noted[0] == noted[1]
    first, second = (record.message for record in caplog.records if record.name == "cribo.models.loading")
    assert "--backbone.positions bicubic_offset" in first
    assert "ignored" not in first  # all keys were used
    assert first == second
    assert [path.name for path in tmp_path.iterdir()] == ["plain.pth"]


@pytest.mark.parametrize(
    ("wrap", "taken"),
    [
        (lambda state: state, ""),
        (lambda state: {**state, "head.weight": torch.zeros(5, 64), "head.bias": torch.zeros(5)}, ""),
        (lambda state: {"model": state}, "model/"),
        (lambda state: {"state_dict": prefixed("module.encoder.", state)}, "state_dict/module.encoder."),
        (
            lambda state: {
                "state_dict": {
                    **prefixed("student.backbone.", {k: v + 1 for k, v in state.items()}),
                    **prefixed("teacher.backbone.", state),
                }
            },
            "state_dict/teacher.backbone.",
        ),
    ],
    ids=["plain", "classifier", "model", "ddp encoder", "lightning"],
)
def test_layouts_of_other_projects(tmp_path, wrap, taken):
    source = vit(seed=2)
    torch.save(wrap(source.model.state_dict()), tmp_path / "weights.pth")
    backbone = vit(seed=3)
    assert load_pretrained(backbone, tmp_path / "weights.pth").part == taken
    assert agree(backbone, source)


def test_our_own_files_load_as_pretrained_weights(tmp_path):
    source = vit(seed=2)
    source.std = (0.5, 0.5, 0.5)
    weights = save_backbone(source, tmp_path)
    for given in (weights, tmp_path):
        backbone = build_backbone(VIT, args=TINY_VIT, image_size=64, pretrained=str(given), seed=9)
        assert agree(backbone, source)
        assert backbone.std == (0.5, 0.5, 0.5)


def test_a_position_embedding_of_another_size_is_resampled_as_timm_does(tmp_path):
    source = vit(seed=2, image_size=64)
    torch.save(source.model.state_dict(), tmp_path / "weights.pth")
    backbone = vit(seed=3, image_size=96)
    assert load_pretrained(backbone, tmp_path / "weights.pth").resampled == ("pos_embed",)
    # The network of 64 pixels resamples the same embedding for images of 96.
    expected, found = source.encode(images(96)), backbone.encode(images(96))
    torch.testing.assert_close(found.tokens, expected.tokens, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.global_token, expected.global_token, rtol=0, atol=1e-5)


def test_a_convnext_without_its_head_loads(tmp_path):
    source = build_backbone("convnext_tiny", args=TINY_CONVNEXT, image_size=64, seed=1)
    torch.save({"model": {**source.model.state_dict(), "head.fc.weight": torch.zeros(3, 64)}}, tmp_path / "a.pth")
    backbone = build_backbone("convnext_tiny", args=TINY_CONVNEXT, image_size=64, seed=2)
    assert load_pretrained(backbone, tmp_path / "a.pth").dropped == {"head": ("model/head.fc.weight",)}
    assert agree(backbone, source)


@pytest.mark.parametrize(
    "classifier", [{}, {"classifier.weight": torch.zeros(3, 1280), "classifier.bias": torch.zeros(3)}]
)
def test_a_file_with_the_name_of_its_timm_network_needs_no_name(
    tmp_path: Path, classifier: dict[str, torch.Tensor]
) -> None:
    source = build_backbone("tf_efficientnet_lite0", image_size=64, seed=1)
    path = tmp_path / "tf_efficientnet_lite0.safetensors"
    state = {key: value.contiguous() for key, value in source.model.state_dict().items()}
    safetensors.torch.save_file({**state, **classifier}, path)
    backbone = load_backbone(path)
    assert backbone.name == "tf_efficientnet_lite0"
    assert backbone.mean == backbone.std == (0.5, 0.5, 0.5)
    assert agree(backbone, source)
    path.rename(tmp_path / "mobilenetv2_100.safetensors")
    with pytest.raises(ValueError, match="give the timm name of its architecture"):
        load_backbone(tmp_path / "mobilenetv2_100.safetensors")


def quantised(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Matrices as numbers of 8 bits, for a scale of 0.01 if they are integers."""
    scale = 1.0 if dtype.is_floating_point else 0.01
    return {key: (value / scale).to(dtype) if value.ndim == 2 else value for key, value in state.items()}


def test_quantised_weights_are_refused_and_floats_of_eight_bits_are_converted(tmp_path):
    backbone = vit()
    state = backbone.model.state_dict()
    integers, floats = quantised(state, torch.int8), quantised(state, torch.float8_e4m3fn)
    scales = {key.replace("weight", "weight_scale"): torch.tensor(0.01) for key in state if state[key].ndim == 2}
    for content in (integers, {**integers, **scales}, {**floats, **scales}):
        safetensors.torch.save_file(content, tmp_path / "weights.safetensors")
        with pytest.raises(InputError, match=r"int8 instead of float32|and their scales \("):
            load_backbone(tmp_path / "weights.safetensors")
        with pytest.raises(InputError, match=r"int8 instead of float32|and their scales \("):
            load_pretrained(backbone, tmp_path / "weights.safetensors")
    safetensors.torch.save_file(floats, tmp_path / "weights.safetensors")
    load_pretrained(backbone, tmp_path / "weights.safetensors")
    loaded = backbone.model.state_dict()
    assert all(torch.equal(loaded[key], value.float()) for key, value in floats.items())


def test_half_precision_weights_load_into_a_float_network(tmp_path):
    source = vit(seed=2)
    half = {key: value.half() for key, value in source.model.state_dict().items()}
    safetensors.torch.save_file(half, tmp_path / "weights.safetensors")
    backbone = vit(seed=3)
    load_pretrained(backbone, tmp_path / "weights.safetensors")
    assert backbone.model.norm.weight.dtype == torch.float32
    assert torch.equal(backbone.model.cls_token.half(), source.model.cls_token.half())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"depth": 4}, r"24 keys missing: blocks\.2\.norm1\.weight,.*, \.\.\."),
        ({"depth": 1}, r"12 keys unexpected: blocks\.1\.norm1\.weight"),
        ({"embed_dim": 32}, r"keys of a different shape: cls_token \(1, 1, 64\) instead of \(1, 1, 32\)"),
        ({"init_values": 1e-5}, r"keys missing: blocks\.0\.ls1\.gamma"),
    ],
)
def test_weights_of_another_network_are_rejected_entirely(tmp_path, args, message):
    torch.save(vit(seed=2).model.state_dict(), tmp_path / "weights.pth")
    backbone = vit(seed=3, **args)

    def load() -> None:
        with pytest.raises(ValueError, match=message):
            load_pretrained(backbone, tmp_path / "weights.pth")

    assert unchanged_by(load, backbone)


def test_the_first_eight_missing_keys_are_listed(tmp_path):
    state = vit().model.state_dict()
    torch.save({key: value for key, value in state.items() if "blocks.0" not in key}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match="12 keys missing") as caught:
        load_pretrained(vit(), tmp_path / "weights.pth")
    assert str(caught.value).count("blocks.0.") == 8


def test_a_missing_file_and_an_unknown_name():
    with pytest.raises(FileNotFoundError, match=r"no weights at .*nowhere\.pth"):
        load_pretrained(vit(), "nowhere.pth")
    with pytest.raises(ValueError, match=r"'vit_smal_patch16_224' is neither a file nor a timm name.*did you mean"):
        load_pretrained(vit(), "vit_smal_patch16_224")
    with pytest.raises(ValueError, match="weights of resnet50, but the backbone is vit_small_patch16_224"):
        load_pretrained(vit(), "resnet50.a1_in1k")
    with pytest.raises(ValueError, match=r"timm has no weights .*\.dinoo'.*vit_small_patch16_224\.dino"):
        load_pretrained(vit(), "vit_small_patch16_224.dinoo")


def test_the_error_without_internet_suggests_a_solution(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    backbone = build_backbone(VIT, args={"depth": 1}, image_size=64)

    def load() -> None:
        with pytest.raises(ConnectionError, match=r"download .*huggingface\.co/timm/vit_small"):
            load_pretrained(backbone, "vit_small_patch16_224.dino")

    assert unchanged_by(load, backbone)
    with pytest.raises(ConnectionError, match=r"download .*huggingface\.co/timm/vit_tiny"):
        load_backbone("vit_tiny_patch16_224")


def test_weights_of_timm_come_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tag = "vit_small_patch16_224.augreg_in21k_ft_in1k"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    source = vit(seed=2, image_size=224)
    cached = tmp_path / f"models--timm--{tag}"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("0" * 40)
    (cached / "snapshots" / ("0" * 40)).mkdir(parents=True)
    state = {**source.model.state_dict(), "head.weight": torch.zeros(1000, 64), "head.bias": torch.zeros(1000)}
    safetensors.torch.save_file(state, cached / "snapshots" / ("0" * 40) / "model.safetensors")
    before = torch.get_rng_state()
    monkeypatch.chdir(tmp_path)
    Path("vit_small_patch16_224").mkdir()  # is not what "timm" means
    for name in (tag, "timm"):  # this tag is timm's default
        backbone = vit(seed=3)
        loaded = load_pretrained(backbone, name)
        assert (loaded.source, loaded.format) == (tag, "timm")
        assert backbone.licences[0].hub == f"timm/{tag}"
        assert set(loaded.dropped["head"]) == {"head.weight", "head.bias"}
        assert torch.equal(backbone.model.cls_token, source.model.cls_token)
        assert backbone.model.pos_embed.shape == (1, 17, 64)
        assert backbone.mean == (0.5, 0.5, 0.5)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match=r"does not fit .*'depth': 3.*12 keys missing"):
        load_pretrained(vit(depth=3), tag)


# load_backbone: names, folders, and saved values


def test_a_timm_name_with_random_weights():
    backbone = load_backbone("vit_tiny_patch16_224", args={"depth": 2}, pretrained=False, image_size=64, seed=3)
    assert agree(backbone, build_backbone("vit_tiny_patch16_224", args={"depth": 2}, image_size=64, seed=3))
    assert backbone.loaded is None
    assert load_backbone("vit_tiny_patch16_384", args={"depth": 1}, pretrained=False).image_size == 384


def test_a_file_without_its_weights(tmp_path):
    trained = build_backbone("vit_tiny_patch16_224", args={"depth": 2, "patch_size": 8}, image_size=64, seed=5)
    save_backbone(trained, tmp_path)
    alone = load_backbone(tmp_path, pretrained=False, seed=3)
    assert agree(alone, build_backbone(trained.name, args=trained.args, image_size=64, seed=3))
    assert not agree(alone, trained)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("vit_smal_patch16_224", {}, "did you mean vit_"),
        ("weights.pht", {}, r"did you mean .*weights\.pth"),
        ("{}/weigths.pth", {}, r"did you mean .*weights\.pth"),
        ("vit_small_patch16_224.dinoo", {}, r"vit_small_patch16_224\.dino"),
        (next(name for name in timm.list_models("vit_*") if not timm.list_pretrained(name)), {}, "give a file"),
        ("vit_tiny_patch16_224", {"name": "resnet50"}, "name='resnet50'"),
        ("{}/nowhere", {}, "no weights at .*nowhere"),
        ("{}", {}, r"backbone\.safetensors"),
        ("{}/run", {"args": {"depth": 2}}, "args="),
        # Names of torch.hub.
        ("dinov2_vits14", {}, "vit_small_patch14_dinov2"),
        ("dinov2_vitg14_reg", {}, "vit_giant_patch14_reg4_dinov2"),
        ("dinov3_vits16plus", {}, "vit_small_plus_patch16_dinov3"),
        ("dino_vits16", {}, r"vit_small_patch16_224\.dino"),
    ],
)
def test_sources_without_weights_are_refused_with_the_nearest(tmp_path, monkeypatch, source, options, words):
    torch.save(vit().model.state_dict(), tmp_path / "weights.pth")
    save_backbone(vit(), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        load_backbone(source.format(tmp_path), **options)


def test_another_image_size_is_resampled(tmp_path):
    source = vit(seed=2, image_size=64)
    torch.save(source.model.state_dict(), tmp_path / "weights.pth")
    args = {"num_heads": 2}
    backbone = load_backbone(tmp_path / "weights.pth", args=args, image_size=96).eval()
    assert backbone.image_size == 96
    assert backbone.loaded is not None
    assert backbone.loaded.resampled == ("pos_embed",)
    expected, found = source.encode(images(96)), backbone.encode(images(96))
    torch.testing.assert_close(found.tokens, expected.tokens, rtol=0, atol=1e-5)
    save_backbone(source, tmp_path / "run")
    assert load_backbone(tmp_path / "run", image_size=96).model.pos_embed.shape == (1, 37, 64)


def test_a_saved_backbone_is_recognised_under_another_name(tmp_path):
    source = vit(seed=2)
    source.mean = (0.5, 0.5, 0.5)
    save_backbone(source, tmp_path)
    (tmp_path / "backbone.safetensors").rename(tmp_path / "mine.safetensors")
    backbone = load_backbone(tmp_path / "mine.safetensors")
    assert agree(backbone, source)
    assert backbone.mean == (0.5, 0.5, 0.5)
    assert backbone.loaded is not None
    assert backbone.loaded.format == "cribo backbone"


def test_the_teacher_of_an_interrupted_run_is_loaded(tmp_path, tiny, monkeypatch):
    import cribo.pretraining.run as pretraining

    monkeypatch.setattr(pretraining, "write_report", lambda *args, **options: [])
    run = pretraining.pretrain(tiny({"optim.epochs": 2}), out=tmp_path, name="run")
    expected = run.backbone()
    for name in ("backbone.safetensors", "backbone.json"):
        (run.folder / name).unlink()
    backbone = load_backbone(run.folder)
    assert agree(backbone, expected, 32)
    assert (backbone.name, backbone.args, backbone.image_size) == (expected.name, expected.args, expected.image_size)
    assert backbone.loaded is not None
    assert (backbone.loaded.format, backbone.loaded.network) == ("cribo run", "teacher")
    assert "the run has not finished" in backbone.loaded.notes[0]
    assert set(backbone.loaded.dropped) >= {"student", "head", "training state"}
    checkpoint = next((run.folder / "checkpoints").glob("*.ckpt"))
    assert agree(load_backbone(checkpoint), expected, 32)
    assert not agree(load_backbone(checkpoint, network="student"), expected, 32)
    newer = checkpoint.with_name("step=99999999.ckpt")
    newer.write_bytes(checkpoint.read_bytes()[:-1])
    backbone = load_backbone(run.folder)
    assert agree(backbone, expected, 32)
    assert backbone.loaded is not None
    assert "step=99999999.ckpt cannot be used: truncated, damaged, or not a PyTorch file" in backbone.loaded.notes[1]
    checkpoint.unlink()
    with pytest.raises(FileNotFoundError, match=r"no backbone at .*step=99999999.ckpt cannot be used"):
        load_backbone(run.folder)


def test_another_epsilon_is_saved_and_used_by_plain_timm(tmp_path, monkeypatch):
    source = vit(seed=2)
    source.set_numerics(Numerics(norm_eps=0.1))
    save_backbone(source, tmp_path)
    assert not agree(vit(seed=2), source)
    backbone = load_backbone(tmp_path)
    assert backbone.numerics.norm_eps == 0.1
    assert agree(backbone, source)
    again = vit(seed=3)
    load_pretrained(again, tmp_path)
    assert agree(again, source)
    torch.save(vit(seed=4).model.state_dict(), tmp_path / "usual.pth")
    load_pretrained(again, tmp_path / "usual.pth")
    assert agree(again, vit(seed=4))
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    exec(json.loads((tmp_path / "backbone.json").read_text())["how_to_load"], scope)
    assert torch.equal(scope["model"].eval()(images()), source.encode(images()).global_token)
