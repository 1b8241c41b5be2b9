"""Comparison of results with each other and with published values."""

import dataclasses
import os
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Group as Stack
from rich.console import RenderableType

from cribo.drawing import house_style, write_figure
from cribo.evaluation.data import PLACES
from cribo.evaluation.pictures import Curve, plot_curves, varied_values
from cribo.evaluation.published import PublishedFigures, architecture_name, published_beside
from cribo.evaluation.results import (
    NONE,
    EvaluationResult,
    ResultError,
    Section,
    flat,
    metric_heading,
    metric_title,
    metric_value,
    percent,
    read_result,
    result_title,
    setting_value,
    varied_title,
    varied_value,
)
from cribo.files import FolderError, write_json, write_text

COMPARISON = "compare.json"
"""File name of a comparison, which identifies its folder."""

COMPARISON_FORMAT = 1

_BEST_OF = "learning_rate"  # only the best row is reported if this setting varies
_BY_CHANCE = frozenset({"settings.seed", "settings.draws", "settings.precision"})  # affect metrics by noise only
_FOLLOWS = frozenset({"data.memory_patches", "data.query_patches", "data.patches"})  # follow from the patch size
_CLASSES = 10  # number of classes with the largest differences
_TITLE_WIDTH = 90  # characters


@dataclass(frozen=True)
class Entry:
    """A result with its name in a comparison."""

    name: str
    result: EvaluationResult

    @property
    def architecture(self) -> str:
        """Architecture of the backbone, as named in papers if it has such a name."""
        about = self.result.backbone
        return architecture_name(about) or str(about.get("architecture") or NONE)

    @cached_property
    def points(self) -> dict[Any, dict[str, Any]]:
        """Rows by value of the varied setting; for learning rates only the best row, with key None."""
        if self.result.varies == _BEST_OF:
            return {None: self.result.best}
        return {row[self.result.varies]: row for row in self.result.results}


@dataclass(frozen=True)
class Difference:
    """A setting that differs between results.

    Attributes:
        setting: dotted name, which starts with `settings.` or `data.`.
        values: value of each result; `NONE` if the result does not have the setting.
    """

    setting: str
    values: list[Any]

    @property
    def matters(self) -> bool:
        """Whether the difference makes metrics incomparable."""
        return self.setting not in _BY_CHANCE

    @property
    def name(self) -> str:
        """Display name of the setting."""
        return self.setting.removeprefix("settings.").replace("_", " ").replace(".", " ")


@dataclass(frozen=True)
class Group:
    """Results of one protocol on one data set, with published values.

    Attributes:
        entries: the results.
        published: published rows that are comparable with at least one of the results.
        apart: reasons why a result is not comparable with published values, by name of the result.
    """

    entries: list[Entry]
    published: list[PublishedFigures]
    apart: dict[str, list[str]]

    @classmethod
    def of(cls, entries: list[Entry], *, sweeps: bool = False) -> "Group":
        """Create a group from results, with their published values."""
        found: dict[tuple[str, int], PublishedFigures] = {}
        apart: dict[str, list[str]] = {}
        for entry in entries:
            figures, obstacles = published_beside(entry.result, sweeps=sweeps)
            if obstacles:
                apart[entry.name] = obstacles
            found |= {(one.source, id(one.row)): one for one in figures if one.points.keys() & entry.points.keys()}
        return cls(entries, list(found.values()), apart)

    @property
    def first(self) -> EvaluationResult:
        """The first result."""
        return self.entries[0].result

    @property
    def title(self) -> str:
        """Protocol, variants and data, for headings."""
        return result_title([entry.result for entry in self.entries])

    @property
    def values(self) -> list[Any]:
        """Values of the varied setting."""
        return [None] if self.first.varies == _BEST_OF else varied_values([entry.result for entry in self.entries])

    @cached_property
    def differences(self) -> list[Difference]:
        """Settings that differ between the results, those of the data last."""
        known = [_comparable(entry.result) for entry in self.entries]
        names = dict.fromkeys(name for settings in known for name in settings)
        names = sorted(names, key=lambda name: name.startswith("data."))
        found = {name: [settings.get(name, NONE) for settings in known] for name in names}
        return [Difference(name, values) for name, values in found.items() if any(v != values[0] for v in values)]

    @property
    def verdict(self) -> str:
        """Sentence about the comparability of the results; empty if no setting differs."""
        if matter := [difference.name for difference in self.differences if difference.matters]:
            return f"These figures are NOT comparable: the results differ in {_listed(matter)}."
        names = _listed([difference.name for difference in self.differences])
        return f"The results differ in {names}, which affects figures by noise or rounding only." if names else ""

    def class_differences(self) -> tuple[Any, list[tuple[str, float, float]]]:
        """Return the classes with the largest differences between two results.

        Returns:
            The first value of the varied setting that both results have, and tuples (class, metric of the first result,
            metric of the second result) in descending order of the absolute difference; empty unless there are two
            results with classes.
        """
        one, other = self.entries[0].points, self.entries[-1].points
        shared = [value for value in one if value in other and one[value].get("per_class")]
        if len(self.entries) != 2 or not shared:
            return None, []
        both = one[shared[0]]["per_class"], other[shared[0]].get("per_class") or {}
        pairs = [(name, *(part.get(name) for part in both)) for name in self.first.classes]
        known = [(name, a, b) for name, a, b in pairs if a is not None and b is not None and a != b]
        return shared[0], sorted(known, key=lambda pair: -abs(pair[1] - pair[2]))[:_CLASSES]


