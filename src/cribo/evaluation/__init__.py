"""The field's evaluation protocols on labelled images, one folder each, and one format for their results."""

from cribo.evaluation.cache import FeatureCache
from cribo.evaluation.compare import Comparison, compare
from cribo.evaluation.data import LabelledDataConfig
from cribo.evaluation.dense_nn.config import DenseNNConfig
from cribo.evaluation.dense_nn.protocols import DenseNNSettings, protocol_settings
from cribo.evaluation.dense_nn.retrieval import DenseRetrieval, RatioScore, dense_nn, draw_images
from cribo.evaluation.dense_nn.run import evaluate_dense_nn
from cribo.evaluation.image_nn.config import ImageDataConfig, ImageNNConfig
from cribo.evaluation.image_nn.retrieval import ImageNNSettings, ImageRetrieval, image_nn
from cribo.evaluation.image_nn.run import evaluate_image_nn
from cribo.evaluation.machine import EvaluationRuntime, Machine
from cribo.evaluation.results import EvaluationResult, read_result

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
