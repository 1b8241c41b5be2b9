"""Adaptation of a pretrained backbone to unlabelled images: closed form, training, and a verdict (docs/adapting.md)."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.adaptation.closed_form import choose_closed_form, refit_whitening
    from cribo.adaptation.config import AdaptConfig
    from cribo.adaptation.indicators import neighbour_agreement
    from cribo.adaptation.run import Adapted, adapt

__getattr__, __all__ = lazy_names(__name__)
