"""Graphs at sizes that are free: positions of every project, and padding as in TensorFlow."""

import copy
from pathlib import Path

import pytest
import torch

from cribo.apps.export import export_backbone
from cribo.apps.export.config import ExportOptions, Target
from cribo.apps.export.graph import load_onnx, load_torch
from cribo.apps.export.run import TOLERANCES, compare_features
from cribo.base.errors import DifferentFeatures, InputError
from cribo.models import Backbone, build_backbone, normalise
from cribo.models.numerics import Numerics
from cribo.models.positions import RESIZINGS

LOAD = {"onnx": load_onnx, "torch-export": load_torch}


def assert_agrees_at(sizes: list[tuple[int, int, int]], backbone: Backbone, target: str, folder: Path) -> None:
    """Require equal features on batches of (batch, rows, columns), of sizes that the export did not check."""
    encode = LOAD[target](folder, ExportOptions())
    for batch, rows, columns in sizes:
        shape = (batch, 3, rows * backbone.patch_size, columns * backbone.patch_size)
        images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            wanted = backbone.encode(normalise(images))
        for found, own in zip(encode(images), (wanted.tokens, wanted.global_token), strict=True):
            torch.testing.assert_close(found, own, atol=1e-4 * float(own.abs().max()), rtol=0)


def resizing(how: str) -> Backbone:
    """Return a backbone that resizes its position embedding in a given way."""
    args = {"depth": 1, "embed_dim": 16, "num_heads": 2}
    backbone = build_backbone("vit_tiny_patch16_224", args=args, image_size=64).eval()
    with torch.no_grad():
        backbone.model.pos_embed.normal_(generator=torch.Generator().manual_seed(1))
    backbone.set_numerics(Numerics(positions=how))  # pyright: ignore[reportArgumentType]
    return backbone


# The file of ONNX is made from the graph of torch.export.
@pytest.mark.parametrize(("how", "target"), [*((how, "onnx") for how in RESIZINGS), ("timm", "torch-export")])
def test_positions_are_resized_in_the_graph_as_the_backbone_does(how: str, target: Target, tmp_path: Path) -> None:
    backbone = resizing(how)
    export_backbone(backbone, target, tmp_path / "out")
    # Positions of the network's own size are not resized, not even by those with an offset.
    assert_agrees_at([(1, 4, 4), (3, 3, 9), (2, 8, 8)], backbone, target, tmp_path / "out")


def test_padding_as_in_tensorflow_is_exported_at_free_sizes(tmp_path: Path) -> None:
    backbone = build_backbone("tf_mobilenetv3_small_minimal_100", image_size=64).eval()
    export_backbone(backbone, "torch-export", tmp_path / "out")
    assert_agrees_at([(3, 2, 5)], backbone, "torch-export", tmp_path / "out")


@pytest.mark.parametrize("target", ["timm", "transformers"])
def test_positions_that_a_library_cannot_resize_are_refused_with_a_way_out(target: Target, tmp_path: Path) -> None:
    backbone = resizing("bicubic_offset")
    way_out = r"bicubic_offset.*--to onnx or torch-export.*--backbone.positions timm"
    with pytest.raises(InputError, match=way_out) as error:
        export_backbone(backbone, target, tmp_path / "out")
    others = {"timm", "transformers"} - {target}
    assert not any(f"--to {name}" in str(error.value) or f"or {name}" in str(error.value) for name in others)
    assert "%" in str(error.value)
    assert not list(tmp_path.iterdir())
    backbone.set_numerics(Numerics(positions="timm"))
    assert export_backbone(backbone, target, tmp_path / "out").difference < 1e-5


def test_positions_without_antialiasing_become_dinov2_of_transformers(tmp_path: Path) -> None:
    report = export_backbone(resizing("bicubic"), "transformers", tmp_path / "out")
    assert report.difference < 1e-5
    assert any("Dinov2Model" in note for note in report.notes)


def test_networks_with_window_attention_are_exported_to_timm_and_at_a_fixed_size(tmp_path: Path) -> None:
    args = {"depths": (1, 1), "num_heads": (1, 2), "embed_dim": 16, "window_size": 4}
    backbone = build_backbone("swin_tiny_patch4_window7_224", args=args, image_size=32).eval()
    assert export_backbone(backbone, "timm", tmp_path / "timm").difference < 1e-5
    with pytest.raises(InputError, match=r"--fixed_size 32.*use --to timm or transformers"):
        export_backbone(backbone, "onnx", tmp_path / "out")
    steps: list[str] = []
    report = export_backbone(
        backbone,
        "torch-export",
        tmp_path / "out",
        fixed_size=(32, 32),
        progress=lambda what, done, total: steps.append(what),
    )
    assert report.difference < 1e-5
    assert list(dict.fromkeys(steps)) == ["tracing", "writing", "comparing"]


def test_the_rounding_of_the_backbone_itself_is_tolerated() -> None:
    args = {"depth": 1, "embed_dim": 16, "num_heads": 2}
    backbone = build_backbone("vit_tiny_patch16_224", args=args, image_size=32).eval().requires_grad_(False)
    silent, options = lambda what, done, total: None, ExportOptions()

    def encode(images: torch.Tensor, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        exact = copy.deepcopy(backbone).double().encode(normalise(images.double()))
        return exact.tokens.float() * factor, exact.global_token.float() * factor

    difference = 0.0
    while difference <= TOLERANCES["float32"]:  # processors round differently
        backbone.model.patch_embed.proj.bias += 300  # removed by the layer norm, with most digits
        difference, _ = compare_features(backbone, lambda: encode, options, silent)
    assert difference < 1e-3
    with pytest.raises(DifferentFeatures):
        compare_features(backbone, lambda: lambda images: encode(images, 1.01), options, silent)
