"""Find things across a collection of images: its objects in a database, and what is like one of them."""

from cribo.object_search.database import DatabaseError, DatabaseInfo, FoundObject, IndexedImage, ObjectDatabase
from cribo.object_search.extraction import (
    GridMask,
    ImageObject,
    ImageObjects,
    ObjectSettings,
    extract_objects,
)
from cribo.object_search.indexing import IndexSummary, index_images, index_lock, index_vectors

__all__ = [
    "DatabaseError",
    "DatabaseInfo",
    "FoundObject",
    "GridMask",
    "ImageObject",
    "ImageObjects",
    "IndexSummary",
    "IndexedImage",
    "ObjectDatabase",
    "ObjectSettings",
    "extract_objects",
    "index_images",
    "index_lock",
    "index_vectors",
]
