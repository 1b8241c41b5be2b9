"""Backbones (timm) behind one dense interface, and their weights on disk."""

import importlib
from typing import TYPE_CHECKING, Any

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

_IN_BACKBONE = ("Backbone", "Features", "build_backbone", "normalise")


def __getattr__(name: str) -> Any:
    # Imported when first used: a configuration must not wait for timm.
    if name in __all__:
        place = "backbone" if name in _IN_BACKBONE else "weights"
        return getattr(importlib.import_module(f"cribo.models.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
