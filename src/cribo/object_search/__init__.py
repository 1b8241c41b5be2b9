"""Similarity search over the objects of an image collection, stored in a database."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.object_search.config import IndexConfig as IndexConfig
    from cribo.object_search.database import DatabaseInfo as DatabaseInfo
    from cribo.object_search.database import FoundObject as FoundObject
    from cribo.object_search.database import IndexedImage as IndexedImage
    from cribo.object_search.database import ObjectDatabase as ObjectDatabase
    from cribo.object_search.database import ObjectWriter as ObjectWriter
    from cribo.object_search.extractor import ObjectExtractor as ObjectExtractor
    from cribo.object_search.indexing import IndexQuality as IndexQuality
    from cribo.object_search.indexing import IndexSummary as IndexSummary
    from cribo.object_search.indexing import index_images as index_images
    from cribo.object_search.indexing import index_lock as index_lock
    from cribo.object_search.indexing import index_vectors as index_vectors
    from cribo.object_search.merging import MergedDatabase as MergedDatabase
    from cribo.object_search.merging import merge_databases as merge_databases
    from cribo.object_search.run import index_collection as index_collection
    from cribo.retrieval.config import ObjectSettings as ObjectSettings
    from cribo.retrieval.object_extraction import ImageObjects as ImageObjects
    from cribo.retrieval.object_extraction import extract_objects as extract_objects
    from cribo.retrieval.objects import GridMask as GridMask
    from cribo.retrieval.objects import ImageObject as ImageObject
else:
    __getattr__, __all__ = lazy_names(__name__)
