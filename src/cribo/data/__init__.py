"""Images and labelled sets for training and evaluation."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.colours import colour_map
    from cribo.data.classification import ClassificationSplits, ClassifiedFiles, open_class_folders, open_classification
    from cribo.data.datasets import default_splits, open_segmentation
    from cribo.data.images import DataError, ImageFiles, ImageSource, MissingData, open_images
    from cribo.data.photometric import Photometric, apply_photometric, sample_photometric
    from cribo.data.reading import UnreadableImage, read_image
    from cribo.data.segmentation import LabelledFiles, LabelledFolder, LabelledImages, LabelledSubset
    from cribo.data.sets import SEGMENTATION_SETS, SegmentationSet
    from cribo.data.shard_writing import WrittenShards, write_shards
    from cribo.data.shards import ShardedImages, open_collection, open_shards
    from cribo.data.storage import ShardError

__all__ = [
    "SEGMENTATION_SETS",
    "ClassificationSplits",
    "ClassifiedFiles",
    "DataError",
    "ImageFiles",
    "ImageSource",
    "LabelledFiles",
    "LabelledFolder",
    "LabelledImages",
    "LabelledSubset",
    "MissingData",
    "Photometric",
    "SegmentationSet",
    "ShardError",
    "ShardedImages",
    "UnreadableImage",
    "WrittenShards",
    "apply_photometric",
    "colour_map",
    "default_splits",
    "open_class_folders",
    "open_classification",
    "open_collection",
    "open_images",
    "open_segmentation",
    "open_shards",
    "read_image",
    "sample_photometric",
    "write_shards",
]

__getattr__ = lazy_names(
    __name__,
    {
        ".classification": ("ClassificationSplits", "ClassifiedFiles", "open_class_folders", "open_classification"),
        ".datasets": ("default_splits", "open_segmentation"),
        ".images": ("DataError", "ImageFiles", "ImageSource", "MissingData", "open_images"),
        ".photometric": ("Photometric", "apply_photometric", "sample_photometric"),
        ".reading": ("UnreadableImage", "read_image"),
        ".segmentation": ("LabelledFiles", "LabelledFolder", "LabelledImages", "LabelledSubset"),
        "cribo.colours": ("colour_map",),
        ".sets": ("SEGMENTATION_SETS", "SegmentationSet"),
        ".shard_writing": ("WrittenShards", "write_shards"),
        ".shards": ("ShardedImages", "open_collection", "open_shards"),
        ".storage": ("ShardError",),
    },
)
