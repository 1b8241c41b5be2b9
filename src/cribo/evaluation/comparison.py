"""Comparison of results with each other and with published values."""

import os
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from cribo.base.drawing import PAGE_WIDTH, house_style, write_figure
from cribo.base.errors import FolderError, ResultError
from cribo.base.files import write_json, write_text
from cribo.base.tables import Table, numbers, texts
from cribo.base.wording import grouped, joined
from cribo.evaluation.curves import Curve, legend_height, plot_curves, varied_values
from cribo.evaluation.data import PLACES
from cribo.evaluation.published import PublishedRow, architecture_name, published_beside
from cribo.evaluation.results import (
    NONE,
    RESULTS,
    EvaluationResult,
    metric_heading,
    metric_title,
    percent,
    read_result,
    result_title,
    score,
    setting_title,
    setting_value,
    varied_setting,
    varied_title,
    varied_value,
)

COMPARISON = "compare.json"
"""File name of a comparison, which identifies its folder."""

COMPARISON_FORMAT = 1

_BY_CHANCE = frozenset({"settings.seed", "settings.draws", "settings.precision"})  # affect metrics by noise only
_FOLLOWS = frozenset({"data.memory_patches", "data.query_patches", "data.patches"})  # follow from the patch size
_CLASSES = 10  # number of classes with the largest differences
_TITLE_WIDTH = 90  # characters


@dataclass(frozen=True)
class Group:
    """Results of one protocol on one data set, with published values.

    Attributes:
        results: the results by name.
        published: published rows that are comparable with at least one of the results.
        apart: reasons why a result is not comparable with published values, by name of the result.
    """

    results: dict[str, EvaluationResult]
    published: list[PublishedRow]
    apart: dict[str, list[str]]

    @classmethod
    def of(cls, results: dict[str, EvaluationResult], *, sweeps: bool = False) -> "Group":
        """Create a group from results, with their published values."""
        found: dict[tuple[str, ...], PublishedRow] = {}
        apart: dict[str, list[str]] = {}
        for name, result in results.items():
            rows, obstacles = published_beside(result, sweeps=sweeps)
            if obstacles:
                apart[name] = obstacles
            # Results of several variants may be comparable with the same row.
            found |= {
                (row.source, row.title, str(row.points)): row for row in rows if row.points.keys() & result.points
            }
        return cls(results, list(found.values()), apart)

    @property
    def first(self) -> EvaluationResult:
        """The first result."""
        return next(iter(self.results.values()))

    @property
    def title(self) -> str:
        """Protocol, variants and data, for headings."""
        return result_title(list(self.results.values()))

    @property
    def values(self) -> list[Any]:
        """Values of the varied setting in all results; [None] if only the best rows are compared."""
        return [None] if None in self.first.points else varied_values(list(self.results.values()))

    @cached_property
    def differences(self) -> dict[str, list[Any]]:
        """Values of the conditions that differ between the results by dotted name, those of the data last.

        A result without the setting has the value `NONE`.
        """
        known = [_comparable(result) for result in self.results.values()]
        names = sorted(dict.fromkeys(name for one in known for name in one), key=lambda name: name.startswith("data."))
        values = {name: [one.get(name, NONE) for one in known] for name in names}
        return {name: found for name, found in values.items() if any(value != found[0] for value in found)}

    @property
    def incomparable(self) -> list[str]:
        """Names of the differing conditions that make metrics incomparable."""
        return [name for name in self.differences if name not in _BY_CHANCE]

    @property
    def verdict(self) -> str:
        """Sentence about the comparability of the results; empty if no setting differs."""
        if not self.differences:
            return ""
        names = joined([setting_title(name) for name in self.incomparable or self.differences], "and")
        if self.incomparable:
            return f"These figures are NOT comparable: the results differ in {names}."
        return f"The results differ in {names}, which affects figures by noise or rounding only."

    def class_differences(self) -> tuple[Any, list[tuple[str, float, float]]]:
        """Return the classes with the largest differences between two results.

        Returns:
            The first value of the varied setting that both results have, and tuples (class, metric of the first result,
            metric of the second result) in descending order of the absolute difference; empty unless there are two
            results with classes.
        """
        if len(self.results) != 2:
            return None, []
        one, other = (result.points for result in self.results.values())
        shared = [value for value in one if value in other and one[value].get("per_class")]
        if not shared:
            return None, []
        both = one[shared[0]]["per_class"], other[shared[0]].get("per_class") or {}
        pairs = [(name, *(part.get(name) for part in both)) for name in self.first.classes]
        known = [(name, a, b) for name, a, b in pairs if a is not None and b is not None and a != b]
        return shared[0], sorted(known, key=lambda pair: -abs(pair[1] - pair[2]))[:_CLASSES]

    def curves(self) -> list[Curve]:
        """Return the curves of all results and published rows."""
        published = [Curve(row.title, row.points, published=True) for row in self.published]
        return [*(Curve(name, result.points) for name, result in self.results.items()), *published]

    def record(self) -> dict[str, Any]:
        """Return the group as JSON types."""
        first = self.first
        value, classes = self.class_differences()
        kept = [f"{metric}{suffix}" for metric in first.metrics for suffix in ("", "_std")]

        def figures(points: Mapping[Any, Mapping[str, Any]]) -> list[dict[str, Any]]:
            return [
                {first.varies: value, **{name: row[name] for name in kept if name in row}}
                for value, row in points.items()
            ]

        return {
            "evaluation": first.evaluation,
            "data": first.data["name"],
            "varies": first.varies,
            "metrics": first.metrics,
            "results": [
                {"name": name, "backbone": result.backbone, "figures": figures(result.points)}
                for name, result in self.results.items()
            ],
            "published": [
                {
                    **{name: value for name, value in vars(row).items() if name != "points"},
                    "figures": figures(row.points),
                }
                for row in self.published
            ],
            "not_beside_published": self.apart,
            "comparable": not self.incomparable,
            "differences": [{"setting": name, "values": values} for name, values in self.differences.items()],
            "class_differences": {
                "at": value,
                "classes": [{"class": name, "values": values} for name, *values in classes],
            },
        }


