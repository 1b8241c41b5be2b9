"""Training objectives: subclasses of `Objective`."""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.objectives.base import Columns as Columns
    from cribo.objectives.base import Objective as Objective
    from cribo.objectives.base import Output as Output
    from cribo.objectives.base import Setting as Setting
    from cribo.objectives.base import Step as Step
    from cribo.objectives.base import make_objective as make_objective
else:
    __getattr__, __all__ = lazy_names(__name__)
