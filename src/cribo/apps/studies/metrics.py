"""Metrics that a study's table reads, of evaluations and of the steps of a training, and their units."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from cribo.evaluation.results import NONE, metric_heading, metric_title, metric_value


@dataclass(frozen=True)
class Reading:
    """A metric of a finished evaluation.

    Attributes:
        value: the metric.
        settings: settings of the evaluation and description of its data, without places.
        varied: value of the varied setting, such as the ratio.
        counts: counts of each draw and scored image (`intervals.image_counts`); None if they are not recorded.
    """

    value: float
    settings: Mapping[str, Any]
    varied: Any = None
    counts: Int[Tensor, "d q 3 c"] | None = None


@dataclass(frozen=True)
class Unit:
    """Unit in which a metric is printed and published.

    Attributes:
        title: title of the metric.
        symbol: symbol of the unit.
        factor: factor from the stored value to the printed one.
        decimals: number of decimals.
    """

    title: str
    symbol: str
    factor: float
    decimals: int = 1

    @property
    def heading(self) -> str:
        """Title and unit, for a column."""
        return f"{self.title} [{self.symbol}]"

    def text(self, value: float | None, std: float | None = None) -> str:
        """Return a value, with its standard deviation if there is one.

        Example:
            >>> unit_of("miou").text(0.4412, 0.0031), unit_of("time").text(0.0871)
            ('44.1 ± 0.3', '87.1')
        """
        if value is None:
            return NONE
        printed = f"{self.factor * value:.{self.decimals}f}"
        return printed if std is None else f"{printed} ± {self.factor * std:.{self.decimals}f}"

    def signed(self, value: float) -> str:
        """Return a difference with its sign.

        Example:
            >>> unit_of("miou").signed(0.012), unit_of("miou").signed(-0.0001), unit_of("rmse").signed(-0.03)
            ('+1.2', '+0.0', '-0.030')
        """
        size = self.text(abs(value))
        return f"{'-' if value < 0 and float(size) else '+'}{size}"


_OF_STEPS = {
    "time": Unit("time", "ms", 1000.0),
    "share": Unit("share", "%", 100.0),
    "memory": Unit("memory", "GB", 1e-9, 2),
    "epoch": Unit("epoch", "min", 1 / 60, 2),
}

STEP_METRICS = tuple(_OF_STEPS)
"""Metrics of a step, the headline first: seconds, share of the whole step, peak bytes, and seconds per epoch."""


def unit_of(metric: str) -> Unit:
    """Return the unit of a metric of an evaluation or of a step."""
    if metric in _OF_STEPS:
        return _OF_STEPS[metric]
    # Fractions in per cent, or metres.
    in_percent = metric_heading(metric).endswith("[%]")
    decimals = len(metric_value(metric, 0.0).partition(".")[2])
    return Unit(metric_title(metric), "%" if in_percent else "m", 100.0 if in_percent else 1.0, decimals)
