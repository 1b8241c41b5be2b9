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

__all__ = [
    "ConfigError",
    "NonFiniteLoss",
    "PretrainConfig",
    "PretrainingModule",
    "Profile",
    "Run",
    "TooManyUnreadable",
    "load_config",
    "pretrain",
    "profile",
    "resume",
]

__getattr__ = lazy_names(
    __name__,
    {
        "cribo.arguments": ("ConfigError",),
        ".config": ("PretrainConfig",),
        ".module": ("NonFiniteLoss", "PretrainingModule"),
        ".monitoring": ("TooManyUnreadable",),
        ".presets": ("load_config",),
        ".profiling": ("Profile", "profile"),
        ".run": ("Run", "pretrain", "resume"),
    },
)
