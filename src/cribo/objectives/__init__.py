"""Training objectives: subclasses of `Objective`."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.objectives.base import Columns, Objective, Output, Setting, Step, make_objective

__getattr__, __all__ = lazy_names(__name__)
