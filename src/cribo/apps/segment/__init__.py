"""Segmentation of image collections given a few labelled examples, without training the backbone."""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.apps.segment.instances import split_instances as split_instances
    from cribo.apps.segment.labeller import Labeller as Labeller
    from cribo.apps.segment.merging import merge_segmentations as merge_segmentations
else:
    __getattr__, __all__ = lazy_names(__name__)
