"""Retrieval on dense features: images on the grid of patches, their encoders, nearest neighbours and colours."""

from cribo.retrieval.encoders import (
    BackboneSource,
    PatchEncoder,
    backbone_encoder,
    backbone_name,
    mean_colour_encoder,
    open_backbone,
    open_encoder,
)
from cribo.retrieval.pca import PCAColours, pca_colours
from cribo.retrieval.search import Neighbours, nearest

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
