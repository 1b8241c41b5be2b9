"""The result of a study: mean scores of its rows, their differences with intervals, and the paper's figures."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from cribo.apps.studies.config import STATISTICS, StudyConfig, aggregate_names
from cribo.apps.studies.metrics import STEP_METRICS, Unit, unit_of
from cribo.base.colours import LINE_COLOURS
from cribo.base.drawing import PAGE_WIDTH, house_style, write_figure
from cribo.base.files import write_json, write_text
from cribo.base.tables import Table, numbers, texts
from cribo.base.wording import counted
from cribo.evaluation.intervals import (
    CONFIDENCE,
    LEAST_SEEDS,
    Difference,
    confidence_of_each,
    miou_difference,
    seed_difference,
)
from cribo.evaluation.results import NONE

TABLE, CSV, LATEX, FIGURE, RESULTS = "table.md", "table.csv", "table.tex", "figure.png", "results.json"
"""File names in the folder of a study."""

STUDY_FORMAT = 1

_ROW_HEIGHT = 0.32  # inch
_DOTS: Mapping[str, dict[str, Any]] = {
    "seed": {"marker": "o", "color": LINE_COLOURS[0], "alpha": 0.45, "markersize": 5, "linestyle": "none"},
    "mean": {"marker": "|", "color": LINE_COLOURS[0], "markersize": 13, "markeredgewidth": 2, "linestyle": "none"},
    "paper": {"marker": "D", "color": LINE_COLOURS[1], "markerfacecolor": "white", "linestyle": "none"},
}


@dataclass(frozen=True)
class Scored:
    """Result of one evaluation.

    Attributes:
        value: the metric.
        folder: folder of the result, relative to that of the study.
        counts: counts of each draw and scored image (`intervals.image_counts`); None if they are not recorded.
    """

    value: float
    folder: str
    counts: Int[Tensor, "d q 3 c"] | None = None


@dataclass(frozen=True)
class Measured:
    """Results of one evaluation of all rows.

    Attributes:
        metric: name of the metric.
        results: results by row and seed, of finished cells.
        varied: value of the varied setting, such as the ratio, that is compared.
        settings: settings of the evaluation and description of its data, without places.
    """

    metric: str
    results: Mapping[str, Mapping[int, Scored]]
    varied: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> Unit:
        """Unit of the metric."""
        return unit_of(self.metric)

    def values(self, row: str) -> list[float]:
        """Return the metric of each finished seed."""
        return [scored.value for scored in self.results[row].values()]

    def mean(self, row: str) -> float | None:
        """Return the mean over seeds; None without finished cells."""
        return statistics.fmean(values) if (values := self.values(row)) else None

    def std(self, row: str) -> float | None:
        """Return the standard deviation over seeds; None for fewer than two."""
        return statistics.stdev(values) if len(values := self.values(row)) > 1 else None

    def text(self, row: str) -> str:
        """Return mean and standard deviation in the unit of the metric's heading."""
        return self.unit.text(self.mean(row), self.std(row))


@dataclass(frozen=True)
class Pair:
    """Comparison of a row of a study with a reference row.

    Attributes:
        row, reference: their names.
        seeds: seeds that both have.
        difference: row minus reference.
        paper: the same difference in the paper, in 0-1; None if it is not published.
    """

    row: str
    reference: str
    seeds: Sequence[int]
    difference: Difference
    paper: float | None = None

    @property
    def sign(self) -> int:
        """1 or -1 if the interval lies above or below zero, else 0."""
        low, high = self.difference.low, self.difference.high
        return 0 if low is None or high is None else (low > 0) - (high < 0)

    def text(self, metric: str) -> str:
        """Return the difference with its interval in the unit of the metric's heading."""
        signed, low, high = unit_of(metric).signed, self.difference.low, self.difference.high
        bounds = "" if low is None or high is None else f" [{signed(low)}, {signed(high)}]"
        return signed(self.difference.mean) + bounds

    def sentence(self, metric: str) -> str:
        """Return a sentence with the difference, whether it is significant, and the paper's difference."""
        found = {1: "higher", -1: "lower", 0: "no significant difference"}[self.sign]
        if self.difference.low is None:
            found = f"not enough seeds to judge ({len(self.seeds)} of {LEAST_SEEDS})"
        text = f"{self.row} against {self.reference}: {unit_of(metric).title} {self.text(metric)}, {found}"
        if self.paper is not None:
            text += f"; in the paper {unit_of(metric).signed(self.paper)}"
            if self.sign and self.paper:
                text += ", the same sign" if self.sign * self.paper > 0 else ", the opposite sign"
        return text + "."


