"""Segmentation by example: a few labelled images make a memory that labels all others, without training."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cribo.segmentation.memory import Example, Segmentation, SegmentationMemory
    from cribo.segmentation.settings import SegmentationSettings

__all__ = ["Example", "Segmentation", "SegmentationMemory", "SegmentationSettings"]

_PLACES = {
    "memory": ("Example", "Segmentation", "SegmentationMemory"),
    "settings": ("SegmentationSettings",),
}


def __getattr__(name: str) -> Any:
    # Imported when first used: a configuration must not wait for torch.
    for module, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"cribo.segmentation.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
