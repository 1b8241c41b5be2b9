"""Export of the features of an image collection to files."""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.apps.embed.config import EmbedConfig as EmbedConfig
    from cribo.apps.embed.embedder import Embedder as Embedder
    from cribo.apps.embed.merging import merge_embeddings as merge_embeddings
    from cribo.apps.embed.run import Embedded as Embedded
    from cribo.apps.embed.run import embed_images as embed_images
else:
    __getattr__, __all__ = lazy_names(__name__)