def comparisons_note(pairs: Sequence[Pair], comparisons: int, metric: str) -> str:
    """Return a sentence with the number of comparisons and the differences that they could detect; empty for none."""
    if not comparisons:
        return ""
    one = f"{counted(comparisons, 'comparison')}, with intervals of {100 * confidence_of_each(comparisons):.4g} %"
    halves = sorted(half for pair in pairs if (half := pair.difference.detectable) is not None)
    if not halves:
        return f"{one} once there are {LEAST_SEEDS} seeds."
    sizes = dict.fromkeys(unit_of(metric).text(half) for half in (halves[0], halves[-1]))
    return f"{one}; the smallest difference that they detect is {' to '.join(sizes)}."


def compare_rows(
    measured: Measured, row: str, other: Measured, reference: str, *, comparisons: int, paper: float | None = None
) -> Pair | None:
    """Compare two rows, of the same study or of two; None if no seed of both is finished, or all share their cells.

    Args:
        measured: results that contain the row.
        row: name of the row.
        other: results that contain the reference row.
        reference: its name.
        comparisons: number of comparisons among which this is one, for which its interval is corrected.
        paper: the same difference in the paper, in 0-1.
    """
    pairs = {
        seed: (other.results[reference][seed], scored)
        for seed, scored in measured.results[row].items()
        if seed in other.results[reference]
    }
    if not pairs or (measured is other and all(before.folder == after.folder for before, after in pairs.values())):
        return None
    before, after = zip(*pairs.values(), strict=True)
    counts = [[scored.counts for scored in one] for one in (before, after)]
    shapes = {None if each is None else each.shape for one in counts for each in one}
    if measured.metric == "miou" and None not in shapes and len(shapes) == 1:
        difference = miou_difference(*(torch.stack(one) for one in counts), comparisons=comparisons)
    else:
        scores = (torch.tensor([scored.value for scored in one]) for one in (before, after))
        difference = seed_difference(*scores, comparisons=comparisons)
    return Pair(row, reference, list(pairs), difference, paper)


