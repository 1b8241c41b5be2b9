"""From images to features, and what is done with them: encoders, search, whitening, votes, objects and probes."""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.features.cache import Machine as Machine
    from cribo.features.config import BackboneSource as BackboneSource
    from cribo.features.config import backbone_name as backbone_name
    from cribo.features.encoder import Encoder as Encoder
    from cribo.features.encoder import mean_colour_encoder as mean_colour_encoder
    from cribo.features.encoder import open_backbone as open_backbone
    from cribo.features.pca import PCAColours as PCAColours
    from cribo.features.pca import pca_colours as pca_colours
    from cribo.features.scores import iou as iou
    from cribo.features.search import Neighbours as Neighbours
    from cribo.features.search import nearest as nearest
    from cribo.features.whitening import Moments as Moments
    from cribo.features.whitening import partial_whitening as partial_whitening
else:
    __getattr__, __all__ = lazy_names(__name__)