@dataclass(frozen=True)
class Comparison:
    """Comparison of results, grouped by protocol and data set."""

    groups: list[Group]

    def table(self) -> RenderableType:
        """Return tables of metrics, differing settings and classes of each group for a terminal."""
        return Stack(*(part for group in self.groups for section in _sections(group) for part in section.rich()))

    def markdown(self) -> str:
        """Return the tables as Markdown."""
        lines = [line for group in self.groups for section in _sections(group) for line in section.markdown()]
        return "\n".join(lines).strip() + "\n"

    def record(self) -> list[dict[str, Any]]:
        """Return the comparison as JSON types, one dictionary per group."""
        return [_record(group) for group in self.groups]

    def figure(self) -> Figure:
        """Plot the headline metric of each group as a function of the varied setting."""
        heights = [
            4.2 if len(group.values) > 1 else 1.2 + 0.42 * (len(group.entries) + len(group.published))
            for group in self.groups
        ]
        figure = Figure(figsize=(9.5, sum(heights)), layout="constrained")
        with house_style():
            # Separate subfigures, so that long bar labels of one group do not shrink the axes of another.
            parts = figure.subfigures(len(self.groups), squeeze=False, height_ratios=heights)[:, 0]
            for part, group in zip(parts, self.groups, strict=True):
                axes = part.subplots()
                metric, varies = group.first.headline, group.first.varies
                plot_curves(axes, _curves(group), metric=metric, varies=varies, values=group.values)
                axes.set_title("\n".join((group.title, *textwrap.wrap(group.verdict, _TITLE_WIDTH))))
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
    paths = [None if isinstance(given, EvaluationResult) else Path(given).expanduser().resolve() for given in results]
    for path, count in Counter(path for path in paths if path).items():
        if count > 1:
            raise ResultError(f"{path} is given {count} times: give each result once")
    read = [given if isinstance(given, EvaluationResult) else read_result(given) for given in results]
    names = _names(read, paths) if names is None else names
    if len(names) != len(read) or len(set(names)) < len(names):
        raise ResultError(f"names must be distinct, one for each of the {len(read)} results, got {', '.join(names)}")
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for name, result in zip(names, read, strict=True):
        kind = result.evaluation, result.data["name"], result.varies, *result.metrics, *result.classes
        groups.setdefault(kind, []).append(Entry(name, result))
    return Comparison([Group.of(entries, sweeps=sweeps) for entries in groups.values()])


def _names(results: Sequence[EvaluationResult], paths: Sequence[Path | None]) -> list[str]:
    """Return the names of the backbones, with folder names or numbers if ambiguous."""
    backbones = [result.backbone["name"] for result in results]
    folders = ["" if path is None else (path.parent if path.is_file() else path).name for path in paths]
    named = [
        f"{name} ({folder})" if backbones.count(name) > 1 and folder else name
        for name, folder in zip(backbones, folders, strict=True)
    ]
    return [
        f"{name} #{named[: place + 1].count(name)}" if named.count(name) > 1 else name
        for place, name in enumerate(named)
    ]


def _comparable(result: EvaluationResult) -> dict[str, Any]:
    """Return the settings and data that metrics depend on, without the varied setting."""
    known = flat({"settings": result.settings, "data": result.data})
    unimportant = {f"settings.{result.varies}", f"settings.{result.varies}s", *_FOLLOWS}
    if result.data["name"] != "folder":  # the path of a known data set does not matter
        unimportant |= {f"data.{place}" for place in PLACES}
    return {name: value for name, value in known if name not in unimportant}


def _curves(group: Group) -> list[Curve]:
    metric = group.first.headline
    curves = [Curve.of(entry.points, metric, entry.name) for entry in group.entries]
    for one in group.published:
        points = {value: figures for value, figures in one.points.items() if value in group.values}
        curves.append(Curve.of(points, metric, f"{one.row.title} (published)", published=True))
    return curves


