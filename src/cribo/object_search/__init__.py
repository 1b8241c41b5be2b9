"""Find things across a collection of images: its objects in a database, and what is like one of them."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cribo.object_search.database import DatabaseError, DatabaseInfo, FoundObject, IndexedImage, ObjectDatabase
    from cribo.object_search.extraction import GridMask, ImageObject, ImageObjects, extract_objects
    from cribo.object_search.indexing import IndexSummary, index_images, index_lock, index_vectors
    from cribo.object_search.settings import ObjectSettings

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

_PLACES = {
    "database": ("DatabaseError", "DatabaseInfo", "FoundObject", "IndexedImage", "ObjectDatabase"),
    "extraction": ("GridMask", "ImageObject", "ImageObjects", "extract_objects"),
    "indexing": ("IndexSummary", "index_images", "index_lock", "index_vectors"),
    "settings": ("ObjectSettings",),
}


def __getattr__(name: str) -> Any:
    # Imported when first used: a configuration must not wait for torch.
    for module, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"cribo.object_search.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
