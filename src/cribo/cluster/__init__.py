"""Work on the parts of an image collection: in this process, in shares of it, or on a Ray cluster."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.cluster.config import EngineOptions as EngineOptions
    from cribo.cluster.config import RayOptions as RayOptions
    from cribo.cluster.engines import LocalEngine as LocalEngine
    from cribo.cluster.engines import open_engine as open_engine
    from cribo.cluster.shares import Share as Share
    from cribo.cluster.shares import order_shares as order_shares
    from cribo.cluster.shares import require_mergeable as require_mergeable
    from cribo.cluster.work import Engine as Engine
    from cribo.cluster.work import Work as Work
else:
    __getattr__, __all__ = lazy_names(__name__)
