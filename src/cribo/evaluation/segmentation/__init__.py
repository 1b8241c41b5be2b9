"""Segmentation with trained heads: a linear one on frozen features."""

from cribo.evaluation.data import TrainingDataConfig
from cribo.evaluation.segmentation.config import LinearConfig
from cribo.evaluation.segmentation.linear import LinearSegmentation
from cribo.evaluation.segmentation.run import evaluate_linear

__all__ = ["LinearConfig", "LinearSegmentation", "TrainingDataConfig", "evaluate_linear"]
