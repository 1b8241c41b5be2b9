"""Export of the features of an image collection to files."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.embedding.config import EmbedConfig
    from cribo.embedding.embedder import Embedder
    from cribo.embedding.merging import merge_embeddings
    from cribo.embedding.run import Embedded, embed_images

__getattr__, __all__ = lazy_names(__name__)