@dataclass(frozen=True)
class Comparison:
    """Comparison of results, grouped by protocol and data set."""

    groups: list[Group]

    def tables(self) -> list[Table]:
        """Return the tables of metrics, differing settings and classes of each group."""
        return [table for group in self.groups for table in _tables(group)]

    def markdown(self) -> str:
        """Return the tables as Markdown."""
        return "\n".join(table.markdown() for table in self.tables())

    def record(self) -> list[dict[str, Any]]:
        """Return the comparison as JSON types, one dictionary per group."""
        return [group.record() for group in self.groups]

    def figure(self) -> Figure:
        """Plot the headline metric of each group as a function of the varied setting."""
        curves = [group.curves() for group in self.groups]
        heights = [
            4.0 + legend_height(drawn) if len(group.values) > 1 else 1.2 + 0.42 * len(drawn)
            for group, drawn in zip(self.groups, curves, strict=True)
        ]
        figure = Figure(figsize=(PAGE_WIDTH, sum(heights)), layout="constrained")
        with house_style():
            # Separate subfigures, so that long bar labels of one group do not shrink the axes of another.
            parts = figure.subfigures(len(self.groups), squeeze=False, height_ratios=heights)[:, 0]
            for part, group, drawn in zip(parts, self.groups, curves, strict=True):
                axes = part.subplots()
                plot_curves(axes, drawn, metric=group.first.headline, varies=group.first.varies, values=group.values)
                part.suptitle("\n".join((group.title, *textwrap.wrap(group.verdict, _TITLE_WIDTH))), fontsize=10)
        return figure

    def write(self, folder: Path) -> list[Path]:
        """Write `compare.json`, `compare.md` and `compare.png` to a folder, each atomically.

        Raises:
            FolderError: the folder already contains a comparison.
            OSError: a file cannot be written.
        """
        paths = [Path(folder) / name for name in (COMPARISON, "compare.md", "compare.png")]
        if existing := [path for path in paths if path.exists()]:
            raise FolderError(f"{existing[0]} already exists: choose another folder")
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_figure(paths[2], self.figure())
        write_text(paths[1], self.markdown())
        write_json(paths[0], {"format": COMPARISON_FORMAT, "groups": self.record()})
        return paths


