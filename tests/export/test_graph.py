"""Graphs at sizes that are free: positions of every project, and padding as in TensorFlow."""

from pathlib import Path

import pytest
import torch

from cribo.export import export_backbone
from cribo.export.graph import load_onnx, load_torch
from cribo.export.options import ExportOptions
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


@pytest.mark.parametrize("target", LOAD)
@pytest.mark.parametrize("how", RESIZINGS)
def test_positions_are_resized_in_the_graph_as_the_backbone_does(how: str, target: str, tmp_path: Path) -> None:
    args = {"depth": 1, "embed_dim": 16, "num_heads": 2}
    backbone = build_backbone("vit_tiny_patch16_224", args=args, image_size=64).eval()
    with torch.no_grad():
        backbone.model.pos_embed.normal_(generator=torch.Generator().manual_seed(1))
    backbone.set_numerics(Numerics(positions=how))  # pyright: ignore[reportArgumentType]
    export_backbone(backbone, target, tmp_path / "out")  # pyright: ignore[reportArgumentType]
    # Positions of the network's own size are not resized, not even by those with an offset.
    assert_agrees_at([(1, 4, 4), (3, 3, 9), (2, 8, 8)], backbone, target, tmp_path / "out")


def test_padding_as_in_tensorflow_is_exported_at_free_sizes(tmp_path: Path) -> None:
    backbone = build_backbone("tf_mobilenetv3_small_minimal_100", image_size=64).eval()
    export_backbone(backbone, "torch-export", tmp_path / "out")
    assert_agrees_at([(3, 2, 5)], backbone, "torch-export", tmp_path / "out")
