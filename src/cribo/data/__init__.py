"""What can be trained on and evaluated on."""

from cribo.data.datasets import SEGMENTATION_SETS, SegmentationSet, default_splits, open_segmentation
from cribo.data.images import DataError, ImageFiles, ImageSource, MissingData, open_images
from cribo.data.reading import UnreadableImage, read_image
from cribo.data.segmentation import LabelledFiles, LabelledFolder, LabelledImages, LabelledSubset, colour_map

__all__ = [
    "SEGMENTATION_SETS",
    "DataError",
    "ImageFiles",
    "ImageSource",
    "LabelledFiles",
    "LabelledFolder",
    "LabelledImages",
    "LabelledSubset",
    "MissingData",
    "SegmentationSet",
    "UnreadableImage",
    "colour_map",
    "default_splits",
    "open_images",
    "open_segmentation",
    "read_image",
]