def compare(
    results: Sequence[str | os.PathLike[str] | EvaluationResult],
    *,
    names: Sequence[str] | None = None,
    sweeps: bool = False,
) -> Comparison:
    """Compare results with each other and with published values of the same setting.

    Results are grouped by protocol, data set and classes. Settings may differ within a group; the comparison lists the
    differences.

    Args:
        results: folders of evaluations, their `results.json`, or results.
        names: names of the results; by default those of the backbones, with folder names if ambiguous.
        sweeps: also compare with published hyperparameter sweeps of the pretraining.

    Raises:
        ResultError: there are no results, a result is given twice or unreadable, or names are invalid.
    """
    if not results:
        raise ResultError("at least one result is required, got 0: give folders of evaluations")
    paths = [None if isinstance(given, EvaluationResult) else _folder(given) for given in results]
    for path, count in Counter(path for path in paths if path).items():
        if count > 1:
            raise ResultError(f"{path} is given {count} times: give each result once")
    read = [given if isinstance(given, EvaluationResult) else read_result(given) for given in results]
    names = _names(read, paths) if names is None else names
    if len(names) != len(read) or len(set(names)) < len(names):
        raise ResultError(f"names must be distinct, one for each of the {len(read)} results, got {', '.join(names)}")
    groups: dict[tuple[Any, ...], dict[str, EvaluationResult]] = {}
    for name, result in zip(names, read, strict=True):
        kind = result.evaluation, result.data["name"], result.varies, *result.metrics, *result.classes
        groups.setdefault(kind, {})[name] = result
    return Comparison([Group.of(group, sweeps=sweeps) for group in groups.values()])


def _folder(path: str | os.PathLike[str]) -> Path:
    path = Path(path).expanduser().resolve()
    return path.parent if path.name == RESULTS else path


def _names(results: Sequence[EvaluationResult], folders: Sequence[Path | None]) -> list[str]:
    """Return the names of the backbones; if ambiguous, with the names of folders, their paths, or numbers."""
    backbones = [result.backbone["name"] for result in results]
    places = [f"({folder.name})" if folder else f"#{number}" for number, folder in enumerate(folders, start=1)]
    if len({*places}) < len(places):
        places = [f"({folder})" if folder else place for folder, place in zip(folders, places, strict=True)]
    return [
        f"{name} {place}" if backbones.count(name) > 1 else name for name, place in zip(backbones, places, strict=True)
    ]


def _comparable(result: EvaluationResult) -> dict[str, Any]:
    """Return the settings and data that metrics depend on, without the varied setting."""
    unimportant = {f"settings.{result.varies}", f"settings.{result.varies}s", *_FOLLOWS}
    if result.data["name"] != "folder":  # the path of a known data set does not matter
        unimportant |= {f"data.{place}" for place in PLACES}
    return {name: value for name, value in result.conditions.items() if name not in unimportant}


# ---------------------------------------------------------------------- tables


def _tables(group: Group) -> Iterator[Table]:
    first, names = group.first, list(group.results)
    # With several values, one table for each metric; notes below the last.
    tables = [first.metrics] if len(group.values) == 1 else [[metric] for metric in first.metrics]
    for metrics in tables:
        title = group.title if len(tables) == 1 else f"{group.title}, {metric_heading(metrics[0])}"
        yield _figures(group, title, metrics, list(_notes(group)) if metrics is tables[-1] else [])
    if group.differences:
        rows = [[setting_title(name), *map(setting_value, values)] for name, values in group.differences.items()]
        yield Table([*texts("setting"), *numbers(*names)], [rows], "Settings that differ")
    value, classes = group.class_differences()
    if classes:
        at = "" if value is None else f", {varied_setting(first.varies, value)}"
        rows = [[name, percent(a), percent(b), f"{100 * (b - a):+.1f}"] for name, a, b in classes]
        title = f"Classes that differ most, {first.class_metric} [%]{at}"
        yield Table([*texts("class"), *numbers(*names, "difference")], [rows], title)


