"""What a training step optimises: one class each, all of them subclasses of `Objective`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cribo.objectives.base import Columns, Objective, Output, Setting, Step, make_objective

__all__ = ["Columns", "Objective", "Output", "Setting", "Step", "make_objective"]


def __getattr__(name: str) -> Any:
    # Imported when first used: a configuration must not wait for torch.
    if name in __all__:
        return getattr(importlib.import_module("cribo.objectives.base"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
