"""Backbones (timm) behind one dense interface, and their weights on disk."""

from cribo.models.backbone import Backbone, Features, build_backbone
from cribo.models.weights import LoadedWeights, describe, load_backbone, load_pretrained, save_backbone

__all__ = [
    "Backbone",
    "Features",
    "LoadedWeights",
    "build_backbone",
    "describe",
    "load_backbone",
    "load_pretrained",
    "save_backbone",
]
