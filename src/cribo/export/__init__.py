"""Export of a backbone to timm, transformers, ONNX, torch.export and the hub, verified after writing."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.export.options import TARGETS, Target
    from cribo.export.publishing import Published, publish_backbone
    from cribo.export.run import DifferentFeatures, ExportReport, export_backbone

__getattr__, __all__ = lazy_names(__name__)
