import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.torch
import timm
import torch
import yaml
from PIL import Image
from timm.data.config import resolve_data_config
from transformers import AutoImageProcessor, AutoModel

from cribo import load_backbone
from cribo.apps.export import ExportReport, export_backbone
from cribo.apps.export.config import ExportOptions
from cribo.apps.export.run import compare_features
from cribo.apps.export.timm_folder import load as load_timm
from cribo.base.errors import DifferentFeatures, FolderError, InputError
from cribo.cli import main
from cribo.features.config import FeaturePrecision
from cribo.models import Backbone, normalise, save_backbone
from cribo.models.numerics import Numerics

Network = Callable[[str], Backbone]
Exported = Callable[..., tuple[Backbone, ExportReport]]


def expected(backbone: Backbone, images: torch.Tensor, layers: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        features = backbone.encode(normalise(images, mean=backbone.mean, std=backbone.std), layers)
    return features.tokens, features.global_token


def odd_images(backbone: Backbone, seed: int = 0) -> list[torch.Tensor]:
    """Return batches of sizes that the export did not check."""
    generator, patch = torch.Generator().manual_seed(seed), backbone.patch_size
    sizes = ((1, 2 * patch, 9 * patch), (4, 5 * patch, 5 * patch), (2, 3 * patch, 2 * patch))
    return [torch.rand(batch, 3, height, width, generator=generator) for batch, height, width in sizes]


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize("kind", ["vit", "registers", "dinov3", "resnet", "mean"])
def test_timm_builds_the_network_from_the_folder_only(kind: str, exported: Exported) -> None:
    backbone, report = exported(kind, "timm")
    assert report.difference < 1e-5
    assert len({size[1:] for size in report.checked}) == len({size[0] for size in report.checked}) == 3
    model = timm.create_model(f"local-dir:{report.folder}", pretrained=True).eval()
    config = resolve_data_config({}, model=model)
    assert (tuple(config["mean"]), tuple(config["std"])) == (backbone.mean, backbone.std)
    assert tuple(config["input_size"]) == (3, backbone.image_size, backbone.image_size)
    for key, value in backbone.model.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    assert load_backbone(report.folder).fingerprint() == backbone.fingerprint()


@pytest.mark.parametrize(
    ("kind", "holder"),
    [
        ("vit", "Dinov2WithRegistersModel"),
        ("registers", "Dinov2WithRegistersModel"),
        ("gated", "Dinov2WithRegistersModel"),
        ("dinov3", "DINOv3ViTModel"),
        ("resnet", "TimmWrapperModel"),
    ],
)
def test_transformers_returns_the_same_features_at_every_size(kind: str, holder: str, exported: Exported) -> None:
    backbone, report = exported(kind, "transformers")
    model = AutoModel.from_pretrained(report.folder).eval()
    assert type(model).__name__ == holder
    assert any(holder in note for note in report.notes)
    again = load_backbone(report.folder).eval() if kind in ("vit", "registers") else backbone
    assert (again.mean, again.std) == (backbone.mean, backbone.std)
    for images in odd_images(backbone):
        tokens, global_token = expected(backbone, images)
        with torch.no_grad():
            output = model(normalise(images, mean=backbone.mean, std=backbone.std))
        assert_near(output.pooler_output, global_token)
        if kind != "resnet":
            assert_near(output.last_hidden_state[:, -tokens.shape[1] :], tokens)
        assert_near(expected(again, images)[0], tokens)
    processor = AutoImageProcessor.from_pretrained(report.folder)
    grey = processor(Image.new("RGB", (30, 40), (128, 128, 128)), return_tensors="pt")["pixel_values"]
    mean, std = torch.tensor(backbone.mean), torch.tensor(backbone.std)
    torch.testing.assert_close(grey.mean(dim=(0, 2, 3)), (128 / 255 - mean) / std, atol=1e-4, rtol=0)
    assert grey.shape[-2:] == (backbone.image_size, backbone.image_size)


@pytest.mark.parametrize(("kind", "layers"), [("registers", 2), ("dinov3", 1)])
def test_onnx_accepts_any_batch_height_and_width(kind: str, layers: int, exported: Exported) -> None:
    backbone, report = exported(kind, "onnx", layers=layers)
    assert report.difference < 1e-4
    session = onnxruntime.InferenceSession(report.folder / "backbone.onnx")
    for images in odd_images(backbone):
        tokens, global_token = session.run(["tokens", "global_token"], {"images": images.numpy()})
        wanted = expected(backbone, images, layers)
        assert_near(torch.from_numpy(tokens), wanted[0])
        assert_near(torch.from_numpy(global_token), wanted[1])
    model = onnx.load(report.folder / "backbone.onnx")
    about = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(about["mean"]) == list(backbone.mean)
    assert json.loads(about["patch_size"]) == backbone.patch_size
    sizes = [size.dim_param or size.dim_value for size in model.graph.input[0].type.tensor_type.shape.dim]
    assert sizes == ["batch", 3, "height", "width"]


_WITHOUT_US = """
import sys
sys.modules["timm"] = sys.modules["cribo"] = None  # what is None cannot be imported
import torch
encode = torch.export.load(sys.argv[1] + "/backbone.pt2").module()
torch.save([encode(images) for images in torch.load("images.pt")], "features.pt")
"""


def test_torch_export_needs_only_pytorch(exported: Exported, tmp_path: Path) -> None:
    backbone, report = exported("resnet", "torch-export")
    torch.save(odd_images(backbone), tmp_path / "images.pt")
    subprocess.run([sys.executable, "-c", _WITHOUT_US, str(report.folder)], cwd=tmp_path, check=True)
    for images, found in zip(odd_images(backbone), torch.load(tmp_path / "features.pt"), strict=True):
        for one, wanted in zip(found, expected(backbone, images), strict=True):
            assert_near(one, wanted)


@pytest.mark.parametrize(
    ("target", "kind", "file"),
    [
        ("timm", "vit", "model.safetensors"),
        ("timm", "resnet", "model.safetensors"),
        ("transformers", "registers", "model.safetensors"),
        ("transformers", "dinov3", "model.safetensors"),
        ("transformers", "resnet", "model.safetensors"),
        ("onnx", "dinov3", "backbone.onnx"),
        ("torch-export", "resnet", "backbone.pt2"),
    ],
)
def test_half_precision_halves_the_weights_and_the_printed_code_returns_it(
    target: str, kind: str, file: str, exported: Exported
) -> None:
    backbone, whole = exported(kind, target, **({"layers": 1} if target == "onnx" else {}))
    _, half = exported(kind, target, precision="float16")
    assert whole.difference < 1e-5 < half.difference < 1e-2
    if file == "model.safetensors":
        types = {value.dtype for value in safetensors.torch.load_file(half.folder / file).values()}
        assert types <= {torch.float16, torch.int64}
    parameters = sum(parameter.numel() for parameter in backbone.parameters())
    assert whole.files[file] - half.files[file] > 1.5 * parameters
    assert json.loads((half.folder / "export.json").read_text())["options"]["precision"] == "float16"
    assert "| precision | float16 |" in (half.folder / "README.md").read_text()
    pixels = np.random.default_rng(0).integers(0, 256, (backbone.image_size, backbone.image_size, 3), dtype=np.uint8)
    names = {"picture": Image.fromarray(pixels)}
    with torch.no_grad():
        exec(half.how_to_load, names)
    found = torch.as_tensor(names.get("tokens", names.get("feature_map")))
    assert found.dtype == torch.float16
    found = found.flatten(2).mT if found.ndim == 4 else found
    wanted = expected(backbone, torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255)[0]
    torch.testing.assert_close(found.float(), wanted, atol=1e-2 * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("precision", "key", "change", "tolerance"),
    [("float32", "blocks.1.mlp.fc2.bias", 0.01, 1e-4), ("float16", "norm.bias", 0.2, 1e-2)],
)
def test_the_check_detects_a_damaged_file(
    precision: FeaturePrecision, key: str, change: float, tolerance: float, exported: Exported, tmp_path: Path
) -> None:
    backbone, report = exported("vit", "timm", **({"precision": precision} if precision == "float16" else {}))
    folder = shutil.copytree(report.folder, tmp_path / "out")
    silent, options = lambda what, done, total: None, ExportOptions(precision=precision)
    assert compare_features(backbone, lambda: load_timm(folder, options), options, silent)[0] < tolerance / 5
    path = folder / "model.safetensors"
    state = safetensors.torch.load_file(path)
    state[key][3] += change
    safetensors.torch.save_file(state, path)
    with pytest.raises(DifferentFeatures, match=f"1x3x48x48 must differ by at most {tolerance:.0e}"):
        compare_features(backbone, lambda: load_timm(folder, options), options, silent)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DifferentFeatures, match="cannot be loaded"):
        compare_features(backbone, lambda: load_timm(folder, options), options, silent)


