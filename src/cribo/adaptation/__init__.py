"""Adaptation and distillation of backbones on unlabelled images (docs/adapting.md, docs/distilling.md)."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.adaptation.closed_form import choose_closed_form, refit_whitening
    from cribo.adaptation.config import AdaptConfig, DistillConfig
    from cribo.adaptation.distilling import Distilled, distill
    from cribo.adaptation.indicators import neighbour_agreement
    from cribo.adaptation.run import Adapted, adapt

__getattr__, __all__ = lazy_names(__name__)
