"""Adaptation and distillation of backbones on unlabelled images (docs/adapting.md, docs/distilling.md)."""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.apps.adapt.closed_form import choose_closed_form as choose_closed_form
    from cribo.apps.adapt.closed_form import refit_whitening as refit_whitening
    from cribo.apps.adapt.config import AdaptConfig as AdaptConfig
    from cribo.apps.adapt.config import DistillConfig as DistillConfig
    from cribo.apps.adapt.distilling import Distilled as Distilled
    from cribo.apps.adapt.distilling import distill as distill
    from cribo.apps.adapt.run import Adapted as Adapted
    from cribo.apps.adapt.run import adapt as adapt
    from cribo.pretraining.agreement import neighbour_agreement as neighbour_agreement
else:
    __getattr__, __all__ = lazy_names(__name__)
