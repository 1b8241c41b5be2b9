"""Export of a backbone to timm, transformers, ONNX and torch.export, verified after writing."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.export.options import TARGETS as TARGETS
    from cribo.export.options import Target as Target
    from cribo.export.run import DifferentFeatures as DifferentFeatures
    from cribo.export.run import ExportReport as ExportReport
    from cribo.export.run import export_backbone as export_backbone
else:
    __getattr__, __all__ = lazy_names(__name__)
