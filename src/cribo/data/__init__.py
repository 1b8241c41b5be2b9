"""Images and labelled sets for training and evaluation."""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.base.colours import colour_map as colour_map
    from cribo.data.config import Reading as Reading
    from cribo.data.labelled.classification import ClassificationSplits as ClassificationSplits
    from cribo.data.labelled.classification import ClassifiedFiles as ClassifiedFiles
    from cribo.data.labelled.classification import open_class_folders as open_class_folders
    from cribo.data.labelled.classification import open_classification as open_classification
    from cribo.data.labelled.datasets import default_splits as default_splits
    from cribo.data.labelled.datasets import open_segmentation as open_segmentation
    from cribo.data.labelled.segmentation import LabelledFiles as LabelledFiles
    from cribo.data.labelled.segmentation import LabelledFolder as LabelledFolder
    from cribo.data.labelled.segmentation import LabelledImages as LabelledImages
    from cribo.data.labelled.segmentation import LabelledSubset as LabelledSubset
    from cribo.data.labelled.sets import SEGMENTATION_SETS as SEGMENTATION_SETS
    from cribo.data.labelled.sets import SegmentationSet as SegmentationSet
    from cribo.data.photometric import Photometric as Photometric
    from cribo.data.photometric import apply_photometric as apply_photometric
    from cribo.data.photometric import sample_photometric as sample_photometric
    from cribo.data.reading import read_image as read_image
    from cribo.data.sources.collection import ImageCollection as ImageCollection
    from cribo.data.sources.collection import fingerprint as fingerprint
    from cribo.data.sources.collection import open_collection as open_collection
    from cribo.data.sources.collection import read_named as read_named
    from cribo.data.sources.collection import rows_of as rows_of
    from cribo.data.sources.images import ImageFiles as ImageFiles
    from cribo.data.sources.images import ImageSource as ImageSource
    from cribo.data.sources.images import open_images as open_images
    from cribo.data.sources.parquet import ParquetImages as ParquetImages
    from cribo.data.sources.parquet import open_parquet as open_parquet
    from cribo.data.sources.shard_writing import WrittenShards as WrittenShards
    from cribo.data.sources.shard_writing import write_shards as write_shards
    from cribo.data.sources.shards import ShardedImages as ShardedImages
    from cribo.data.sources.shards import open_shards as open_shards
else:
    __getattr__, __all__ = lazy_names(__name__)
