"""Retrieval on dense features: images on the grid of patches, who encodes them, and their nearest neighbours."""

from cribo.retrieval.encoders import (
    BackboneConfig,
    PatchEncoder,
    backbone_encoder,
    backbone_name,
    mean_colour_encoder,
    open_backbone,
    open_encoder,
)
from cribo.retrieval.search import Neighbours, nearest

__all__ = [
    "BackboneConfig",
    "Neighbours",
    "PatchEncoder",
    "backbone_encoder",
    "backbone_name",
    "mean_colour_encoder",
    "nearest",
    "open_backbone",
    "open_encoder",
]
