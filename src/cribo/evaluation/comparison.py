"""Results side by side: where their settings differ, which classes do, and what is published of the same setting."""

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
from rich.table import Table
from rich.text import Text

from cribo.drawing import house_style, write_figure
from cribo.evaluation.pictures import Curve, plot_curves, varied_values
from cribo.evaluation.published import PublishedFigures, architecture_name, published_beside
from cribo.evaluation.results import (
    NONE,
    EvaluationResult,
    ResultError,
    class_metric_title,
    flat,
    metric_title,
    percent,
    read_result,
    setting_value,
    varied_title,
    varied_value,
)
from cribo.files import FolderError, write_json, write_text

COMPARISON = "compare.json"
"""The file that a comparison leaves, and by which its folder is known."""

COMPARISON_FORMAT = 1

_BEST_OF = frozenset({"learning_rate"})  # settings of which the best row is what is reported
_BY_CHANCE = frozenset({"settings.seed", "settings.draws", "settings.precision"})  # change figures by noise only
_OWN_DATA = frozenset({"data.memory_patches", "data.query_patches"})  # follow from the patch size
_PLACES = ("data.root", "data.train_annotations", "data.val_annotations")
_CLASSES = 10  # that differ most
_TITLE_WIDTH = 90  # characters
_LEAST_WIDTH = 14  # characters, of a column of names in a narrow terminal


@dataclass(frozen=True)
class Entry:
    """A result under the name that it has in a comparison."""

    name: str
    result: EvaluationResult

    @cached_property
    def points(self) -> dict[Any, dict[str, Any]]:
        """The rows by the value of the setting in which they differ; the best one alone, by None, if that counts."""
        rows, varies = self.result.results, self.result.varies
        if varies in _BEST_OF:
            return {None: max(rows, key=lambda row: row[self.result.headline] or 0.0)}
        return {row[varies]: row for row in rows}


@dataclass(frozen=True)
class Difference:
    """A setting in which results differ.

    Attributes:
        setting: its dotted name, which begins with `settings.` or `data.`.
        values: of each result; `NONE` where a result does not have it.
    """

    setting: str
    values: list[Any]

    @property
    def matters(self) -> bool:
        """Whether figures under these settings are figures of different things."""
        return self.setting not in _BY_CHANCE

    @property
    def name(self) -> str:
        """The setting as it is printed."""
        return self.setting.removeprefix("settings.").replace("_", " ").replace(".", " ")


@dataclass(frozen=True)
class Group:
    """Results of one evaluation on one data set, and what is published of the same.

    Attributes:
        entries: the results.
        published: rows that at least one of the results can be compared with.
        apart: why a result cannot be compared with published figures, by its name; none if nothing is published.
    """

    entries: list[Entry]
    published: list[PublishedFigures]
    apart: dict[str, list[str]]

    @property
    def first(self) -> EvaluationResult:
        """The first result."""
        return self.entries[0].result

    @property
    def values(self) -> list[Any]:
        """The values of the setting in which rows differ."""
        if self.first.varies in _BEST_OF:
            return [None]
        return varied_values([entry.result for entry in self.entries])

    @cached_property
    def differences(self) -> list[Difference]:
        """The settings in which the results differ."""
        known = [_comparable(entry.result) for entry in self.entries]
        names = sorted(dict.fromkeys(name for settings in known for name in settings), key=_is_of_data)
        found = [Difference(name, [settings.get(name, NONE) for settings in known]) for name in names]
        return [difference for difference in found if any(v != difference.values[0] for v in difference.values)]

    @property
    def verdict(self) -> str:
        """What the differences mean for the figures."""
        matter = [difference.name for difference in self.differences if difference.matters]
        if matter:
            return f"These figures are NOT comparable: the results differ in {_listed(matter)}."
        if self.differences:
            names = [difference.name for difference in self.differences]
            return f"The results differ in {_listed(names)}, which changes figures by chance or rounding only."
        return ""

    def class_differences(self) -> tuple[Any, list[tuple[str, float, float]]]:
        """Of two results, the classes whose figures (IoU, say) differ most.

        Returns:
            the value of the varied setting at which they are compared, the first one that both have, and (class,
            figure of the first result, figure of the second) from the largest difference on; no class unless there
            are two results with classes.
        """
        if len(self.entries) != 2:
            return None, []
        one, other = (entry.points for entry in self.entries)
        both = [value for value in one if value in other and one[value].get("per_class")]
        if not both:
            return None, []
        left, right = one[both[0]]["per_class"], other[both[0]].get("per_class") or {}
        pairs = [
            (name, left[name], right[name])
            for name in self.first.classes
            if left.get(name) is not None and right.get(name) is not None and left[name] != right[name]
        ]
        return both[0], sorted(pairs, key=lambda pair: -abs(pair[1] - pair[2]))[:_CLASSES]


