import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
from cribo.apps.export import export_backbone
from cribo.apps.export.config import ExportOptions
from cribo.apps.export.run import compare_features
from cribo.apps.export.timm_folder import load as load_timm
from cribo.base.errors import DifferentFeatures, FolderError, InputError
from cribo.cli import main
from cribo.models import Backbone, build_backbone, normalise, save_backbone
from cribo.models.numerics import Numerics

Network = Callable[[str], Backbone]


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
def test_timm_builds_the_network_from_the_folder_only(kind: str, network: Network, tmp_path: Path) -> None:
    backbone = network(kind)
    report = export_backbone(backbone, "timm", tmp_path / "out")
    assert report.difference < 1e-5
    assert len({size[1:] for size in report.checked}) == len({size[0] for size in report.checked}) == 3
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    config = resolve_data_config({}, model=model)
    assert (tuple(config["mean"]), tuple(config["std"])) == (backbone.mean, backbone.std)
    assert tuple(config["input_size"]) == (3, backbone.image_size, backbone.image_size)
    for key, value in backbone.model.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    assert load_backbone(tmp_path / "out").fingerprint() == backbone.fingerprint()


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
def test_transformers_returns_the_same_features_at_every_size(
    kind: str, holder: str, network: Network, tmp_path: Path
) -> None:
    backbone = network(kind)
    report = export_backbone(backbone, "transformers", tmp_path / "out")
    model = AutoModel.from_pretrained(tmp_path / "out").eval()
    assert type(model).__name__ == holder
    assert any(holder in note for note in report.notes)
    for images in odd_images(backbone):
        tokens, global_token = expected(backbone, images)
        with torch.no_grad():
            output = model(normalise(images, mean=backbone.mean, std=backbone.std))
        assert_near(output.pooler_output, global_token)
        if kind != "resnet":
            assert_near(output.last_hidden_state[:, -tokens.shape[1] :], tokens)
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    grey = processor(Image.new("RGB", (30, 40), (128, 128, 128)), return_tensors="pt")["pixel_values"]
    mean, std = torch.tensor(backbone.mean), torch.tensor(backbone.std)
    torch.testing.assert_close(grey.mean(dim=(0, 2, 3)), (128 / 255 - mean) / std, atol=1e-4, rtol=0)
    assert grey.shape[-2:] == (backbone.image_size, backbone.image_size)


@pytest.mark.parametrize("kind", ["vit", "registers"])
def test_an_export_to_transformers_can_be_loaded_again(kind: str, network: Network, tmp_path: Path) -> None:
    backbone = network(kind)
    export_backbone(backbone, "transformers", tmp_path / "out")
    again = load_backbone(tmp_path / "out").eval()
    assert (again.mean, again.std) == (backbone.mean, backbone.std)
    for images in odd_images(backbone):
        assert_near(expected(again, images)[0], expected(backbone, images)[0])


@pytest.mark.parametrize(("kind", "layers"), [("vit", 2), ("dinov3", 1)])
def test_onnx_accepts_any_batch_height_and_width(kind: str, layers: int, network: Network, tmp_path: Path) -> None:
    backbone = network(kind)
    report = export_backbone(backbone, "onnx", tmp_path / "out", layers=layers)
    assert report.difference < 1e-4
    session = onnxruntime.InferenceSession(tmp_path / "out" / "backbone.onnx")
    for images in odd_images(backbone):
        tokens, global_token = session.run(["tokens", "global_token"], {"images": images.numpy()})
        wanted = expected(backbone, images, layers)
        assert_near(torch.from_numpy(tokens), wanted[0])
        assert_near(torch.from_numpy(global_token), wanted[1])
    model = onnx.load(tmp_path / "out" / "backbone.onnx")
    about = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(about["mean"]) == list(backbone.mean)
    assert json.loads(about["patch_size"]) == backbone.patch_size
    sizes = [size.dim_param or size.dim_value for size in model.graph.input[0].type.tensor_type.shape.dim]
    assert sizes == ["batch", 3, "height", "width"]


_WITHOUT_US = """
import sys
sys.modules["timm"] = sys.modules["cribo"] = None  # what is None cannot be imported
import torch
encode = torch.export.load(sys.argv[1] + "/out/backbone.pt2").module()
torch.save([encode(images) for images in torch.load(sys.argv[1] + "/images.pt")], sys.argv[1] + "/features.pt")
"""


def test_torch_export_needs_only_pytorch(network: Network, tmp_path: Path) -> None:
    backbone = network("resnet")
    export_backbone(backbone, "torch-export", tmp_path / "out")
    torch.save(odd_images(backbone), tmp_path / "images.pt")
    subprocess.run([sys.executable, "-c", _WITHOUT_US, str(tmp_path)], check=True)
    for images, found in zip(odd_images(backbone), torch.load(tmp_path / "features.pt"), strict=True):
        for one, wanted in zip(found, expected(backbone, images), strict=True):
            assert_near(one, wanted)