@dataclass(frozen=True)
class StudyTable:
    """Scores of a study's rows, and their comparisons.

    Attributes:
        study: the study.
        measured: the scores by name.
    """

    study: StudyConfig
    measured: Mapping[str, Measured]

    @property
    def rows(self) -> list[str]:
        """Names of the rows."""
        return self.study.names

    @cached_property
    def pairs(self) -> dict[str, list[Pair]]:
        """The comparisons of each score whose rows have a finished seed in common."""
        return {name: list(self._compared(name)) for name in self.measured}

    def _compared(self, name: str) -> Iterator[Pair]:
        one, comparisons = self.measured[name], len(self.study.pairs)
        for row, reference in self.study.pairs:
            paper = self._paper_difference(name, row, reference)
            if pair := compare_rows(one, row, one, reference, comparisons=comparisons, paper=paper):
                yield pair

    @property
    def sentences(self) -> list[str]:
        """The sentence of each comparison."""
        prefixes = {name: f"{name}: " if len(self.measured) > 1 else "" for name in self.measured}
        return [
            prefixes[name] + pair.sentence(one.metric)
            for name, one in self.measured.items()
            for pair in self.pairs[name]
        ]

    def aggregates(self, name: str) -> dict[str, tuple[float | None, int]]:
        """Return the minimum, maximum and mean of each group of rows by name, with its number of finished rows.

        Args:
            name: name of the score.
        """
        one, found = self.measured[name], {}
        for group, rows in self.study.aggregates.items():
            means = [mean for row in rows if (mean := one.mean(row)) is not None]
            values = [statistic(means) if means else None for statistic in STATISTICS.values()]
            found |= {each: (value, len(means)) for each, value in zip(aggregate_names([group]), values, strict=True)}
        return found

    def tables(self) -> list[Table]:
        """Return a table with all scores, if there are several, and one for each that has more than means.

        These are published figures with the differences from them, aggregates and comparisons.
        """
        if len(self.measured) == 1:
            return [self._table(name) for name in self.measured]
        compared = bool(self.study.pairs or self.study.aggregates)
        detailed = [self._table(name) for name in self.measured if compared or self.study.paper.get(name)]
        return [self.means(), *detailed]

    def means(self) -> Table:
        """Return one table with the means of all scores."""
        headings = [
            f"{name} [{one.unit.symbol}]"
            if one.metric in STEP_METRICS or name.endswith(one.unit.title)
            else f"{name} {one.unit.heading}"
            for name, one in self.measured.items()
        ]
        rows = [[row, *(self._mean(one, row) for one in self.measured.values())] for row in self.rows]
        columns = [self._aggregated(name) for name in self.measured]
        aggregated = [[cells[0][0], *(cell[1] for cell in cells)] for cells in zip(*columns, strict=True)]
        blocks = [*filter(None, (rows, aggregated))]
        return Table([*texts(""), *numbers(*headings)], blocks, self.study.title, [self.conditions])

    def values(self) -> Table:
        """Return a table with a row for each score, row and seed, with scores in 0-1 or metres."""
        rows = [
            [name, one.metric, row, str(seed), str(scored.value)]
            for name, one in self.measured.items()
            for row, results in one.results.items()
            for seed, scored in results.items()
        ]
        return Table(texts("score", "metric", "row", "seed", "value"), [rows])

    def markdown(self) -> str:
        """Return the tables and the sentences of the comparisons as Markdown."""
        lines = [
            *(f"# {self.study.title}", "", f"![{self.study.title}]({FIGURE})", ""),
            *(table.markdown() for table in self.tables()),
            *(f"- {sentence}" for sentence in self.sentences),
            *("", self.conditions),
        ]
        return "\n".join(lines) + "\n"

    @property
    def conditions(self) -> str:
        """Sentences about the seeds, the intervals and the source of published figures."""
        finished = [len(results) for one in self.measured.values() for results in one.results.values()]
        fewest, most = min(finished), max(finished)
        up_to = "up to " if fewest < most else ""
        seeds = f"Mean and standard deviation of {up_to}{counted(most, 'seed')}." if most > 1 else "One seed."
        paper = f" The paper's figures: {self.study.source}." if self.study.paper and self.study.source else ""
        intervals = (
            f" All intervals are right with a probability of {100 * CONFIDENCE:.0f} %. They are paired, over seeds and "
            "over images where the evaluation records them."
        )
        return f"{seeds}{intervals if most >= LEAST_SEEDS else ''}{paper}"

    def record(self) -> dict[str, Any]:
        """Return everything as JSON types; scores in 0-1 or metres."""
        return {
            "format": STUDY_FORMAT,
            "kind": "study",
            "title": self.study.title,
            "scores": {
                name: {
                    "metric": one.metric,
                    "varied": one.varied,
                    "settings": one.settings,
                    "rows": {
                        row: {
                            "mean": one.mean(row),
                            "std": one.std(row),
                            "seeds": {str(seed): scored.value for seed, scored in one.results[row].items()},
                            "folders": {str(seed): scored.folder for seed, scored in one.results[row].items()},
                            "paper": self._paper(name, row),
                        }
                        for row in self.rows
                    },
                    "aggregates": {
                        each: {"value": value, "rows": rows, "paper": self._paper(name, each)}
                        for each, (value, rows) in self.aggregates(name).items()
                    },
                    "comparisons": [
                        {
                            "row": pair.row,
                            "reference": pair.reference,
                            "seeds": list(pair.seeds),
                            "difference": pair.difference.mean,
                            "interval": [pair.difference.low, pair.difference.high],
                            "paper": pair.paper,
                            "reading": pair.sentence(one.metric),
                        }
                        for pair in self.pairs[name]
                    ],
                }
                for name, one in self.measured.items()
            },
        }

    @house_style()
    def figure(self) -> Figure:
        """Draw the score of each seed, the means, and the paper's figures, with a panel for each score."""
        height = len(self.measured) * (len(self.rows) * _ROW_HEIGHT + 0.9) + 0.4
        figure = Figure(figsize=(PAGE_WIDTH, height), layout="constrained")
        figure.suptitle(self.study.title)
        panels = figure.subplots(len(self.measured), 1, squeeze=False)[:, 0]
        for axes, name in zip(panels, self.measured, strict=True):
            self._draw(axes, name)
        return figure

    def write(self, folder: Path) -> None:
        """Write the tables, the figure and all numbers to a folder; each replaces an older one.

        Raises:
            OSError: a file cannot be written.
        """
        write_figure(folder / FIGURE, self.figure())
        write_text(folder / TABLE, self.markdown())
        write_text(folder / CSV, self.values().csv())
        write_text(folder / LATEX, self.means().latex())
        write_json(folder / RESULTS, self.record())

    def _table(self, name: str) -> Table:
        one = self.measured[name]
        columns = [*texts("row"), *numbers(one.unit.heading)]
        blocks = [[[row, self._mean(one, row)] for row in self.rows], self._aggregated(name)]
        if self.study.paper.get(name):
            columns += numbers("paper", "difference")
            values = {row: one.mean(row) for row in self.rows}
            values |= {each: value for each, (value, _) in self.aggregates(name).items()}
            blocks = [[[*cells, *self._published(name, cells[0], values)] for cells in rows] for rows in blocks]
        note = comparisons_note(self.pairs[name], len(self.study.pairs), one.metric)
        return Table(columns, [*filter(None, blocks)], f"{self.study.title}: {name}", [note] if note else [])

    def _published(self, name: str, row: str, values: Mapping[str, float | None]) -> tuple[str, str]:
        """Return the paper's figure of a row, and the difference of the measured value from it."""
        unit, value, paper = self.measured[name].unit, values[row], self._paper(name, row)
        difference = NONE if value is None or paper is None else unit.signed(value - paper)
        return unit.text(paper), difference

    def _aggregated(self, name: str) -> list[list[str]]:
        """Return a row of the table for each statistic of the aggregated rows."""
        unit, size = self.measured[name].unit, max(map(len, self.study.aggregates.values()), default=0)
        return [
            [each, unit.text(value) + ("" if rows in (0, size) else f" ({counted(rows, 'row')})")]
            for each, (value, rows) in self.aggregates(name).items()
        ]

    def _mean(self, one: Measured, row: str) -> str:
        finished, cells = len(one.results[row]), 1 if row in self.study.checkpoints else len(self.study.seeds)
        return one.text(row) + ("" if finished in (0, cells) else f" ({counted(finished, 'seed')})")

    def _paper(self, name: str, row: str) -> float | None:
        value = self.study.paper.get(name, {}).get(row)
        return None if value is None else value / self.measured[name].unit.factor

    def _paper_difference(self, name: str, row: str, reference: str) -> float | None:
        own, other = self._paper(name, row), self._paper(name, reference)
        return None if own is None or other is None else own - other

    def _draw(self, axes: Axes, name: str) -> None:
        one, places = self.measured[name], list(enumerate(self.rows))
        points = {
            "seed": [(value, place) for place, row in places for value in one.values(row)],
            "mean": [(mean, place) for place, row in places if (mean := one.mean(row)) is not None],
            "paper": [(paper, place) for place, row in places if (paper := self._paper(name, row)) is not None],
        }
        for label, found in points.items():
            if found:
                values = [one.unit.factor * value for value, _ in found]
                axes.plot(values, [place for _, place in found], label=label, **_DOTS[label])
        axes.set_yticks(range(len(self.rows)), self.rows)
        axes.set_ylim(len(self.rows) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel(one.unit.heading)
        axes.set_title(name if len(self.measured) > 1 else "", loc="left")
        if any(points.values()):
            axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
