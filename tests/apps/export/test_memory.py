"""Memories as graphs: their labels without this package, and what is refused."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from cribo.apps.export import MemoryReport, Target, export_memory
from cribo.apps.export.memory import compare_labels, load
from cribo.base.errors import DifferentFeatures, FolderError, InputError
from cribo.cli import main
from cribo.features.memory import Example, SegmentationMemory, SegmentationSettings
from cribo.models import build_backbone, save_backbone

SIZES = ((50, 90), (130, 61), (64, 64))  # not those of the check


def smooth(height: int, width: int, seed: int) -> torch.Tensor:
    """Return an image (3, H, W) of coloured spots."""
    small = torch.rand(1, 3, 4, 5, generator=torch.Generator().manual_seed(seed))
    return (F.interpolate(small, size=(height, width), mode="bilinear")[0] * 255).to(torch.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a backbone, and a memory of two images labelled by their red channel."""
    folder = tmp_path_factory.mktemp("memory")
    args = {"patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
    save_backbone(build_backbone("vit_tiny_patch16_224", args=args, image_size=32).eval(), folder / "run")
    settings = SegmentationSettings(scale=1.0, head="both", whiten=False, prior=0.5, range=(0, 4095))
    memory = SegmentationMemory(str(folder / "run"), classes=["sky", "road", "car"], settings=settings, device="cpu")
    memory.extend([Example(image := smooth(70, 90, seed), (image[0] // 86).long()) for seed in (1, 2)])
    memory.save(folder / "mine.safetensors")
    return folder


def opened(folder: Path, **changes: Any) -> SegmentationMemory:
    return SegmentationMemory.load(folder / "mine.safetensors", str(folder / "run"), device="cpu", changes=changes)


@pytest.fixture(scope="module")
def report(folder: Path) -> MemoryReport:
    return export_memory(opened(folder), "onnx", folder / "exported")


def assert_labels_agree(memory: SegmentationMemory, exported: Path, target: Target) -> None:
    label = load(exported, target)
    for number, size in enumerate(SIZES):
        image = smooth(*size, seed=10 + number)
        labels, confidence = label(image.permute(1, 2, 0).contiguous())
        own = memory.segment(image)
        assert labels.dtype == torch.uint8
        assert (labels == own.labels).float().mean() >= 0.999
        torch.testing.assert_close(confidence, own.confidence, atol=0.05, rtol=0)


def test_onnx_labels_images_of_any_size_as_the_memory(folder: Path, report: MemoryReport) -> None:
    assert report.equal >= 0.999
    assert_labels_agree(opened(folder), report.folder, "onnx")
    model = onnx.load(report.folder / "memory.onnx")
    about = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(about["classes"]) == ["sky", "road", "car"]
    assert len(json.loads(about["palette"])) == 3
    assert "--range 0,4095" in about["image"]
    sizes = [size.dim_param or size.dim_value for size in model.graph.input[0].type.tensor_type.shape.dim]
    assert sizes == ["height", "width", 3]
    card = (report.folder / "README.md").read_text()
    assert "pipeline_tag: image-segmentation" in card
    assert "| 1 | road |" in card
    assert str(folder) not in card + (report.folder / "export.json").read_text()


def test_torch_export_labels_images_of_any_size_as_the_memory(folder: Path, tmp_path: Path) -> None:
    memory = opened(folder, head="ridge", refine="none")
    assert export_memory(memory, "torch-export", tmp_path / "out").equal == 1
    assert_labels_agree(memory, tmp_path / "out", "torch-export")


_FRESH = """
import sys
import numpy, onnxruntime
from PIL import Image
session = onnxruntime.InferenceSession(sys.argv[1])
pixels = numpy.asarray(Image.open(sys.argv[2]).convert("RGB"))
labels, confidence = session.run(["labels", "confidence"], {"image": pixels})
Image.fromarray(labels).save(sys.argv[3])
assert not any(name in sys.modules for name in ("torch", "timm", "cribo"))
"""


@pytest.mark.slow
def test_a_fresh_environment_with_onnxruntime_gives_the_same_labels(
    folder: Path, report: MemoryReport, tmp_path: Path
) -> None:
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed")
    packages = [word for name in ("onnxruntime", "numpy", "pillow") for word in ("--with", name)]
    python = ["uv", "run", "--quiet", "--no-project", "--isolated", *packages, "python", "-c"]
    there = subprocess.run([*python, "print(1)"], capture_output=True, text=True, timeout=600, check=False)
    if there.returncode:
        pytest.skip(f"onnxruntime cannot be installed: {there.stderr[-300:]}")
    image = smooth(91, 120, seed=5)
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(tmp_path / "a.png")
    places = [report.folder / "memory.onnx", tmp_path / "a.png", tmp_path / "labels.png"]
    done = subprocess.run(
        [*python, _FRESH, *map(str, places)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = np.asarray(Image.open(tmp_path / "labels.png"))
    assert (found == opened(folder).segment(image).labels.numpy()).mean() >= 0.999


def test_the_check_detects_other_labels_and_damaged_files(folder: Path, report: MemoryReport, tmp_path: Path) -> None:
    def silent(what: str, done: int, total: int) -> None: ...

    with pytest.raises(DifferentFeatures, match="of the labels"):
        compare_labels(opened(folder, prior=0.0, neighbours=1), lambda: load(report.folder, "onnx"), silent)
    damaged = shutil.copytree(report.folder, tmp_path / "out") / "memory.onnx"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(DifferentFeatures, match="cannot be loaded"):
        compare_labels(opened(folder), lambda: load(damaged.parent, "onnx"), silent)


@pytest.mark.parametrize("target", ["timm", "transformers", "hub"])
def test_other_targets_are_refused(folder: Path, target: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="onnx or torch-export"):
        export_memory(opened(folder), target, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_export_is_not_replaced(folder: Path, report: MemoryReport) -> None:
    with pytest.raises(FolderError, match="--overwrite"):
        export_memory(opened(folder), "onnx", report.folder)


def test_the_command_finds_the_backbone_and_refuses_another(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["export", "--memory", str(folder / "mine.safetensors"), "--to", "torch-export", "--out"]
    assert main([*words, str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "labels are those of the memory" in said.replace("\n", " ")
    assert "torch.export.load" in said
    other = tmp_path / "other"
    save_backbone(build_backbone("resnet10t", image_size=32), other)
    for more, named in (
        (["--backbone", str(other)], "created with another backbone"),
        (["--backbone", str(tmp_path / "gone")], "gone"),
        (["--precision", "float16"], "--precision"),
        (["--fixed_size", "64,64"], "--fixed_size"),
    ):
        assert main([*words, str(tmp_path / "new"), *more]) == 2
        assert named in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    (folder / "run").rename(folder / "moved")
    try:
        assert main([*words, str(tmp_path / "new")]) == 2
        assert "--backbone" in capsys.readouterr().err
    finally:
        (folder / "moved").rename(folder / "run")
    assert not (tmp_path / "new").exists()
    assert main(["export", "--to", "onnx"]) == 2
    assert "--backbone" in capsys.readouterr().err