@pytest.mark.parametrize(("target", "kind"), [("timm", "vit"), ("transformers", "registers")])
def test_the_printed_code_loads_the_export(target: str, kind: str, network: Network, tmp_path: Path) -> None:
    backbone = network(kind)
    report = export_backbone(backbone, target, tmp_path / "out")  # pyright: ignore[reportArgumentType]
    pixels = np.random.default_rng(0).integers(0, 256, (backbone.image_size, backbone.image_size, 3), dtype=np.uint8)
    names = {"picture": Image.fromarray(pixels)}
    with torch.no_grad():
        exec(report.how_to_load, names)  # the printed code
    tokens: torch.Tensor = names["tokens"]  # pyright: ignore[reportAssignmentType]
    images = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255
    assert_near(tokens, expected(backbone, images)[0])


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("timm", "vit"),
        ("timm", "resnet"),
        ("transformers", "registers"),
        ("transformers", "dinov3"),
        ("transformers", "resnet"),
        ("onnx", "dinov3"),
        ("torch-export", "vit"),
    ],
)
def test_half_precision_halves_the_weights_and_the_printed_code_returns_it(
    target: str, kind: str, network: Network, tmp_path: Path
) -> None:
    backbone = network(kind)
    whole = export_backbone(backbone, target, tmp_path / "whole")  # pyright: ignore[reportArgumentType]
    half = export_backbone(backbone, target, tmp_path / "half", precision="float16")  # pyright: ignore[reportArgumentType]
    assert whole.difference < 1e-5 < half.difference < 1e-2
    weights = "model.safetensors" if target in ("timm", "transformers") else None
    if weights is not None:
        types = {value.dtype for value in safetensors.torch.load_file(tmp_path / "half" / weights).values()}
        assert types <= {torch.float16, torch.int64}
    file = weights or {"onnx": "backbone.onnx", "torch-export": "backbone.pt2"}[target]
    parameters = sum(parameter.numel() for parameter in backbone.parameters())
    assert whole.files[file] - half.files[file] > 1.5 * parameters
    assert json.loads((tmp_path / "half" / "export.json").read_text())["options"]["precision"] == "float16"
    assert "| precision | float16 |" in (tmp_path / "half" / "README.md").read_text()
    pixels = np.random.default_rng(0).integers(0, 256, (backbone.image_size, backbone.image_size, 3), dtype=np.uint8)
    names = {"picture": Image.fromarray(pixels)}
    with torch.no_grad():
        exec(half.how_to_load, names)
    found = torch.as_tensor(names.get("tokens", names.get("feature_map")))
    assert found.dtype == torch.float16
    found = found.flatten(2).mT if found.ndim == 4 else found
    wanted = expected(backbone, torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255)[0]
    torch.testing.assert_close(found.float(), wanted, atol=1e-2 * float(wanted.abs().max()), rtol=0)


def test_the_check_of_half_precision_detects_a_damaged_file(network: Network, tmp_path: Path) -> None:
    backbone, folder, options = network("vit"), tmp_path / "out", ExportOptions(precision="float16")
    export_backbone(backbone, "timm", folder, precision="float16")
    path = folder / "model.safetensors"
    state = safetensors.torch.load_file(path)
    state["norm.bias"][3] += 0.2
    safetensors.torch.save_file(state, path)
    with pytest.raises(DifferentFeatures, match="tokens of images of 1x3x48x48 must differ by at most 1e-02"):
        compare_features(backbone, lambda: load_timm(folder, options), options, lambda what, done, total: None)


def test_weights_beyond_half_precision_are_refused_before_any_work(network: Network, tmp_path: Path) -> None:
    backbone = network("resnet")
    backbone.model.bn1.running_var[0] = 1e5
    with pytest.raises(InputError, match=r"at most 65504 in float16, got 1e\+05 in bn1.running_var: use --prec"):
        export_backbone(backbone, "timm", tmp_path / "out", precision="float16")
    assert not list(tmp_path.iterdir())
    assert export_backbone(backbone, "timm", tmp_path / "out").difference < 1e-5