@dataclass(frozen=True)
class Comparison:
    """Results side by side, in one group for each evaluation and data set."""

    groups: list[Group]

    def table(self) -> RenderableType:
        """For a terminal: figures, differing settings and classes of each group."""
        return Stack(*(part for group in self.groups for section in _sections(group) for part in section.rich()))

    def markdown(self) -> str:
        """The same as Markdown, to paste."""
        lines = [line for group in self.groups for section in _sections(group) for line in section.markdown()]
        return "\n".join(lines).strip() + "\n"

    def figure(self) -> Figure:
        """The headline metric of each group against the setting in which rows differ."""
        heights = [_figure_height(group) for group in self.groups]
        figure = Figure(figsize=(9.5, sum(heights)), layout="constrained")
        with house_style():
            # Each by itself: names to the left of one group's bars would take room from another's curves.
            parts = figure.subfigures(len(self.groups), squeeze=False, height_ratios=heights)[:, 0]
            for part, group in zip(parts, self.groups, strict=True):
                axes = part.subplots()
                metric, varies = group.first.headline, group.first.varies
                plot_curves(axes, _curves(group), metric=metric, varies=varies, values=group.values)
                axes.set_title("\n".join((group.first.title, *textwrap.wrap(group.verdict, _TITLE_WIDTH))))
        return figure

    def write(self, folder: Path) -> list[Path]:
        """Write `compare.json`, `compare.md` and `compare.png` into a folder, each whole or not at all.

        Raises:
            FolderError: the folder holds a comparison already.
            OSError: they cannot be written.
        """
        folder = Path(folder)
        paths = [folder / COMPARISON, folder / "compare.md", folder / "compare.png"]
        if there := [path for path in paths if path.exists()]:
            raise FolderError(f"{there[0]} exists already: choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_figure(paths[2], self.figure())
        write_text(paths[1], self.markdown())
        write_json(paths[0], {"format": COMPARISON_FORMAT, "groups": [_record(group) for group in self.groups]})
        return paths


def compare(
    results: Sequence[str | os.PathLike[str] | EvaluationResult], *, names: Sequence[str] | None = None
) -> Comparison:
    """Lay results side by side, with the published figures that they can be compared with.

    Results of different evaluations, data sets or classes go to different groups. Within a group, settings may
    differ; the comparison says which do, and what that means.

    Args:
        results: folders of evaluations, their `results.json`, or results.
        names: of the results; by default that of the backbone, with the folder's where two are alike.

    Raises:
        ResultError: none is given, one twice, one that cannot be read, or names that do not fit.
    """
    if not results:
        raise ResultError("there must be at least one result to compare, got 0: give folders of evaluations")
    paths = [None if isinstance(given, EvaluationResult) else Path(given).expanduser() for given in results]
    twice = [path for path, count in Counter(path.resolve() for path in paths if path).items() if count > 1]
    if twice:
        raise ResultError(f"{twice[0]} is given {len(twice) + 1} times: give each result once")
    read = [given if isinstance(given, EvaluationResult) else read_result(given) for given in results]
    if names is None:
        names = _names(read, paths)
    if len(names) != len(read) or len(set(names)) < len(names):
        raise ResultError(f"names must be {len(read)} different ones, a name for each result, got {', '.join(names)}")
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for name, result in zip(names, read, strict=True):
        groups.setdefault(_kind(result), []).append(Entry(name, result))
    return Comparison([_group(entries) for entries in groups.values()])


def _kind(result: EvaluationResult) -> tuple[Any, ...]:
    return (result.evaluation, result.data["name"], result.varies, tuple(result.metrics), tuple(result.classes))


def _names(results: Sequence[EvaluationResult], paths: Sequence[Path | None]) -> list[str]:
    """Names that tell results apart: of the backbone; else with that of the folder; else with a number."""
    backbones = [result.backbone["name"] for result in results]
    folders = [_folder_name(path) for path in paths]
    often = Counter(backbones)
    named = [
        f"{name} ({folder})" if often[name] > 1 and folder else name
        for name, folder in zip(backbones, folders, strict=True)
    ]
    count, seen = Counter(named), Counter()
    numbered = []
    for name in named:
        seen[name] += 1
        numbered.append(f"{name} #{seen[name]}" if count[name] > 1 else name)
    return numbered


def _folder_name(path: Path | None) -> str:
    if path is None:
        return ""
    return (path.resolve().parent if path.is_file() else path.resolve()).name


def _group(entries: list[Entry]) -> Group:
    found: dict[tuple[str, int], PublishedFigures] = {}
    apart: dict[str, list[str]] = {}
    for entry in entries:
        figures, obstacles = published_beside(entry.result)
        if obstacles:
            apart[entry.name] = obstacles
        for published in figures:
            if any(value in entry.points for value in published.points):
                found[published.source, id(published.row)] = published
    return Group(entries, list(found.values()), apart)


def _comparable(result: EvaluationResult) -> dict[str, Any]:
    """The settings that a figure depends on, beside backbone and varied setting."""
    settings = {f"settings.{name}": value for name, value in flat(result.settings)}
    for name in (result.varies, f"{result.varies}s"):
        settings.pop(f"settings.{name}", None)
    data = {f"data.{name}": value for name, value in flat(result.data)}
    if result.data["name"] != "folder":
        for place in _PLACES:  # where a known set lies does not matter
            data.pop(place, None)
    return {**settings, **{name: value for name, value in data.items() if name not in _OWN_DATA}}


def _is_of_data(name: str) -> bool:
    return name.startswith("data.")


def _curves(group: Group) -> list[Curve]:
    metric = group.first.headline
    own = [
        Curve(
            entry.name,
            {value: row[metric] for value, row in entry.points.items()},
            {v: row[f"{metric}_std"] for v, row in entry.points.items() if row.get(f"{metric}_std") is not None},
        )
        for entry in group.entries
    ]
    return own + [
        Curve(
            f"{_method(published)}, {published.row.pretraining} {published.row.epochs} ep. (published)",
            {value: figures.get(metric) for value, figures in published.points.items() if value in group.values},
            {},
            published=True,
        )
        for published in group.published
    ]


def _figure_height(group: Group) -> float:
    """Inches; lines have room, bars as many as there are."""
    return 4.2 if len(group.values) > 1 else 1.2 + 0.42 * (len(group.entries) + len(group.published))


def _method(published: PublishedFigures) -> str:
    return f"{published.row.method} {published.row.backbone}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


# --------------------------------------------------------------- how it is said


@dataclass(frozen=True)
class _Section:
    """A table with words above and below, for a terminal or as Markdown.

    Attributes:
        title: above.
        header: of the columns; those from `numbers` on are aligned to the right.
        blocks: of rows, kept apart.
        notes: below.
    """

    title: str
    header: list[str]
    blocks: list[list[list[str]]]
    notes: list[str]
    numbers: int = 1

    def rich(self) -> Iterator[RenderableType]:
        yield Text(self.title, style="bold")
        table = Table()
        for place, name in enumerate(self.header):
            number = place >= self.numbers
            longest = max((len(row[place]) for block in self.blocks for row in block), default=0)
            # Figures stay on a line; where a terminal is narrow, headings break, and names as far as one can read them.
            table.add_column(
                Text(name),
                justify="right" if number else "left",
                overflow="fold",
                min_width=longest if number else min(longest, _LEAST_WIDTH),
            )
        for block in self.blocks:
            table.add_section()
            for row in block:
                table.add_row(*map(Text, row))
        yield table
        yield from (Text(note) for note in (*self.notes, ""))

    def markdown(self) -> Iterator[str]:
        yield f"**{self.title}**\n"
        yield _markdown_row(self.header)
        yield _markdown_row(["--:" if place >= self.numbers else ":--" for place in range(len(self.header))])
        yield from (_markdown_row(row) for block in self.blocks for row in block)
        yield ""
        yield from (f"{note}\n" for note in self.notes)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _sections(group: Group) -> list[_Section]:
    sections = _figures_sections(group)
    if group.differences:
        sections.append(
            _Section(
                "Settings that differ",
                ["setting", *(entry.name for entry in group.entries)],
                [[[difference.name, *map(setting_value, difference.values)] for difference in group.differences]],
                [],
            )
        )
    value, classes = group.class_differences()
    if classes:
        at = "" if value is None else f", {varied_title(group.first.varies)} {varied_value(group.first.varies, value)}"
        sections.append(
            _Section(
                f"Classes that differ most, {class_metric_title(group.first.evaluation)} [%]{at}",
                ["class", *(entry.name for entry in group.entries), "difference"],
                [[[name, percent(a), percent(b), f"{100 * (b - a):+.1f}"] for name, a, b in classes]],
                [],
            )
        )
    return sections


def _figures_sections(group: Group) -> list[_Section]:
    """One table; of several metrics by several values, one for each metric."""
    metrics, title = group.first.metrics, group.first.title
    if len(group.values) == 1 or len(metrics) == 1:
        columns = [(value, metric) for value in group.values for metric in metrics]
        return [_figures_section(group, title, columns, list(_notes(group)))]
    tables = [
        _figures_section(group, f"{title}, {metric_title(metric)}", [(value, metric) for value in group.values], [])
        for metric in metrics
    ]
    return [*tables[:-1], dataclasses.replace(tables[-1], notes=list(_notes(group)))]


def _figures_section(group: Group, title: str, columns: Sequence[tuple[Any, str]], notes: list[str]) -> _Section:
    published = [
        figures
        for figures in group.published
        if any(metric in figures.points.get(value, {}) for value, metric in columns)
    ]
    about = ["backbone", "pretraining (epochs)"] if published else ["backbone"]
    own_rows = [
        [
            entry.name,
            architecture_name(entry.result.backbone) or str(entry.result.backbone.get("architecture") or NONE),
            *([NONE] if published else []),
            *(_figure(entry.points.get(value, {}), metric) for value, metric in columns),
        ]
        for entry in group.entries
    ]
    published_rows = [
        [
            f"{figures.row.method}{_mark(figures)} (published)",
            figures.row.backbone,
            f"{figures.row.pretraining} ({figures.row.epochs})",
            *(_figure(figures.points.get(value, {}), metric) for value, metric in columns),
        ]
        for figures in published
    ]
    header = ["", *about, *(_column_title(group, value, metric) for value, metric in columns)]
    blocks = [block for block in (own_rows, published_rows) if block]
    return _Section(title, header, blocks, notes, numbers=1 + len(about))


def _column_title(group: Group, value: Any, metric: str) -> str:
    if value is None:
        best = any(len(entry.result.results) > 1 for entry in group.entries)
        return f"{metric_title(metric)} [%]{', best' if best else ''}"
    said = varied_value(group.first.varies, value)
    return f"{metric_title(metric)} [%], {said}" if len(group.values) == 1 else said


def _figure(row: Mapping[str, Any], metric: str) -> str:
    return percent(row.get(metric), row.get(f"{metric}_std"))


def _sources(published: Sequence[PublishedFigures]) -> str:
    """Papers with their tables."""
    papers: dict[str, list[str]] = {}
    for source in sorted({figures.source for figures in published}):
        paper, _, number = source.rpartition(", Table ")
        papers.setdefault(paper, []).append(number)
    return "; ".join(
        f"{paper}, Table{'s' if len(numbers) > 1 else ''} {_listed(numbers)}" for paper, numbers in papers.items()
    )


def _mark(figures: PublishedFigures) -> str:
    return ("†" if figures.row.reproduced else "") + ("*" if figures.row.taken_from else "")


def _notes(group: Group) -> Iterator[str]:
    """What the figures are, and what they may be compared with."""
    if len(group.values) > 1:
        figures = metric_title(group.first.headline) if len(group.first.metrics) == 1 else "Figures"
        yield f"{figures} in %, by {varied_title(group.first.varies)}."
    if best := [entry for entry in group.entries if None in entry.points and len(entry.result.results) > 1]:
        said = (f"{entry.name} {setting_value(entry.points[None][group.first.varies])}" for entry in best)
        yield f"Best {varied_title(group.first.varies)}: {', '.join(said)}."
    if group.verdict:
        yield group.verdict
    if group.published:
        comparable = [entry for entry in group.entries if entry.name not in group.apart]
        only = f" Comparable with {_listed([entry.name for entry in comparable])} only." if group.apart else ""
        yield f"Published: {_sources(group.published)}.{only}"
        yield from dict.fromkeys(figures.remark for figures in group.published if figures.remark)
        silent = dict.fromkeys(name for figures in group.published for name in figures.silent)
        chosen: dict[str, list[str]] = {}
        for entry in comparable if silent else ():
            settings = entry.result.settings
            said = ", ".join(f"{name.replace('_', ' ')} {setting_value(settings.get(name, NONE))}" for name in silent)
            chosen.setdefault(said, []).append(entry.name)
        for said, names in chosen.items():
            yield f"Where the paper is silent: {said} ({_listed(names)})."
    if any(figures.row.reproduced for figures in group.published):
        yield "† trained by the authors of that paper, not by those of the method."
    if taken := dict.fromkeys(figures.row.taken_from for figures in group.published if figures.row.taken_from):
        yield f"* as they report it from {'; '.join(map(str, taken))}."
    for name, reasons in group.apart.items():
        yield f"No published figures beside {name}: {'; '.join(reasons)}."


# ----------------------------------------------------------------------- JSON


def _record(group: Group) -> dict[str, Any]:
    first = group.first
    value, classes = group.class_differences()
    return {
        "evaluation": first.evaluation,
        "data": first.data["name"],
        "varies": first.varies,
        "metrics": first.metrics,
        "results": [
            {
                "name": entry.name,
                "backbone": entry.result.backbone,
                "figures": [_bare(first, value, row) for value, row in entry.points.items()],
            }
            for entry in group.entries
        ],
        "published": [
            {
                **vars(figures.row),
                "source": figures.source,
                "figures": [{first.varies: value, **points} for value, points in figures.points.items()],
            }
            for figures in group.published
        ],
        "not_beside_published": group.apart,
        "comparable": not any(difference.matters for difference in group.differences),
        "differences": [
            {"setting": difference.setting, "values": difference.values} for difference in group.differences
        ],
        "class_differences": {
            "at": value,
            "classes": [{"class": name, "values": [one, other]} for name, one, other in classes],
        },
    }


def _bare(result: EvaluationResult, value: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    names = [*result.metrics, *(f"{metric}_std" for metric in result.metrics)]
    return {result.varies: value, **{name: row[name] for name in names if name in row}}
