"""Images and labelled sets for training and evaluation."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.colours import colour_map
    from cribo.data.classification import ClassificationSplits, ClassifiedFiles, open_class_folders, open_classification
    from cribo.data.collection import ImageCollection, fingerprint, open_collection, read_named, rows_of
    from cribo.data.datasets import default_splits, open_segmentation
    from cribo.data.images import DataError, ImageFiles, ImageSource, MissingData, open_images
    from cribo.data.parquet import ParquetImages, open_parquet
    from cribo.data.photometric import Photometric, apply_photometric, sample_photometric
    from cribo.data.reading import UnreadableImage, read_image
    from cribo.data.segmentation import LabelledFiles, LabelledFolder, LabelledImages, LabelledSubset
    from cribo.data.sets import SEGMENTATION_SETS, SegmentationSet
    from cribo.data.shard_writing import WrittenShards, write_shards
    from cribo.data.shards import ShardedImages, open_shards
    from cribo.data.storage import ShardError

__getattr__, __all__ = lazy_names(__name__)
