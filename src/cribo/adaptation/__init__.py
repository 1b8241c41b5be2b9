"""Adaptation and distillation of backbones on unlabelled images (docs/adapting.md, docs/distilling.md)."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.adaptation.closed_form import choose_closed_form as choose_closed_form
    from cribo.adaptation.closed_form import refit_whitening as refit_whitening
    from cribo.adaptation.config import AdaptConfig as AdaptConfig
    from cribo.adaptation.config import DistillConfig as DistillConfig
    from cribo.adaptation.distilling import Distilled as Distilled
    from cribo.adaptation.distilling import distill as distill
    from cribo.adaptation.run import Adapted as Adapted
    from cribo.adaptation.run import adapt as adapt
    from cribo.pretraining.agreement import neighbour_agreement as neighbour_agreement
else:
    __getattr__, __all__ = lazy_names(__name__)
