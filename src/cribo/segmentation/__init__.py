"""Segmentation of images given a few labelled examples, without training the backbone."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.probes.encoding import probe_encoder as probe_encoder
    from cribo.segmentation.labeller import Labeller as Labeller
    from cribo.segmentation.memory import Example as Example
    from cribo.segmentation.memory import Segmentation as Segmentation
    from cribo.segmentation.memory import SegmentationMemory as SegmentationMemory
    from cribo.segmentation.merging import merge_segmentations as merge_segmentations
    from cribo.segmentation.settings import SegmentationSettings as SegmentationSettings
else:
    __getattr__, __all__ = lazy_names(__name__)
