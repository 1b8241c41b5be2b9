"""A backbone for other programs: timm, transformers, ONNX, torch.export; each checked after writing."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cribo.export.options import TARGETS, Target
    from cribo.export.run import DifferentFeatures, ExportReport, export_backbone

__all__ = ["TARGETS", "DifferentFeatures", "ExportReport", "Target", "export_backbone"]

_PLACES = {
    "options": ("TARGETS", "Target"),
    "run": ("DifferentFeatures", "ExportReport", "export_backbone"),
}


def __getattr__(name: str) -> Any:
    # Imported when first used: a configuration must not wait for torch.
    for module, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"cribo.export.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
