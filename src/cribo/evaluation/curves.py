"""Plots of metrics against the varied setting of results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from cribo.base.colours import LINE_COLOURS
from cribo.base.drawing import LEGEND_LINE, legend_columns
from cribo.evaluation.results import NONE, EvaluationResult, metric_title, varied_title, varied_value

_MARKERS = "osDv^P"
_LEAST_SPAN = 5.0  # of the vertical axis, in per cent


@dataclass(frozen=True)
class Curve:
    """Values of a metric as a function of a setting.

    Args:
        label: label in the legend.
        points: rows by value of the setting, with the metric in 0-1 and its standard deviation `<metric>_std` if known.
        published: whether the curve is drawn in the style of published values.
    """

    label: str
    points: Mapping[Any, Mapping[str, Any]]
    published: bool = False

    def percent(self, metric: str, values: Sequence[object]) -> Float[np.ndarray, " n"]:
        """Return a metric or its standard deviation for each value, in per cent; NaN if unknown."""
        return 100 * np.array([self.points.get(value, {}).get(metric) for value in values], dtype=float)


def varied_values(results: Sequence[EvaluationResult]) -> list[object]:
    """Return all values of the varied setting of results, in display order.

    Memory shares are in ascending order as in the paper: 1/128, 1/64, 1/8, 1/1. Other values keep the order of the
    first result if it has all of them, and are sorted otherwise.
    """
    values = dict.fromkeys(row[result.varies] for result in results for row in result.results)
    if results[0].varies == "ratio":
        return sorted(values, reverse=True)
    return list(values) if len(values) == len(results[0].results) else sorted(values)


def plot_curves(axes: Axes, curves: Sequence[Curve], *, metric: str, varies: str, values: Sequence[object]) -> None:
    """Plot a metric against a setting, with one curve per result.

    Numeric values are connected by lines, with error bars; names, such as those of methods, are not connected. A
    setting with a single value is drawn as horizontal bars.
    """
    if len(values) == 1:
        _plot_bars(axes, curves, metric, values)
        return
    named = any(isinstance(value, str) for value in values)
    for number, curve in enumerate(curves):
        shift = 0.06 * (number - (len(curves) - 1) / 2) if named else 0.0  # markers side by side
        places = np.arange(len(values)) + shift
        points, std = curve.percent(metric, values), curve.percent(f"{metric}_std", values)
        known = ~np.isnan(points)  # lines connect the known points
        axes.errorbar(
            places[known],
            points[known],
            yerr=None if np.isnan(std).all() else std[known],
            label=curve.label,
            color=LINE_COLOURS[number % len(LINE_COLOURS)],
            linestyle="none" if named else "--" if curve.published else "-",
            linewidth=1 if curve.published else 1.8,
            marker=_MARKERS[number // len(LINE_COLOURS) % len(_MARKERS)],
            markersize=7 if named else 4,
            markerfacecolor="white" if curve.published else None,
            capsize=3,
            zorder=2 if curve.published else 3,
        )
    axes.set_xticks(range(len(values)), [varied_value(varies, value) for value in values])
    if named:
        axes.set_xlim(-0.5, len(values) - 0.5)
    axes.set(xlabel=varied_title(varies), ylabel=f"{metric_title(metric)} [%]")
    axes.ticklabel_format(axis="y", useOffset=False)
    low, high = axes.get_ylim()
    wider = max(0.0, _LEAST_SPAN - (high - low)) / 2
    axes.set_ylim(max(0.0, low - wider), high + wider)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    names = [curve.label for curve in curves]
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=legend_columns(names))


def legend_height(curves: Sequence[Curve]) -> float:
    """Return the height in inches of the legend of curves."""
    return LEGEND_LINE * -(-len(curves) // legend_columns([curve.label for curve in curves]))


def _plot_bars(axes: Axes, curves: Sequence[Curve], metric: str, values: Sequence[object]) -> None:
    points, std = (np.concatenate([c.percent(name, values) for c in curves]) for name in (metric, f"{metric}_std"))
    bars = axes.barh(
        [curve.label for curve in curves],
        np.nan_to_num(points),
        xerr=std,
        color=[LINE_COLOURS[number % len(LINE_COLOURS)] for number in range(len(curves))],
        height=0.6,
    )
    for bar, curve in zip(bars, curves, strict=True):
        if curve.published:
            bar.set(facecolor="white", edgecolor=bar.get_facecolor(), hatch="///")
    axes.bar_label(bars, [NONE if np.isnan(point) else f"{point:.1f}" for point in points], padding=4)
    axes.set_xlabel(f"{metric_title(metric)} [%]")
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
