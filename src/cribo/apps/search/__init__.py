"""Similarity search over the objects of an image collection, stored in a database."""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.apps.search.config import IndexConfig as IndexConfig
    from cribo.apps.search.database import DatabaseInfo as DatabaseInfo
    from cribo.apps.search.database import FoundObject as FoundObject
    from cribo.apps.search.database import IndexedImage as IndexedImage
    from cribo.apps.search.database import ObjectDatabase as ObjectDatabase
    from cribo.apps.search.database import ObjectWriter as ObjectWriter
    from cribo.apps.search.extractor import ObjectExtractor as ObjectExtractor
    from cribo.apps.search.indexing import IndexQuality as IndexQuality
    from cribo.apps.search.indexing import IndexSummary as IndexSummary
    from cribo.apps.search.indexing import index_images as index_images
    from cribo.apps.search.indexing import index_lock as index_lock
    from cribo.apps.search.indexing import index_vectors as index_vectors
    from cribo.apps.search.merging import MergedDatabase as MergedDatabase
    from cribo.apps.search.merging import merge_databases as merge_databases
    from cribo.apps.search.run import index_collection as index_collection
    from cribo.features.config import ObjectSettings as ObjectSettings
    from cribo.features.object_extraction import ImageObjects as ImageObjects
    from cribo.features.object_extraction import extract_objects as extract_objects
    from cribo.features.objects import GridMask as GridMask
    from cribo.features.objects import ImageObject as ImageObject
else:
    __getattr__, __all__ = lazy_names(__name__)
