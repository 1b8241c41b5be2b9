"""Dense visual representations from unlabelled images by cross-image object-level bootstrapping (CrIBo)."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.adaptation import AdaptConfig, DistillConfig, adapt, distill
    from cribo.evaluation import evaluate
    from cribo.models import load_backbone
    from cribo.pretraining import load_config, pretrain, resume
    from cribo.segmentation import SegmentationMemory
    from cribo.studies import run_study

__version__ = version("cribo-ssl")
__getattr__, __all__ = lazy_names(__name__)
__all__ += ["__version__"]
