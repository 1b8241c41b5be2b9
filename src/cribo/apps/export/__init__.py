"""Export of a backbone or a memory to other libraries and the hub, verified after writing."""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.apps.export.config import TARGETS as TARGETS
    from cribo.apps.export.config import Target as Target
    from cribo.apps.export.memory import MemoryReport as MemoryReport
    from cribo.apps.export.memory import export_memory as export_memory
    from cribo.apps.export.publishing import Published as Published
    from cribo.apps.export.publishing import publish_backbone as publish_backbone
    from cribo.apps.export.run import ExportReport as ExportReport
    from cribo.apps.export.run import export_backbone as export_backbone
else:
    __getattr__, __all__ = lazy_names(__name__)
