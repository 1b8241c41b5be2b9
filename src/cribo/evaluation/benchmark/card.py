"""Benchmark cards: scores of a backbone and its baselines as a table, a picture and JSON."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Patch

from cribo.base.console import duration
from cribo.base.drawing import PAGE_WIDTH, house_style, write_figure
from cribo.base.files import write_json, write_text
from cribo.base.tables import Table, numbers, texts
from cribo.base.wording import grouped
from cribo.evaluation.comparison import Comparison, Group
from cribo.evaluation.published import architecture_name
from cribo.evaluation.results import (
    NONE,
    RESULTS,
    EvaluationResult,
    metric_title,
    percent,
    score,
    varied_setting,
)

CARD, CHART = "card.md", "card.png"
"""File names of the text and the picture of a card."""

CARD_FORMAT = 1

BACKBONE, UNTRAINED, MEAN = "backbone", "untrained", "mean colour"
"""Roles of the evaluated networks in a row."""

_ROLES: Mapping[str, str] = {BACKBONE: "#0072B2", UNTRAINED: "#E69F00", MEAN: "0.6"}
"""Colour of each role."""

_SHOWN_PICTURES = 3  # maximum number of pictures on the chart
_BAR = 0.19  # inch


@dataclass
class CardRow:
    """Scores of a protocol on a data set.

    Attributes:
        evaluation: name of the protocol.
        set: folder name of the data set.
        quick_limit: maximum number of images per split in a quick benchmark.
        results: results by role: `BACKBONE`, `UNTRAINED` or `MEAN`.
        folders: folders of the results, by role.
        reasons: reason why a role has no result, by role.
    """

    evaluation: str
    set: str
    quick_limit: int
    results: dict[str, EvaluationResult] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of protocol and data set."""
        return f"{self.evaluation} on {self.set}"

    @property
    def seconds(self) -> float:
        """Total duration of all evaluations."""
        return sum(result.seconds for result in self.results.values())

    @property
    def headline(self) -> str:
        """Name of the metric in tables and charts."""
        return self.results[BACKBONE].headline

    @property
    def values(self) -> list[Any]:
        """Values of the varied setting of all results; None for the best."""
        return list(dict.fromkeys(value for result in self.results.values() for value in result.points))

    def measure(self, value: Any) -> str:
        """Return the title of the metric and the value of the varied setting, for tables."""
        result = self.results[BACKBONE]
        return f"{metric_title(result.headline)}, {varied_setting(result.varies, value)}"

    def point(self, value: Any, role: str) -> Mapping[str, Any]:
        """Return the metrics of a role in 0-1 at a value of the varied setting; empty if unknown."""
        return self.results[role].points.get(value, {}) if role in self.results else {}

    @property
    def charted(self) -> list[Any]:
        """Values of the varied setting to chart: all names, such as those of methods, else the first value."""
        return self.values if all(isinstance(value, str) for value in self.values) else self.values[:1]

    @property
    def picture(self) -> Path | None:
        """First picture of images in the folder of the backbone's result."""
        others = {"confusion", self.headline}
        found = (path for path in self.folders[BACKBONE].glob("*.png") if path.stem not in others)
        return min(found, default=None)


