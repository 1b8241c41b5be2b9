"""Benchmark of a backbone: all protocols on all data sets of a folder (docs/evaluation/card.md)."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.benchmark.card import Card as Card
    from cribo.benchmark.config import BenchmarkConfig as BenchmarkConfig
    from cribo.benchmark.config import BenchmarkData as BenchmarkData
    from cribo.benchmark.plan import make_plan as make_plan
    from cribo.benchmark.run import benchmark as benchmark
else:
    __getattr__, __all__ = lazy_names(__name__)
