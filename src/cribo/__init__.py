"""Dense visual representations from unlabelled images by cross-image object-level bootstrapping (CrIBo)."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cribo.models import load_backbone
    from cribo.pretraining import load_config, pretrain, resume
    from cribo.segmentation import SegmentationMemory

__version__ = version("cribo-ssl")
__all__ = ["SegmentationMemory", "__version__", "load_backbone", "load_config", "pretrain", "resume"]


def __getattr__(name: str) -> Any:
    # Imported when first used: `import cribo.method` must not wait for Lightning.
    if name == "load_backbone":
        from cribo.models import load_backbone

        return load_backbone
    if name in ("load_config", "pretrain", "resume"):
        from cribo import pretraining

        return getattr(pretraining, name)
    if name == "SegmentationMemory":
        from cribo.segmentation import SegmentationMemory

        return SegmentationMemory
    raise AttributeError(f"module 'cribo' has no attribute {name!r}")
