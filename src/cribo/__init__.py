"""Dense visual representations from unlabelled images by cross-image object-level bootstrapping (CrIBo)."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

__version__ = version("cribo-ssl")

if TYPE_CHECKING:
    from cribo.adaptation import AdaptConfig as AdaptConfig
    from cribo.adaptation import DistillConfig as DistillConfig
    from cribo.adaptation import adapt as adapt
    from cribo.adaptation import distill as distill
    from cribo.evaluation import evaluate as evaluate
    from cribo.models import load_backbone as load_backbone
    from cribo.pretraining import load_config as load_config
    from cribo.pretraining import pretrain as pretrain
    from cribo.pretraining import resume as resume
    from cribo.segmentation import SegmentationMemory as SegmentationMemory
    from cribo.studies import run_study as run_study
else:
    __getattr__, __all__ = lazy_names(__name__)
    __all__ += ["__version__"]
