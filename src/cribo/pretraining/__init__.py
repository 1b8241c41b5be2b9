"""Pretraining: configuration, the training step under Lightning, and what a run leaves behind."""

from cribo.arguments import ConfigError
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.module import NonFiniteLoss, PretrainingModule
from cribo.pretraining.monitoring import TooManyUnreadable
from cribo.pretraining.presets import load_config
from cribo.pretraining.run import Run, pretrain, resume

__all__ = [
    "ConfigError",
    "NonFiniteLoss",
    "PretrainConfig",
    "PretrainingModule",
    "Run",
    "TooManyUnreadable",
    "load_config",
    "pretrain",
    "resume",
]
