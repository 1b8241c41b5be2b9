"""Backbones (timm) with a common interface for dense features, and their weights on disk."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.models.adopting import LoadedWeights
    from cribo.models.backbone import Backbone, Features, evaluation_mode, normalise
    from cribo.models.card import model_card
    from cribo.models.hub import HubName, download, hub_name
    from cribo.models.licences import Licence
    from cribo.models.publishing import publishing_to
    from cribo.models.saving import describe, save_backbone
    from cribo.models.timm_layout import how_to_load, write_timm_layout
    from cribo.models.weights import build_backbone, load_backbone, load_pretrained

__getattr__, __all__ = lazy_names(__name__)
