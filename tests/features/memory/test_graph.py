"""The traceable module gives the labels and the sizes of the memory."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cribo.base.errors import DataError, InputError
from cribo.features.memory import Example, SegmentationMemory, SegmentationSettings
from cribo.features.memory.graph import MemoryGraph
from cribo.features.memory.pixels import radius, spacing
from cribo.models import Backbone, build_backbone

from .coded import PERFECT


def tiny(name: str = "vit_tiny_patch16_224", **args: Any) -> Backbone:
    args = args or {"patch_size": 8, "depth": 3, "embed_dim": 32, "num_heads": 2}
    return build_backbone(name, args=args, image_size=32, seed=0).eval().requires_grad_(False)


def smooth(height: int, width: int, seed: int) -> torch.Tensor:
    """Return an image (3, H, W) of coloured spots."""
    small = torch.rand(1, 3, 4, 5, generator=torch.Generator().manual_seed(seed))
    return (F.interpolate(small, size=(height, width), mode="bilinear")[0] * 255).to(torch.uint8)


def filled(backbone: Backbone, **settings: Any) -> SegmentationMemory:
    """Return a memory of two images whose class, 0, 2 or 3, is that of their red; class 1 is absent."""
    memory = SegmentationMemory(backbone, classes=list("abcd"), settings=SegmentationSettings(**settings), device="cpu")
    for seed in (1, 2):
        image = smooth(70, 90, seed)
        memory.extend([Example(image, torch.tensor([0, 2, 3])[(image[0] // 86).long()])])
    return memory


SETTINGS = [
    {"head": "ridge", "whiten": False, "size": 48},
    {"head": "knn", "whiten": True, "scale": 0.7, "neighbours": 9, "refine": "none"},
    {"head": "both", "whiten": True, "size": 40, "min_confidence": 0.6, "reach": 2.0, "prior": 0.0},
    {"head": "both", "blocks": (2, 3), "size": 64, "contrast": 0.3, "penalty": 0.1},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("size", [(70, 90), (33, 120)])
def test_labels_and_confidence_are_those_of_the_memory(settings: dict[str, Any], size: tuple[int, int]) -> None:
    memory = filled(tiny(), **settings)
    image = smooth(*size, seed=3)
    labels, confidence = MemoryGraph(memory)(image.permute(1, 2, 0))
    found = memory.segment(image)
    torch.testing.assert_close(confidence, found.confidence, atol=1e-5, rtol=0)
    assert (labels == found.labels).float().mean() > 0.999
    assert len(labels.unique()) > 1
    assert (255 in labels) == ("min_confidence" in settings)


def test_a_network_of_one_size_encodes_every_image_at_it() -> None:
    args = {"depths": (1, 1), "num_heads": (1, 2), "embed_dim": 16, "window_size": 4}
    memory = filled(tiny("swin_tiny_patch4_window7_224", **args))
    image = smooth(50, 90, seed=3)
    assert torch.equal(MemoryGraph(memory)(image.permute(1, 2, 0))[0], memory.segment(image).labels)


@pytest.mark.parametrize("settings", [{}, {"size": 100}, {"scale": 0.37}, {"scale": 3.0, "reach": 0.3}, {"reach": 3.0}])
def test_sizes_are_those_of_the_memory(settings: dict[str, Any]) -> None:
    """Sizes computed from tensors equal those computed from numbers."""
    memory = filled(tiny(), head="ridge", **settings)
    graph = MemoryGraph(memory)
    generator = torch.Generator().manual_seed(0)
    for height, width in torch.randint(2, 3000, (500, 2), generator=generator).tolist():
        encoded = memory.encoder.size(height, width, scale=memory.settings.factor(height, width))
        grid = encoded[0] // 8, encoded[1] // 8
        working = min(height, encoded[0]), min(width, encoded[1])
        distance = spacing(radius(memory.settings.reach, *grid, working))
        assert graph.sizes(height, width) == (grid, working, distance)


def test_more_classes_than_are_compared_at_once() -> None:
    memory = SegmentationMemory(tiny(), settings=SegmentationSettings(size=64, head="ridge"), device="cpu")
    stripes = torch.arange(40).repeat_interleave(2).expand(60, 80)
    memory.extend([Example(smooth(60, 80, seed), stripes) for seed in (1, 2)])
    image = smooth(60, 80, seed=3)
    labels, _ = MemoryGraph(memory)(image.permute(1, 2, 0))
    assert (labels == memory.segment(image).labels).float().mean() > 0.999
    assert labels.max() > 16


def test_what_cannot_become_a_graph_is_refused() -> None:
    with pytest.raises(InputError, match="--window"):
        MemoryGraph(filled(tiny(), window=32))
    with pytest.raises(InputError, match="give a backbone"):
        MemoryGraph(SegmentationMemory(PERFECT, device="cpu"))
    with pytest.raises(DataError, match="empty"):
        MemoryGraph(SegmentationMemory(tiny(), device="cpu"))
