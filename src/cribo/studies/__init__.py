"""Studies: grids of pretraining runs with seeds, scores and a table (docs/studies.md)."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.studies.config import Budget as Budget
    from cribo.studies.config import StudyConfig as StudyConfig
    from cribo.studies.config import load_study as load_study
    from cribo.studies.run import StudyResult as StudyResult
    from cribo.studies.run import run_study as run_study
    from cribo.studies.table import StudyTable as StudyTable
else:
    __getattr__, __all__ = lazy_names(__name__)
