"""Studies: grids of pretraining runs with seeds, scores and a table (docs/studies.md)."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.studies.config import Budget, StudyConfig, load_study
    from cribo.studies.run import StudyResult, run_study
    from cribo.studies.table import StudyTable

__getattr__, __all__ = lazy_names(__name__)
