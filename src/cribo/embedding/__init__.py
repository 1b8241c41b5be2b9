"""Export of the features of an image collection to files."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.embedding.config import EmbedConfig as EmbedConfig
    from cribo.embedding.embedder import Embedder as Embedder
    from cribo.embedding.merging import merge_embeddings as merge_embeddings
    from cribo.embedding.run import Embedded as Embedded
    from cribo.embedding.run import embed_images as embed_images
else:
    __getattr__, __all__ = lazy_names(__name__)
