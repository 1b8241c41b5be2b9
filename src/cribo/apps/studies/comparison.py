"""Comparison of the rows that two studies have in common."""

from functools import partial
from pathlib import Path
from typing import Any

from cribo.apps.studies.table import RESULTS, Measured, Scored, compare_rows, comparisons_note
from cribo.base.errors import FolderError, InputError
from cribo.base.files import path_inside, read_json
from cribo.base.job import flat
from cribo.base.tables import Table, numbers, texts
from cribo.evaluation.intervals import read_counts
from cribo.evaluation.results import NONE


def compare_studies(before: str | Path, after: str | Path) -> list[Table]:
    """Return a table for each score that two studies have in common: their means, and the difference with an interval.

    Only their results are read, so the studies may be of different versions, and their data may be elsewhere.

    Args:
        before: folder of a study.
        after: folder of another study.

    Raises:
        FolderError: a folder contains no results of a study.
        InputError: the studies have no score and row in common, or a score was computed in another way.
    """
    first, second = (_read(Path(folder)) for folder in (before, after))
    names = [Path(folder).name for folder in (before, after)]
    if names[0] == names[1]:
        names = [str(before), str(after)]
    tables = []
    for score, one in first.items():
        other = second.get(score)
        if other is None:
            continue
        _require_same(score, one, other)
        common = [row for row in one.results if row in other.results]
        pairs = {row: compare_rows(other, row, one, row, comparisons=len(common)) for row in common}
        rows = [
            [row, one.text(row), other.text(row), NONE if pair is None else pair.text(one.metric)]
            for row, pair in pairs.items()
        ]
        if rows:
            columns = [*texts("row"), *numbers(*names, "difference")]
            note = comparisons_note([pair for pair in pairs.values() if pair], len(common), one.metric)
            tables.append(Table(columns, [rows], f"{score}, {one.unit.heading}", [note]))
    if not tables:
        raise InputError(
            f"{before} and {after} have no score and row in common: the first has the scores {', '.join(first)}, the "
            f"second {', '.join(second)}"
        )
    return tables


def _require_same(score: str, before: Measured, after: Measured) -> None:
    own, others = (flat({"metric": one.metric, "of": one.varied, **one.settings}) for one in (before, after))
    for key in sorted(own.keys() | others.keys()):
        if own.get(key) != others.get(key):
            raise InputError(
                f"the scores {score} cannot be compared: {key} is {own.get(key)} in the first study, and "
                f"{others.get(key)} in the second"
            )


def _read(folder: Path) -> dict[str, Measured]:
    """Return the results of a study by score."""
    try:
        content = read_json(folder / RESULTS)
        scores = content["scores"] if content["kind"] == "study" else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FolderError(f"{folder} has no results of a study: give a folder such as studies/table5_small") from error
    if scores is None:
        raise FolderError(f"{folder} contains a {content['kind']}, not a study")
    return {name: _measured(folder, score) for name, score in scores.items()}


def _measured(folder: Path, score: dict[str, Any]) -> Measured:
    place = partial(path_inside, folder, source=folder / RESULTS)
    results = {
        row: {
            int(seed): Scored(value, own["folders"][seed], read_counts(place(own["folders"][seed]), score["varied"]))
            for seed, value in own["seeds"].items()
        }
        for row, own in score["rows"].items()
    }
    return Measured(score["metric"], results, score["varied"], score["settings"])
