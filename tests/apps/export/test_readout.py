"""The readout layer is part of all exports."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from cribo import load_backbone
from cribo.apps.export import Target, export_backbone
from cribo.models import Backbone, build_backbone, load_pretrained, normalise, save_backbone

Network = Callable[[str], Backbone]


def with_readout(backbone: Backbone, width: int = 5) -> Backbone:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(width, backbone.embed_dim, generator=generator)
    backbone.set_readout(weight, torch.randn(width, generator=generator))
    return backbone.eval()


def efficientnet() -> Backbone:
    return build_backbone("efficientnet_lite0", args={"output_stride": 16}, image_size=64)


def convnext() -> Backbone:
    args = {"depths": (1, 1, 1, 2), "dims": (8, 16, 32, 64)}
    backbone = build_backbone("convnext_tiny", args=args, image_size=64)
    with torch.no_grad():
        backbone.model.head.norm.weight.uniform_(0.5, 2)
    return backbone


def swin() -> Backbone:
    args = {"depths": (1, 1), "num_heads": (1, 2), "embed_dim": 16, "window_size": 4}
    return build_backbone("swin_tiny_patch4_window7_224", args=args, image_size=32)


@torch.no_grad()
def encoded(backbone: Backbone, images: torch.Tensor) -> torch.Tensor:
    return backbone.encode(normalise(images, mean=backbone.mean, std=backbone.std)).tokens


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)


MADE = {"efficientnet": efficientnet, "convnext": convnext, "swin": swin}
KINDS = ["vit", "dinov3", "mean", "resnet", *MADE]


def make(kind: str, network: Network) -> Backbone:
    return with_readout(MADE[kind]() if kind in MADE else network(kind))


def assert_lines_give_the_tokens(backbone: Backbone, lines: str) -> None:
    """Run the printed code on a picture of the network's input size and check the tokens."""
    size = backbone.image_size
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    names: dict[str, object] = {"picture": Image.fromarray(pixels)}
    with torch.no_grad():
        exec(lines, names)
    found = names.get("tokens", names.get("feature_map"))
    assert isinstance(found, torch.Tensor)
    assert_near(found.reshape(1, -1, 5), encoded(backbone, torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255))


@pytest.mark.parametrize(
    ("target", "kind"), [*(("timm", kind) for kind in KINDS), ("transformers", "vit"), ("transformers", "resnet")]
)
def test_folders_store_the_readout_as_classifier(target: Target, kind: str, network: Network, tmp_path: Path) -> None:
    backbone = make(kind, network)
    report = export_backbone(backbone, target, tmp_path / "out")
    assert report.difference < 1e-5
    assert any("readout layer is stored as timm's classifier" in note for note in report.notes)
    assert_lines_give_the_tokens(backbone, report.how_to_load)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_classes"] == config["pretrained_cfg"]["num_classes"] == 5
    again = load_backbone(tmp_path / "out")
    assert again.loaded is not None
    assert "they include a linear layer after the features, of 5 channels" in again.loaded.notes
    assert again.fingerprint() == backbone.fingerprint()


@pytest.mark.parametrize(("target", "kind"), [("onnx", "vit"), ("torch-export", "resnet")])
def test_graphs_include_the_readout(target: Target, kind: str, network: Network, tmp_path: Path) -> None:
    report = export_backbone(make(kind, network), target, tmp_path / "out")
    assert report.difference < 1e-4  # with tokens of 5 channels
    assert "the readout layer is part of the graph" in report.notes


def test_more_blocks_than_it_reads_are_refused(network: Network, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layers must be 1, got 2: .* has a linear layer after its features"):
        export_backbone(make("vit", network), "onnx", tmp_path / "out", layers=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["vit", "mean", "convnext", "resnet"])
def test_the_code_in_a_saved_backbone_returns_its_tokens(
    kind: str, network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = make(kind, network)
    save_backbone(backbone, tmp_path)
    monkeypatch.chdir(tmp_path)
    images = torch.randn(1, 3, backbone.image_size, backbone.image_size)
    names: dict[str, object] = {"images": images}
    lines = json.loads((tmp_path / "backbone.json").read_text())["how_to_load"]
    with torch.no_grad():
        exec(lines.replace("; tokens", "; model.eval(); tokens"), names)
        wanted = backbone.encode(images).tokens
    tokens = names["tokens"]
    assert isinstance(tokens, torch.Tensor)
    tokens = tokens.reshape(1, -1, 5)
    assert_near(tokens[:, -wanted.shape[1] :], wanted)


def test_classifiers_of_other_projects_are_dropped(network: Network, tmp_path: Path) -> None:
    backbone = make("vit", network)
    export_backbone(backbone, "timm", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["pretrained_cfg"]["tag"] = "in1k"
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = load_backbone(tmp_path)
    assert again.readout is None
    assert again.loaded is not None
    assert any("head.weight" in keys for keys in again.loaded.dropped.values())


def test_loading_weights_replaces_the_readout(network: Network, tmp_path: Path) -> None:
    backbone = make("vit", network)
    fingerprint = backbone.fingerprint()
    export_backbone(backbone, "timm", tmp_path / "with")
    save_backbone(backbone, tmp_path / "saved")
    export_backbone(network("vit"), "timm", tmp_path / "without")
    for folder in ("with", "saved"):
        other = with_readout(network("vit"), width=7)
        load_pretrained(other, tmp_path / folder)
        assert other.fingerprint() == fingerprint
    load_pretrained(other, tmp_path / "without")
    assert other.fingerprint() == network("vit").fingerprint()


def test_weights_that_do_not_fit_leave_the_readout_unchanged(network: Network, tmp_path: Path) -> None:
    export_backbone(make("registers", network), "timm", tmp_path)
    backbone = with_readout(network("vit"), width=7)
    before = backbone.fingerprint()
    with pytest.raises(ValueError, match="does not fit"):
        load_pretrained(backbone, tmp_path)
    assert backbone.fingerprint() == before
    assert isinstance(backbone.readout, nn.Linear)


def test_plain_timm_returns_our_global_token_as_class_scores(network: Network, tmp_path: Path) -> None:
    backbone = make("resnet", network)
    export_backbone(backbone, "timm", tmp_path)
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        assert_near(model(images), backbone.encode(images).global_token)
