"""Benchmark of a backbone: all protocols on all data sets of a folder (docs/evaluation/card.md)."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.benchmark.card import Card
    from cribo.benchmark.config import BenchmarkConfig, BenchmarkData
    from cribo.benchmark.plan import make_plan
    from cribo.benchmark.run import benchmark

__getattr__, __all__ = lazy_names(__name__)
