"""The field's evaluation protocols on labelled images, one file each, and one format for their results."""

from cribo.evaluation.compare import Comparison, compare
from cribo.evaluation.config import DataConfig, DenseNNConfig, RuntimeConfig
from cribo.evaluation.dense_nn import DenseRetrieval, RatioScore, dense_nn, draw_images
from cribo.evaluation.features import FeatureCache
from cribo.evaluation.memory import Machine
from cribo.evaluation.protocols import DenseNNSettings, protocol_settings
from cribo.evaluation.results import EvaluationResult, read_result
from cribo.evaluation.run import evaluate_dense_nn

__all__ = [
    "Comparison",
    "DataConfig",
    "DenseNNConfig",
    "DenseNNSettings",
    "DenseRetrieval",
    "EvaluationResult",
    "FeatureCache",
    "Machine",
    "RatioScore",
    "RuntimeConfig",
    "compare",
    "dense_nn",
    "draw_images",
    "evaluate_dense_nn",
    "protocol_settings",
    "read_result",
]
