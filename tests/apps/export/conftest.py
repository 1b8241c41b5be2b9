import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cribo.apps.export import ExportReport, Target, export_backbone
from cribo.models import Backbone, build_backbone

_NETWORKS = {
    "vit": ("vit_tiny_patch16_224", {"depth": 2, "embed_dim": 32, "num_heads": 2}, 48),
    "registers": ("vit_small_patch14_reg4_dinov2", {"depth": 2, "embed_dim": 32, "num_heads": 2}, 56),
    "dinov3": ("vit_small_patch16_dinov3_qkvb", {"depth": 2, "embed_dim": 32, "num_heads": 2}, 64),
    "gated": ("vit_giant_patch14_dinov2", {"depth": 2, "embed_dim": 24, "num_heads": 2}, 28),
    "resnet": ("resnet18d", {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16), "output_stride": 16}, 64),
    "mean": ("vit_base_patch16_224", {"depth": 1, "embed_dim": 32, "num_heads": 2, "global_pool": "avg"}, 48),
}


@pytest.fixture(scope="session")
def network() -> Callable[[str], Backbone]:
    """Builds a small backbone of a given type, all of whose parameters affect the features."""

    def make(kind: str) -> Backbone:
        name, args, size = _NETWORKS[kind]
        backbone = build_backbone(name, args=args, image_size=size)
        backbone.mean, backbone.std = (0.4, 0.45, 0.5), (0.2, 0.25, 0.3)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in backbone.model.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        return backbone.eval()

    return make


@pytest.fixture(scope="session")
def exported(
    network: Callable[[str], Backbone], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Backbone, ExportReport]]:
    """Returns the backbone of a type and its export to a target, which all tests share and none changes."""

    @functools.cache
    def export(kind: str, target: Target, **options: Any) -> tuple[Backbone, ExportReport]:
        backbone = network(kind)
        return backbone, export_backbone(backbone, target, tmp_path_factory.mktemp("export") / "out", **options)

    return export
