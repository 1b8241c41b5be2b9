"""Adaptation of a pretrained backbone to a collection of images without labels."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.adaptation.whitening import Moments, partial_whitening

__all__ = ["Moments", "partial_whitening"]

__getattr__ = lazy_names(__name__, {".whitening": ("Moments", "partial_whitening")})
