"""Work on the parts of an image collection: in this process, in shares of it, or on a Ray cluster."""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.base.shares import Share as Share
    from cribo.base.shares import order_shares as order_shares
    from cribo.base.shares import require_mergeable as require_mergeable
    from cribo.features.spread.config import EngineOptions as EngineOptions
    from cribo.features.spread.config import RayOptions as RayOptions
    from cribo.features.spread.engines import LocalEngine as LocalEngine
    from cribo.features.spread.engines import open_engine as open_engine
    from cribo.features.spread.work import Engine as Engine
    from cribo.features.spread.work import Work as Work
else:
    __getattr__, __all__ = lazy_names(__name__)