def test_a_failed_check_leaves_no_files_and_keeps_old_ones(network: Network, tmp_path: Path) -> None:
    backbone, other = network("vit"), network("resnet")
    export_backbone(backbone, "timm", tmp_path / "out")
    before = (tmp_path / "out" / "export.json").read_text()
    backbone.set_numerics(Numerics(norm_eps=0.5))  # timm's configuration cannot store this
    for folder, overwrite in ((tmp_path / "new", False), (tmp_path / "out", True)):
        with pytest.raises(DifferentFeatures, match="use --to transformers or onnx or torch-export"):
            export_backbone(backbone, "timm", folder, overwrite=overwrite)
    with pytest.raises(FolderError, match="--overwrite"):
        export_backbone(other, "timm", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "export.json").read_text() == before
    assert export_backbone(backbone, "transformers", tmp_path / "new").difference < 1e-5
    export_backbone(other, "timm", tmp_path / "out", overwrite=True)
    assert load_backbone(tmp_path / "out").fingerprint() == other.fingerprint()


def test_the_backbone_is_not_changed(network: Network, tmp_path: Path) -> None:
    backbone = network("dinov3").half().train()
    fingerprint = backbone.fingerprint()
    report = export_backbone(backbone, "transformers", tmp_path / "out")
    assert report.difference < 1e-5
    assert backbone.training
    assert backbone.fingerprint() == fingerprint
    assert next(backbone.parameters()).requires_grad


