"""Segmentation of images given a few labelled examples, without training the backbone."""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.apps.segment.labeller import Labeller as Labeller
    from cribo.apps.segment.memory import Segmentation as Segmentation
    from cribo.apps.segment.memory import SegmentationMemory as SegmentationMemory
    from cribo.apps.segment.merging import merge_segmentations as merge_segmentations
    from cribo.apps.segment.settings import SegmentationSettings as SegmentationSettings
    from cribo.data.labelled.inputs import Example as Example
    from cribo.features.probes.encoding import probe_encoder as probe_encoder
else:
    __getattr__, __all__ = lazy_names(__name__)
