"""Segmentation of images given a few labelled examples, without training the backbone."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.probes.encoding import probe_encoder
    from cribo.segmentation.labeller import Labeller
    from cribo.segmentation.memory import Example, Segmentation, SegmentationMemory
    from cribo.segmentation.merging import merge_segmentations
    from cribo.segmentation.settings import SegmentationSettings

__getattr__, __all__ = lazy_names(__name__)
