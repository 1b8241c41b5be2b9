"""Segmentation with trained heads: a linear one on frozen features, Segmenter's on features that are finetuned."""

import importlib
from typing import TYPE_CHECKING, Any

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

_PLACES = {
    "cribo.evaluation.data": ("TrainingDataConfig",),
    "cribo.evaluation.segmentation.config": ("DecoderConfig", "LinearConfig", "SegmenterConfig"),
    "cribo.evaluation.segmentation.finetuning": ("evaluate_segmenter",),
    "cribo.evaluation.segmentation.linear": ("LinearSegmentation",),
    "cribo.evaluation.segmentation.mask_transformer": ("MaskTransformer",),
    "cribo.evaluation.segmentation.run": ("evaluate_linear",),
    "cribo.evaluation.segmentation.segmenter": ("Segmenter", "SegmenterFinetuning"),
    "cribo.evaluation.segmentation.trained": ("TrainedSegmenter", "load_segmenter", "save_segmenter"),
}


def __getattr__(name: str) -> Any:
    # Imported when first used: a configuration must not wait for torch.
    for module, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
