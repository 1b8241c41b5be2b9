"""The memory of labelled images, which labels the pixels of others without training."""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.data.labelled.inputs import Example as Example
    from cribo.data.labelled.label_maps import LabelledBox as LabelledBox
    from cribo.features.memory.memory import Segmentation as Segmentation
    from cribo.features.memory.memory import SegmentationMemory as SegmentationMemory
    from cribo.features.memory.settings import SegmentationSettings as SegmentationSettings
    from cribo.features.probes.encoding import probe_encoder as probe_encoder
else:
    __getattr__, __all__ = lazy_names(__name__)
