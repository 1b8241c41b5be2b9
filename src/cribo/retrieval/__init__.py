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

__getattr__, __all__ = lazy_names(__name__)
