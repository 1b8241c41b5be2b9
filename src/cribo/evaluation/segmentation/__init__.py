"""Segmentation with trained heads: a linear one on frozen features, Segmenter's on features that are finetuned."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.evaluation.data import TrainingDataConfig
    from cribo.evaluation.segmentation.config import DecoderConfig, LinearConfig, SegmenterConfig
    from cribo.evaluation.segmentation.finetuning import evaluate_segmenter
    from cribo.evaluation.segmentation.linear import LinearSegmentation
    from cribo.evaluation.segmentation.mask_transformer import MaskTransformer
    from cribo.evaluation.segmentation.run import evaluate_linear
    from cribo.evaluation.segmentation.segmenter import Segmenter, SegmenterFinetuning
    from cribo.evaluation.segmentation.trained import TrainedSegmenter, load_segmenter, save_segmenter

__all__ = [
    "DecoderConfig",
    "LinearConfig",
    "LinearSegmentation",
    "MaskTransformer",
    "Segmenter",
    "SegmenterConfig",
    "SegmenterFinetuning",
    "TrainedSegmenter",
    "TrainingDataConfig",
    "evaluate_linear",
    "evaluate_segmenter",
    "load_segmenter",
    "save_segmenter",
]

__getattr__ = lazy_names(
    __name__,
    {
        "cribo.evaluation.data": ("TrainingDataConfig",),
        ".config": ("DecoderConfig", "LinearConfig", "SegmenterConfig"),
        ".finetuning": ("evaluate_segmenter",),
        ".linear": ("LinearSegmentation",),
        ".mask_transformer": ("MaskTransformer",),
        ".run": ("evaluate_linear",),
        ".segmenter": ("Segmenter", "SegmenterFinetuning"),
        ".trained": ("TrainedSegmenter", "load_segmenter", "save_segmenter"),
    },
)
