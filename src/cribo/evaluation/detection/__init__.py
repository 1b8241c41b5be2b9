"""Object detection with YOLOS (Fang et al. 2021): boxes from a vision transformer, as little changed as can be."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cribo.evaluation.detection.config import DetectionConfig, DetectionData
    from cribo.evaluation.detection.recipe import RECIPES, Recipe
    from cribo.evaluation.detection.run import evaluate_detection

__all__ = ["RECIPES", "DetectionConfig", "DetectionData", "Recipe", "evaluate_detection"]

_PLACES = {
    "config": ("DetectionConfig", "DetectionData"),
    "recipe": ("RECIPES", "Recipe"),
    "run": ("evaluate_detection",),
}


def __getattr__(name: str) -> Any:
    # Imported when first used: a configuration must not wait for torch.
    for module, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"cribo.evaluation.detection.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
