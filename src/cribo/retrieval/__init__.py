"""Retrieval on dense features: patch grids, encoders, whitening, nearest neighbours and colours."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

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
    from cribo.retrieval.whitening import Moments, partial_whitening

__all__ = [
    "BackboneSource",
    "Moments",
    "Neighbours",
    "PCAColours",
    "PatchEncoder",
    "backbone_encoder",
    "backbone_name",
    "mean_colour_encoder",
    "nearest",
    "open_backbone",
    "open_encoder",
    "partial_whitening",
    "pca_colours",
]

__getattr__ = lazy_names(
    __name__,
    {
        ".encoders": ("PatchEncoder", "backbone_encoder", "mean_colour_encoder", "open_backbone", "open_encoder"),
        ".pca": ("PCAColours", "pca_colours"),
        ".search": ("Neighbours", "nearest"),
        ".source": ("BackboneSource", "backbone_name"),
        ".whitening": ("Moments", "partial_whitening"),
    },
)
