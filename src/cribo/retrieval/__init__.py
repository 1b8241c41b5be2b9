"""Retrieval on dense features: patch grids, encoders, whitening, nearest neighbours and colours."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.retrieval.config import BackboneSource as BackboneSource
    from cribo.retrieval.config import backbone_name as backbone_name
    from cribo.retrieval.encoders import PatchEncoder as PatchEncoder
    from cribo.retrieval.encoders import backbone_encoder as backbone_encoder
    from cribo.retrieval.encoders import mean_colour_encoder as mean_colour_encoder
    from cribo.retrieval.encoders import open_backbone as open_backbone
    from cribo.retrieval.encoders import open_encoder as open_encoder
    from cribo.retrieval.pca import PCAColours as PCAColours
    from cribo.retrieval.pca import pca_colours as pca_colours
    from cribo.retrieval.search import Neighbours as Neighbours
    from cribo.retrieval.search import nearest as nearest
    from cribo.retrieval.whitening import Moments as Moments
    from cribo.retrieval.whitening import partial_whitening as partial_whitening
else:
    __getattr__, __all__ = lazy_names(__name__)
