"""Pretraining: configuration, training step for Lightning, and run folders."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.arguments import ConfigError
    from cribo.pretraining.config import PretrainConfig
    from cribo.pretraining.module import NonFiniteLoss, PretrainingModule
    from cribo.pretraining.monitoring import TooManyUnreadable
    from cribo.pretraining.presets import load_config
    from cribo.pretraining.profiling import Profile, profile
    from cribo.pretraining.run import Run, pretrain, resume

__getattr__, __all__ = lazy_names(__name__)
