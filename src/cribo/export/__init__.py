"""Export of a backbone to timm, transformers, ONNX and torch.export, verified after writing."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.export.options import TARGETS, Target
    from cribo.export.run import DifferentFeatures, ExportReport, export_backbone

__getattr__, __all__ = lazy_names(__name__)