@pytest.mark.parametrize("target", ["onnx", "torch-export"])
def test_a_graph_of_fixed_shapes_takes_one_image_of_its_size(target: str, network: Network, tmp_path: Path) -> None:
    backbone = network("registers")
    report = export_backbone(backbone, target, tmp_path / "out", fixed_size=(42, 70))  # pyright: ignore[reportArgumentType]
    assert report.checked == ((1, 42, 70),)
    assert "(70, 42)" in report.how_to_load  # Pillow's width and height
    image = torch.rand(1, 3, 42, 70, generator=torch.Generator().manual_seed(3))
    tokens, global_token = expected(backbone, image)
    if target == "onnx":
        session = onnxruntime.InferenceSession(tmp_path / "out" / "backbone.onnx")
        assert session.get_inputs()[0].shape == [1, 3, 42, 70]
        assert [output.shape for output in session.get_outputs()] == [[1, 15, 32], [1, 32]]
        found = [torch.from_numpy(part) for part in session.run(None, {"images": image.numpy()})]
    else:
        found = torch.export.load(tmp_path / "out" / "backbone.pt2").module()(image)
    assert_near(found[0], tokens)
    assert_near(found[1], global_token)
    for name in report.files:  # no places of this machine
        content = (tmp_path / "out" / name).read_bytes()
        for place in (str(tmp_path).encode(), b"/cribo/export/", b"/cribo/apps/", b"site-packages"):
            assert place not in content


def test_a_model_card_tells_what_it_is_and_how_to_load_it(exported: Exported) -> None:
    _, header, text = (exported("vit", "timm")[1].folder / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "timm"
    assert yaml.safe_load(header)["pipeline_tag"] == "image-feature-extraction"
    assert 'timm.create_model("local-dir:.", pretrained=True)' in text
    assert "0.4, 0.45, 0.5; 0.2, 0.25, 0.3" in text


@pytest.mark.parametrize(
    ("kind", "target", "options", "named"),
    [
        ("vit", "caffe", {}, "one of timm, transformers, onnx, torch-export, got 'caffe'"),
        ("vit", "timm", {"layers": 2}, "layers=2 is supported by onnx and torch-export"),
        ("vit", "onnx", {"layers": 3}, "layers must be 1 to 2"),
        ("vit", "onnx", {"opset": 11}, "opset must be 18 to 23, got 11"),
        ("registers", "timm", {"fixed_size": (42, 70)}, "fixed_size 42,70 is for onnx and torch-export"),
        ("registers", "onnx", {"fixed_size": (42, 71)}, "fixed_size must be multiples of 14"),
        ("mean", "transformers", {}, "use --to timm or onnx or torch-export"),
        ("NaN", "timm", {}, "NaN or infinity in norm.weight"),
        ("large", "timm", {"precision": "float16"}, r"1e\+05 in bn1.running_var: use --prec"),
    ],
)
def test_invalid_options_are_refused_before_any_work(
    kind: str, target: Any, options: dict[str, Any], named: str, network: Network, tmp_path: Path
) -> None:
    backbone = network({"NaN": "vit", "large": "resnet"}.get(kind, kind))
    if kind == "NaN":
        with torch.no_grad():
            backbone.model.norm.weight[0] = torch.nan
    if kind == "large":  # beyond the largest float16
        backbone.model.bn1.running_var[0] = 1e5
    with pytest.raises(InputError, match=named):
        export_backbone(backbone, target, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_the_command_prints_folder_difference_and_code(
    network: Network, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backbone = network("vit")
    save_backbone(backbone, tmp_path / "run")
    words = ["export", "--backbone", str(tmp_path / "run"), "--to", "timm", "--out", str(tmp_path / "out")]
    assert main([*words, "--image_size", "80"]) == 0
    said = capsys.readouterr().out
    assert "features differ by" in said
    assert f'timm.create_model("local-dir:{tmp_path.as_posix()}/out", pretrained=True).eval()' in said
    assert load_backbone(tmp_path / "out").image_size == 80
    assert main(words) == 2
    assert "already exists" in capsys.readouterr().err
    backbone.set_numerics(Numerics(norm_eps=0.5))
    save_backbone(backbone, tmp_path / "run")
    assert main([*words, "--overwrite"]) == 1
    assert "was removed" in capsys.readouterr().err
    assert load_backbone(tmp_path / "out").image_size == 80
