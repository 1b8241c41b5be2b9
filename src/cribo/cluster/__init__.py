"""Work on the parts of an image collection: in this process, in shares of it, or on a Ray cluster."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.cluster.config import EngineOptions, RayOptions
    from cribo.cluster.engines import Engine, LocalEngine, Work, open_engine
    from cribo.cluster.shares import Share, order_shares, require_mergeable

__getattr__, __all__ = lazy_names(__name__)
