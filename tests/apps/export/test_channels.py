"""Exports of networks and memories for images of five channels: the check, the code, and how images are described."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cribo.apps.export import Target, export_backbone, export_memory
from cribo.apps.export.memory import load
from cribo.features.memory import SegmentationMemory, SegmentationSettings
from cribo.models import Backbone, build_backbone, inflate, load_backbone, normalise

NETWORKS = {
    "vit_tiny_patch16_224": {"depth": 2, "embed_dim": 64, "num_heads": 2},
    "resnet18": {"layers": (1, 1, 1, 1), "channels": (8, 8, 8, 16)},
}
PIXELS = {"channels": [4, 3, 2, 1, 0], "range": [0, 4095]}
OPTIONS = "--channels 4,3,2,1,0 --range 0,4095"


def five_channels(name: str) -> Backbone:
    backbone = inflate(build_backbone(name, args=NETWORKS[name], image_size=64), 5).eval()
    backbone.mean, backbone.std = (0.1, 0.2, 0.3, 0.4, 0.5), (0.5, 0.4, 0.3, 0.2, 0.1)
    backbone.pixels = PIXELS
    return backbone


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("vit_tiny_patch16_224", "timm"),
        ("resnet18", "timm"),
        ("vit_tiny_patch16_224", "transformers"),
        ("resnet18", "transformers"),
        ("vit_tiny_patch16_224", "torch-export"),
        pytest.param("vit_tiny_patch16_224", "onnx", marks=pytest.mark.slow),
    ],
)
def test_the_code_of_an_export_gives_the_features(name: str, to: Target, tmp_path: Path) -> None:
    backbone = five_channels(name)
    report = export_backbone(backbone, to, tmp_path / "out")
    assert report.difference < 1e-4
    assert any(OPTIONS in note for note in report.notes)
    assert OPTIONS in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "export.json").read_text())["backbone"]["pixels"] == PIXELS
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 5), dtype=np.uint8)
    names: dict[str, Any] = {"pixels": pixels}
    with torch.no_grad():
        exec(report.how_to_load, names)
        images = torch.from_numpy(pixels / 255).float().permute(2, 0, 1)[None]
        wanted = backbone.encode(normalise(images, mean=backbone.mean, std=backbone.std)).tokens
    found = torch.as_tensor(names["feature_map"].flatten(2).mT if "feature_map" in names else names["tokens"])
    torch.testing.assert_close(found, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)
    if to == "timm":
        loaded = load_backbone(tmp_path / "out")
        assert (loaded.in_chans, loaded.pixels) == (5, PIXELS)
        assert loaded.fingerprint() == backbone.fingerprint()


@pytest.mark.parametrize("to", ["torch-export", pytest.param("onnx", marks=pytest.mark.slow)])
def test_a_memory_becomes_a_graph_of_five_channels(to: Target, tmp_path: Path) -> None:
    settings = SegmentationSettings(
        scale=1.0, head="knn", whiten=False, prior=0.0, channels=(4, 3, 2, 1, 0), range=(0, 4095)
    )
    memory = SegmentationMemory(five_channels("vit_tiny_patch16_224"), classes=["a", "b"], settings=settings)
    image = torch.randint(0, 256, (5, 64, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    image[4, :, :48] = 255
    labels = torch.zeros(64, 96, dtype=torch.long)
    labels[:, 48:] = 1
    memory.add(image, labels)
    report = export_memory(memory, to, tmp_path / "out")
    assert report.equal >= 0.999
    found, _ = load(tmp_path / "out", to)(image.permute(1, 2, 0).contiguous())
    assert (found == memory.segment(image).labels).float().mean() > 0.99
    assert "(height, width, 5)" in (tmp_path / "out" / "README.md").read_text()
