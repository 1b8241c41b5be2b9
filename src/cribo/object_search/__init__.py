"""Similarity search over the objects of an image collection, stored in a database."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.object_search.config import IndexConfig
    from cribo.object_search.database import (
        DatabaseError,
        DatabaseInfo,
        FoundObject,
        IndexedImage,
        ObjectDatabase,
        ObjectWriter,
    )
    from cribo.object_search.extractor import ObjectExtractor
    from cribo.object_search.indexing import IndexQuality, IndexSummary, index_images, index_lock, index_vectors
    from cribo.object_search.merging import MergedDatabase, merge_databases
    from cribo.object_search.run import index_collection
    from cribo.retrieval.object_extraction import ImageObjects, extract_objects
    from cribo.retrieval.object_settings import ObjectSettings
    from cribo.retrieval.objects import GridMask, ImageObject

__getattr__, __all__ = lazy_names(__name__)
