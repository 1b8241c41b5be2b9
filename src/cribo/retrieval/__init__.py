"""Retrieval on dense features: images on the grid of patches, their encoders, nearest neighbours and colours."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cribo.retrieval.encoders import (
        PatchEncoder,
        backbone_encoder,
        mean_colour_encoder,
        open_backbone,
        open_encoder,
    )
    from cribo.retrieval.pca import PCAColours, pca_colours
    from cribo.retrieval.search import Neighbours, nearest
    from cribo.retrieval.source import BackboneSource, backbone_name

__all__ = [
    "BackboneSource",
    "Neighbours",
    "PCAColours",
    "PatchEncoder",
    "backbone_encoder",
    "backbone_name",
    "mean_colour_encoder",
    "nearest",
    "open_backbone",
    "open_encoder",
    "pca_colours",
]

_PLACES = {
    "encoders": ("PatchEncoder", "backbone_encoder", "mean_colour_encoder", "open_backbone", "open_encoder"),
    "pca": ("PCAColours", "pca_colours"),
    "search": ("Neighbours", "nearest"),
    "source": ("BackboneSource", "backbone_name"),
}


def __getattr__(name: str) -> Any:
    # Imported when first used: a configuration must not wait for torch.
    for module, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"cribo.retrieval.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
