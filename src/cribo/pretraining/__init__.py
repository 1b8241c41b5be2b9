"""Pretraining: configuration, the training step under Lightning, and what a run leaves behind."""

import importlib
from typing import TYPE_CHECKING, Any

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

_PLACES = {
    "ConfigError": "cribo.arguments",
    "NonFiniteLoss": "cribo.pretraining.module",
    "PretrainConfig": "cribo.pretraining.config",
    "PretrainingModule": "cribo.pretraining.module",
    "Profile": "cribo.pretraining.profiling",
    "Run": "cribo.pretraining.run",
    "TooManyUnreadable": "cribo.pretraining.monitoring",
    "load_config": "cribo.pretraining.presets",
    "pretrain": "cribo.pretraining.run",
    "profile": "cribo.pretraining.profiling",
    "resume": "cribo.pretraining.run",
}


def __getattr__(name: str) -> Any:
    # Imported when first used: help and refusals of the command line must not wait for Lightning.
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
