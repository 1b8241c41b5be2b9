"""Studies: grids of pretraining runs with seeds, scores and a table (docs/studies.md)."""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.apps.studies.config import Budget as Budget
    from cribo.apps.studies.config import StudyConfig as StudyConfig
    from cribo.apps.studies.config import load_study as load_study
    from cribo.apps.studies.run import StudyResult as StudyResult
    from cribo.apps.studies.run import run_study as run_study
    from cribo.apps.studies.table import StudyTable as StudyTable
else:
    __getattr__, __all__ = lazy_names(__name__)
