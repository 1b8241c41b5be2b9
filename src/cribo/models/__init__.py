"""Backbones (timm) behind one dense interface, and their weights on disk."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.models.backbone import Backbone, Features, build_backbone, normalise
    from cribo.models.weights import LoadedWeights, describe, load_backbone, load_pretrained, save_backbone

__all__ = [
    "Backbone",
    "Features",
    "LoadedWeights",
    "build_backbone",
    "describe",
    "load_backbone",
    "load_pretrained",
    "normalise",
    "save_backbone",
]

__getattr__ = lazy_names(
    __name__,
    {
        ".backbone": ("Backbone", "Features", "build_backbone", "normalise"),
        ".weights": ("LoadedWeights", "describe", "load_backbone", "load_pretrained", "save_backbone"),
    },
)
