"""Backbones (timm) with a common interface for dense features, and their weights on disk."""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.models.backbone import Backbone as Backbone
    from cribo.models.backbone import Features as Features
    from cribo.models.backbone import evaluation_mode as evaluation_mode
    from cribo.models.backbone import normalise as normalise
    from cribo.models.channels import inflate as inflate
    from cribo.models.hub.download import HubName as HubName
    from cribo.models.hub.download import hub_name as hub_name
    from cribo.models.licences import Licence as Licence
    from cribo.models.loading import build_backbone as build_backbone
    from cribo.models.loading import load_backbone as load_backbone
    from cribo.models.loading import load_pretrained as load_pretrained
    from cribo.models.origin import LoadedWeights as LoadedWeights
    from cribo.models.saving import describe as describe
    from cribo.models.saving import save_backbone as save_backbone
else:
    __getattr__, __all__ = lazy_names(__name__)