def test_the_check_detects_a_damaged_file(network: Network, tmp_path: Path) -> None:
    backbone, folder = network("vit"), tmp_path / "out"
    export_backbone(backbone, "timm", folder)
    silent, options = lambda what, done, total: None, ExportOptions()
    assert compare_features(backbone, lambda: load_timm(folder, options), options, silent)[0] < 1e-5
    path = folder / "model.safetensors"
    state = safetensors.torch.load_file(path)
    state["blocks.1.mlp.fc2.bias"][3] += 0.01
    safetensors.torch.save_file(state, path)
    with pytest.raises(DifferentFeatures, match="tokens of images of 1x3x48x48 must differ by at most 1e-04"):
        compare_features(backbone, lambda: load_timm(folder, options), options, silent)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DifferentFeatures, match="cannot be loaded"):
        compare_features(backbone, lambda: load_timm(folder, options), options, silent)


def test_a_failed_check_leaves_no_files_and_keeps_old_ones(network: Network, tmp_path: Path) -> None:
    backbone = network("vit")
    export_backbone(backbone, "timm", tmp_path / "out")
    before = (tmp_path / "out" / "export.json").read_text()
    backbone.set_numerics(Numerics(norm_eps=0.5))  # timm's configuration cannot store this
    for folder, overwrite in ((tmp_path / "new", False), (tmp_path / "out", True)):
        with pytest.raises(DifferentFeatures, match="was removed; use --to transformers or onnx or torch-export"):
            export_backbone(backbone, "timm", folder, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "export.json").read_text() == before
    assert export_backbone(backbone, "transformers", tmp_path / "new").difference < 1e-5


def test_nothing_is_overwritten_unless_asked(network: Network, tmp_path: Path) -> None:
    first, other = network("vit"), network("resnet")
    export_backbone(first, "timm", tmp_path / "out")
    with pytest.raises(FolderError, match="already exists: choose another --out, or replace it with --overwrite"):
        export_backbone(other, "timm", tmp_path / "out")
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
def test_graphs_contain_no_places_of_this_machine(target: str, network: Network, tmp_path: Path) -> None:
    report = export_backbone(network("registers"), target, tmp_path / "out")  # pyright: ignore[reportArgumentType]
    for name in report.files:
        content = (tmp_path / "out" / name).read_bytes()
        assert str(tmp_path).encode() not in content
        assert b"/cribo/export/" not in content
        assert b"site-packages" not in content


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


@pytest.mark.parametrize(
    ("target", "size", "message"),
    [
        ("timm", (42, 70), "fixed_size 42,70 is for onnx and torch-export"),
        ("onnx", (42, 71), "fixed_size must be multiples of 14"),
    ],
)
def test_fixed_sizes_that_are_refused(
    target: str, size: tuple[int, int], message: str, network: Network, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        export_backbone(network("registers"), target, tmp_path / "out", fixed_size=size)  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "out").exists()


def test_a_model_card_tells_what_it_is_and_how_to_load_it(network: Network, tmp_path: Path) -> None:
    backbone = network("vit")
    export_backbone(backbone, "timm", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "timm"
    assert yaml.safe_load(header)["pipeline_tag"] == "image-feature-extraction"
    assert 'timm.create_model("local-dir:.", pretrained=True)' in text
    assert "0.4, 0.45, 0.5; 0.2, 0.25, 0.3" in text


def test_networks_with_window_attention_are_supported_by_timm_and_transformers(tmp_path: Path) -> None:
    args = {"depths": (1, 1), "num_heads": (1, 2), "embed_dim": 16, "window_size": 4}
    backbone = build_backbone("swin_tiny_patch4_window7_224", args=args, image_size=32)
    assert export_backbone(backbone, "timm", tmp_path / "out").difference < 1e-5
    with pytest.raises(ValueError, match=r"uses window attention.*use --to timm or transformers"):
        export_backbone(backbone, "onnx", tmp_path / "graph")


def test_invalid_options_are_refused_before_any_work(network: Network, tmp_path: Path) -> None:
    backbone = network("vit")
    with pytest.raises(ValueError, match="one of timm, transformers, onnx, torch-export, got 'caffe'"):
        export_backbone(backbone, "caffe", tmp_path / "out")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="layers=2 is supported by onnx and torch-export only"):
        export_backbone(backbone, "timm", tmp_path / "out", layers=2)
    with pytest.raises(ValueError, match="layers must be 1 to 2, the blocks of vit_tiny"):
        export_backbone(backbone, "onnx", tmp_path / "out", layers=3)
    with pytest.raises(ValueError, match="opset must be 18 to 23, got 11"):
        export_backbone(backbone, "onnx", tmp_path / "out", opset=11)
    with pytest.raises(ValueError, match=r"follows its pooling.*use --to timm or onnx or torch-export"):
        export_backbone(network("mean"), "transformers", tmp_path / "out")
    with torch.no_grad():
        backbone.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"got NaN or infinity in norm.weight"):
        export_backbone(backbone, "timm", tmp_path / "out")
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
