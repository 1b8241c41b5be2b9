"""A backbone for other programs: timm, transformers, ONNX, torch.export; each checked after writing."""

from cribo.export.run import TARGETS, DifferentFeatures, ExportReport, Target, export_backbone

__all__ = ["TARGETS", "DifferentFeatures", "ExportReport", "Target", "export_backbone"]