@dataclass(frozen=True)
class Card:
    """Scores of a backbone and its baselines with several protocols on several data sets.

    Attributes:
        backbone: description of the backbone, as in `results.json`.
        rows: rows in the order of evaluation.
        left_out: reason why a protocol has no row, by name of the protocol.
        quick: whether the benchmark was run with `quick`.
        command: command line that reproduces the benchmark.
    """

    backbone: dict[str, Any]
    rows: list[CardRow]
    left_out: Mapping[str, str]
    quick: bool
    command: str

    @property
    def measured(self) -> list[CardRow]:
        """Rows with a score of the backbone."""
        return [row for row in self.rows if BACKBONE in row.results]

    @cached_property
    def comparison(self) -> Comparison:
        """Comparison of the results of each measured row, with published values."""
        named = ({self._label(role): result for role, result in row.results.items()} for row in self.measured)
        return Comparison([Group.of(results) for results in named])

    def table(self) -> Table:
        """Return the table of all scores, with notes about missing scores."""
        columns = [*texts("evaluation", "set", "score"), *numbers(*_ROLES, "time")]
        return Table(columns, [list(self._cells(row)) for row in self.measured], self.title, list(self._notes()))

    @property
    def title(self) -> str:
        """Name, architecture and number of parameters."""
        about = self.backbone
        architecture = architecture_name(about) or about["architecture"]
        return f"{about['name']}: {architecture}, {about['parameters'] / 1e6:.1f} million parameters"

    @property
    def summary(self) -> str:
        """Description of the scores and their limitations."""
        sentence = "Scores in %, of the backbone, of the same network with random weights, and of the mean colour."
        if not self.quick:
            return sentence
        images = sorted({row.quick_limit for row in self.measured})
        return (
            f"{sentence} Quick benchmark (--quick): at most {' or '.join(map(str, images))} images per split, small "
            "images, one draw, no training. Differences of a few points are not significant, and scores "
            "are not comparable with published ones or with those of complete data sets."
        )

    def markdown(self, pictures: Mapping[str, str]) -> str:
        """Return the card as Markdown.

        Args:
            pictures: paths of pictures, by name of the row.
        """
        lines = [
            f"# {self.title}",
            *("", self.summary, "", f"![Scores of the backbone and its baselines]({CHART})", ""),
            replace(self.table(), title="").markdown(),
            *(line for name, path in pictures.items() for line in (f"## {name}", "", f"![{name}]({path})", "")),
            *("## All scores, settings that differ, and published values", ""),
            self.comparison.markdown(),
            *("## Conditions", ""),
            *(f"- {line}" for line in self._conditions()),
        ]
        return "\n".join(lines) + "\n"

    def record(self) -> dict[str, Any]:
        """Return the card as JSON types."""
        rows = [
            {
                "evaluation": row.evaluation,
                "set": row.set,
                "settings": row.results[BACKBONE].settings,
                "data": row.results[BACKBONE].data,
                "seconds": {role: result.seconds for role, result in row.results.items()},
                "versions": row.results[BACKBONE].versions,
                "folders": {role: str(folder.absolute()) for role, folder in row.folders.items()},
                "reasons": row.reasons,
                "comparison": compared,
            }
            for row, compared in zip(self.measured, self.comparison.record(), strict=True)
        ]
        return {
            "format": CARD_FORMAT,
            "kind": "card",
            "backbone": self.backbone,
            "quick": self.quick,
            "rows": rows,
            "not_measured": {**self.left_out, **{row.name: row.reasons[BACKBONE] for row in self._failed()}},
            "command": self.command,
        }

    def figure(self) -> Figure:
        """Draw a bar chart of the scores, with pictures of up to three data sets below."""
        shown = self._shown_pictures()
        groups = [(row, value) for row in self.measured for value in row.charted]
        bars = sum(_BAR * (len(row.results) + 1.2) for row, _ in groups) + 1.2
        images = {row.name: imread(path) for row, path in shown}
        heights = [bars, *(PAGE_WIDTH * image.shape[0] / image.shape[1] + 0.35 for image in images.values())]
        with house_style():
            figure = Figure(figsize=(PAGE_WIDTH, sum(heights)), layout="constrained")
            parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
            _draw_bars(parts[0].subplots(), groups)
            parts[0].suptitle(self.title + ("\nquick benchmark with few images" if self.quick else ""))
            for part, (name, image) in zip(parts[1:], images.items(), strict=True):
                axes = part.subplots()
                axes.imshow(image)
                axes.set_axis_off()
                part.suptitle(name, fontsize=9)
        return figure

    def write(self, folder: Path) -> None:
        """Write `card.md`, `card.png`, `results.json` and the pictures of the rows to an existing folder.

        Raises:
            OSError: a file cannot be written.
        """
        pictures = {}
        for row in self.measured:
            if (path := row.picture) is not None:
                pictures[row.name] = f"{row.evaluation}-{row.set}.png"
                shutil.copyfile(path, folder / pictures[row.name])
        write_figure(folder / CHART, self.figure())
        write_text(folder / CARD, self.markdown(pictures))
        write_json(folder / RESULTS, self.record())

    def _label(self, role: str) -> str:
        if role != BACKBONE:
            return role
        name = self.backbone["name"]
        return f"{name} ({role})" if name in _ROLES else name  # names must be distinct

    def _failed(self) -> list[CardRow]:
        return [row for row in self.rows if BACKBONE not in row.results]

    def _cells(self, row: CardRow) -> Iterator[list[str]]:
        for number, value in enumerate(row.values):
            first = number == 0
            names = [row.evaluation if first else "", row.set if first else "", row.measure(value)]
            scores = [score(row.headline, row.point(value, role)) for role in _ROLES]
            yield [*names, *scores, duration(row.seconds) if first else ""]

    def _notes(self) -> Iterator[str]:
        for row in self._failed():
            yield f"Not measured: {row.name}: {row.reasons[BACKBONE]}."
        missing = ((each, row.name) for row in self.measured for each in row.reasons.items())
        for (role, reason), names in grouped(missing).items():
            yield f"No baseline {role} ({reason}): {', '.join(names)}."
        for reason, names in grouped((reason, name) for name, reason in self.left_out.items()).items():
            yield f"Not measured: {', '.join(names)}: {reason}."

    def _conditions(self) -> Iterator[str]:
        facts = grouped(version for row in self.measured for version in row.results[BACKBONE].versions.items())
        all_values = " and ".join
        machine = all_values(facts.pop("hardware", [NONE]))
        total = duration(sum(row.seconds for row in self.measured))
        yield f"Machine: {machine}. Total time of all rows, including reused results: {total}."
        yield f"Versions: {', '.join(f'{name} {all_values(values)}' for name, values in facts.items())}."
        about = self.backbone
        blocks = (
            f"features of the last {about['layers']} blocks" if about["layers"] > 1 else "features of the last block"
        )
        yield f"Backbone: `{about['source']}`, {about['architecture']}, {blocks}."
        if self.command:
            yield f"Command: `{self.command}`"
        yield "The folder of each evaluation, with all settings, is in `results.json`."

    def _shown_pictures(self) -> list[tuple[CardRow, Path]]:
        """Return the first picture of each data set, up to three."""
        found: dict[str, tuple[CardRow, Path]] = {}
        for row in self.measured:
            if (path := row.picture) is not None:
                found.setdefault(row.set, (row, path))
        return list(found.values())[:_SHOWN_PICTURES]


def _draw_bars(axes: Axes, groups: Sequence[tuple[CardRow, Any]]) -> None:
    """Draw the scores of each group as bars, from top to bottom."""
    place, ticks = 0.0, []
    for row, value in groups:
        begin = place
        for role in row.results:
            point = row.point(value, role)
            found, std = (point.get(name) for name in (row.headline, f"{row.headline}_std"))
            bar = axes.barh(
                place, 100 * (found or 0.0), xerr=100 * (std or 0.0) or None, height=0.85, color=_ROLES[role]
            )
            axes.bar_label(bar, [percent(found)], padding=4, fontsize=8)
            place += 1
        ticks.append((begin + place - 1) / 2)
        place += 1.2
    axes.set_yticks(ticks, [f"{row.name}\n{row.measure(value)}" for row, value in groups], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(place - 1.2, -1)
    axes.set_xlim(0, 100)
    axes.set_xlabel("score [%]")
    handles = [Patch(color=colour, label=role) for role, colour in _ROLES.items()]
    axes.legend(handles=handles, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles))
