"""Segmentation by example: a few labelled images make a memory that labels all others, without training."""

from cribo.segmentation.memory import Example, Segmentation, SegmentationMemory
from cribo.segmentation.settings import SegmentationSettings

__all__ = ["Example", "Segmentation", "SegmentationMemory", "SegmentationSettings"]
