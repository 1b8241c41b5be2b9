"""Pretraining: configuration, training step for Lightning, and run folders."""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.pretraining.config import PretrainConfig as PretrainConfig
    from cribo.pretraining.loading import load_config as load_config
    from cribo.pretraining.module import PretrainingModule as PretrainingModule
    from cribo.pretraining.profiling import Profile as Profile
    from cribo.pretraining.profiling import profile as profile
    from cribo.pretraining.run import Run as Run
    from cribo.pretraining.run import pretrain as pretrain
    from cribo.pretraining.run import resume as resume
else:
    __getattr__, __all__ = lazy_names(__name__)
