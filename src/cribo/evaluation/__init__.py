"""The field's evaluation protocols on labelled images, one folder each, and one format for their results."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.evaluation.cache import FeatureCache
    from cribo.evaluation.comparison import Comparison, compare
    from cribo.evaluation.data import LabelledDataConfig
    from cribo.evaluation.dense_neighbours.config import DenseNNConfig
    from cribo.evaluation.dense_neighbours.protocols import DenseNNSettings, protocol_settings
    from cribo.evaluation.dense_neighbours.retrieval import DenseRetrieval, RatioScore, dense_nn, draw_images
    from cribo.evaluation.dense_neighbours.run import evaluate_dense_nn
    from cribo.evaluation.image_neighbours.config import ImageDataConfig, ImageNNConfig
    from cribo.evaluation.image_neighbours.retrieval import ImageRetrieval, image_nn
    from cribo.evaluation.image_neighbours.run import evaluate_image_nn
    from cribo.evaluation.image_neighbours.settings import ImageNNSettings
    from cribo.evaluation.machine import Machine
    from cribo.evaluation.results import EvaluationResult, read_result
    from cribo.evaluation.runtime import EvaluationRuntime

__all__ = [
    "Comparison",
    "DenseNNConfig",
    "DenseNNSettings",
    "DenseRetrieval",
    "EvaluationResult",
    "EvaluationRuntime",
    "FeatureCache",
    "ImageDataConfig",
    "ImageNNConfig",
    "ImageNNSettings",
    "ImageRetrieval",
    "LabelledDataConfig",
    "Machine",
    "RatioScore",
    "compare",
    "dense_nn",
    "draw_images",
    "evaluate_dense_nn",
    "evaluate_image_nn",
    "image_nn",
    "protocol_settings",
    "read_result",
]

__getattr__ = lazy_names(
    __name__,
    {
        ".cache": ("FeatureCache",),
        ".comparison": ("Comparison", "compare"),
        ".data": ("LabelledDataConfig",),
        ".dense_neighbours.config": ("DenseNNConfig",),
        ".dense_neighbours.protocols": ("DenseNNSettings", "protocol_settings"),
        ".dense_neighbours.retrieval": ("DenseRetrieval", "RatioScore", "dense_nn", "draw_images"),
        ".dense_neighbours.run": ("evaluate_dense_nn",),
        ".image_neighbours.config": ("ImageDataConfig", "ImageNNConfig"),
        ".image_neighbours.retrieval": ("ImageRetrieval", "image_nn"),
        ".image_neighbours.run": ("evaluate_image_nn",),
        ".image_neighbours.settings": ("ImageNNSettings",),
        ".machine": ("Machine",),
        ".results": ("EvaluationResult", "read_result"),
        ".runtime": ("EvaluationRuntime",),
    },
)