def _listed(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else "".join(names)


# ---------------------------------------------------------------------- tables


def _sections(group: Group) -> Iterator[Section]:
    first, names = group.first, [entry.name for entry in group.entries]
    # With several values, one table for each metric; notes below the last.
    tables = [first.metrics] if len(group.values) == 1 else [[metric] for metric in first.metrics]
    for metrics in tables:
        title = group.title if len(tables) == 1 else f"{group.title}, {metric_heading(metrics[0])}"
        columns = [(value, metric) for value in group.values for metric in metrics]
        yield _figures(group, title, columns, list(_notes(group)) if metrics is tables[-1] else [])
    if group.differences:
        rows = [[difference.name, *map(setting_value, difference.values)] for difference in group.differences]
        yield Section("Settings that differ", ["setting", *names], [rows])
    value, classes = group.class_differences()
    if classes:
        at = "" if value is None else f", {varied_title(first.varies)} {varied_value(first.varies, value)}"
        rows = [[name, percent(a), percent(b), f"{100 * (b - a):+.1f}"] for name, a, b in classes]
        title = f"Classes that differ most, {first.class_metric} [%]{at}"
        yield Section(title, ["class", *names, "difference"], [rows])


def _figures(group: Group, title: str, columns: Sequence[tuple[Any, str]], notes: list[str]) -> Section:
    def cells(points: Mapping[Any, Mapping[str, Any]]) -> list[str]:
        rows = [(points.get(value, {}), metric) for value, metric in columns]
        return [metric_value(metric, row.get(metric), row.get(f"{metric}_std")) for row, metric in rows]

    rows = [[entry.name, entry.architecture, NONE, *cells(entry.points)] for entry in group.entries]
    printed = [[one.row.marked, one.row.backbone, one.row.training, *cells(one.points)] for one in group.published]
    printed = [row for row in printed if set(row[3:]) != {NONE}]
    header = ["", "backbone", "pretraining (epochs)", *(_column_title(group, *column) for column in columns)]
    if printed:
        return Section(title, header, [rows, printed], notes, names=3)
    return Section(title, header[:2] + header[3:], [[row[:2] + row[3:] for row in rows]], notes, names=2)


def _column_title(group: Group, value: Any, metric: str) -> str:
    title = metric_heading(metric)
    if value is None:
        return f"{title}, best" if any(len(entry.result.results) > 1 for entry in group.entries) else title
    said = varied_value(group.first.varies, value)
    return f"{title}, {said}" if len(group.values) == 1 else said


def _notes(group: Group) -> Iterator[str]:
    first = group.first
    if len(group.values) > 1:
        figures = f"{metric_title(first.headline)} in %," if len(first.metrics) == 1 else "Figures"
        yield f"{figures} by {varied_title(first.varies)}."
    if best := [entry for entry in group.entries if None in entry.points and len(entry.result.results) > 1]:
        said = (f"{entry.name} {setting_value(entry.points[None][first.varies])}" for entry in best)
        yield f"Best {varied_title(first.varies)}: {', '.join(said)}."
    if group.verdict:
        yield group.verdict
    if group.published:
        comparable = [entry for entry in group.entries if entry.name not in group.apart]
        only = f" Comparable with {_listed([entry.name for entry in comparable])} only." if group.apart else ""
        yield f"Published: {_sources(group.published)}.{only}"
        yield from dict.fromkeys(one.remark for one in group.published if one.remark)
        silent = dict.fromkeys(name for one in group.published for name in one.silent)
        chosen: dict[str, list[str]] = {}
        for entry in comparable if silent else ():
            used = entry.result.settings
            said = ", ".join(f"{name.replace('_', ' ')} {setting_value(used.get(name, NONE))}" for name in silent)
            chosen.setdefault(said, []).append(entry.name)
        for said, names in chosen.items():
            yield f"Not specified in the paper: {said} ({_listed(names)})."
    if any(one.row.reproduced for one in group.published):
        yield "† trained by the authors of that paper, not by those of the method."
    if taken := dict.fromkeys(one.row.taken_from for one in group.published if one.row.taken_from):
        yield f"* as they report it from {'; '.join(map(str, taken))}."
    for name, reasons in group.apart.items():
        yield f"No published figures for {name}: {'; '.join(reasons)}."


def _sources(published: Sequence[PublishedFigures]) -> str:
    papers: dict[str, list[str]] = {}
    for source in sorted({figures.source for figures in published}):
        paper, _, number = source.partition(", Table ")
        papers.setdefault(paper, []).extend([number] if number else [])
    tables = {
        paper: f", Table{'s' * (len(numbers) > 1)} {_listed(numbers)}" for paper, numbers in papers.items() if numbers
    }
    return "; ".join(paper + tables.get(paper, "") for paper in papers)


# ------------------------------------------------------------------------ JSON


def _record(group: Group) -> dict[str, Any]:
    first = group.first
    value, classes = group.class_differences()
    kept = [*first.metrics, *(f"{metric}_std" for metric in first.metrics)]
    return {
        "evaluation": first.evaluation,
        "data": first.data["name"],
        "varies": first.varies,
        "metrics": first.metrics,
        "results": [
            {
                "name": entry.name,
                "backbone": entry.result.backbone,
                "figures": [
                    {first.varies: value, **{name: row[name] for name in kept if name in row}}
                    for value, row in entry.points.items()
                ],
            }
            for entry in group.entries
        ],
        "published": [
            {
                **vars(one.row),
                "source": one.source,
                "figures": [{first.varies: value, **points} for value, points in one.points.items()],
            }
            for one in group.published
        ],
        "not_beside_published": group.apart,
        "comparable": not any(difference.matters for difference in group.differences),
        "differences": [dataclasses.asdict(difference) for difference in group.differences],
        "class_differences": {
            "at": value,
            "classes": [{"class": name, "values": [one, other]} for name, one, other in classes],
        },
    }
