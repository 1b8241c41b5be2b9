"""Object detection with YOLOS (Fang et al. 2021): boxes from a vision transformer, as little changed as can be."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.evaluation.detection.config import DetectionConfig, DetectionData
    from cribo.evaluation.detection.recipe import RECIPES, Recipe
    from cribo.evaluation.detection.run import evaluate_detection

__all__ = ["RECIPES", "DetectionConfig", "DetectionData", "Recipe", "evaluate_detection"]

__getattr__ = lazy_names(
    __name__,
    {
        ".config": ("DetectionConfig", "DetectionData"),
        ".recipe": ("RECIPES", "Recipe"),
        ".run": ("evaluate_detection",),
    },
)