def _figures(group: Group, title: str, metrics: Sequence[str], notes: list[str]) -> Table:
    columns = [(value, metric) for value in group.values for metric in metrics]

    def cells(points: Mapping[Any, Mapping[str, Any]]) -> list[str]:
        return [score(metric, points.get(value, {})) for value, metric in columns]

    def heading(value: Any, metric: str) -> str:
        if value is None:
            tried = any(len(result.results) > 1 for result in group.results.values())
            return metric_heading(metric) + (", best" if tried else "")
        text = varied_value(group.first.varies, value)
        return f"{metric_heading(metric)}, {text}" if len(group.values) == 1 else text

    rows = [[name, _architecture(result), NONE, *cells(result.points)] for name, result in group.results.items()]
    printed = [[row.marked, row.backbone, row.training, *cells(row.points)] for row in group.published]
    printed = [row for row in printed if set(row[3:]) != {NONE}]
    headings = numbers(*(heading(*column) for column in columns))
    if printed:
        return Table([*texts("", "backbone", "pretraining (epochs)"), *headings], [rows, printed], title, notes)
    return Table([*texts("", "backbone"), *headings], [[row[:2] + row[3:] for row in rows]], title, notes)


def _architecture(result: EvaluationResult) -> str:
    """Return the architecture of the backbone, as named in papers if it has such a name."""
    return architecture_name(result.backbone) or str(result.backbone.get("architecture") or NONE)


def _notes(group: Group) -> Iterator[str]:
    first = group.first
    if len(group.values) > 1:
        figures = f"{metric_title(first.headline)} in %," if len(first.metrics) == 1 else "Figures"
        yield f"{figures} by {varied_title(first.varies)}."
    best = {name: result.best for name, result in group.results.items() if len(result.results) > 1}
    if best and group.values == [None]:
        text = (f"{name} {setting_value(row[first.varies])}" for name, row in best.items())
        yield f"Best {varied_title(first.varies)}: {', '.join(text)}."
    if group.verdict:
        yield group.verdict
    used = {name: result.versions.get("cribo", "an unknown version") for name, result in group.results.items()}
    if len(set(used.values())) > 1:
        listed = joined([f"{name} by {version}" for name, version in used.items()], "and")
        yield f"Evaluated with different versions of cribo: {listed} (docs/versions.md)."
    if group.published:
        comparable = [name for name in group.results if name not in group.apart]
        only = f" Comparable with {joined(comparable, 'and')} only." if group.apart else ""
        yield f"Published: {'; '.join(sorted({row.source for row in group.published}))}.{only}"
        yield from dict.fromkeys(row.remark for row in group.published if row.remark)
        silent = dict.fromkeys(name for row in group.published for name in row.silent)

        def chosen(name: str) -> str:
            used = group.results[name].settings
            return ", ".join(f"{setting_title(one)} {setting_value(used.get(one, NONE))}" for one in silent)

        for text, names in grouped((chosen(name), name) for name in comparable if silent).items():
            yield f"Not specified in the paper: {text} ({joined(names, 'and')})."
    if any(row.reproduced for row in group.published):
        yield "† trained by the authors of that paper, not by those of the method."
    if taken := dict.fromkeys(row.taken_from for row in group.published if row.taken_from):
        yield f"* as they report it from {'; '.join(taken)}."
    for name, reasons in group.apart.items():
        yield f"No published figures for {name}: {'; '.join(reasons)}."
