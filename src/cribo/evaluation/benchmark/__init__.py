"""Benchmark of a backbone: all protocols on all data sets of a folder (docs/evaluation/card.md)."""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.evaluation.benchmark.card import Card as Card
    from cribo.evaluation.benchmark.config import BenchmarkConfig as BenchmarkConfig
    from cribo.evaluation.benchmark.config import BenchmarkData as BenchmarkData
    from cribo.evaluation.benchmark.plan import make_plan as make_plan
    from cribo.evaluation.benchmark.run import benchmark as benchmark
else:
    __getattr__, __all__ = lazy_names(__name__)
