"""Runs the cells of a study, and collects their scores."""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from cribo.apps.studies.cells import Cell, Planner, RowPlan, make_cells, require_space
from cribo.apps.studies.config import Checkpoint, Column, StudyConfig, dump_study, folder_names, load_study, share_of
from cribo.apps.studies.scores import Score, open_scores
from cribo.apps.studies.steps import StepScore
from cribo.apps.studies.table import Measured, Scored, StudyTable
from cribo.base.console import duration
from cribo.base.errors import InputError, Interrupted, MissingData, MissingPackage, Stopped
from cribo.base.files import write_json, write_text
from cribo.base.job import Job, describe_changes, flat, named_folder
from cribo.base.wording import grouped
from cribo.pretraining.files import SUMMARY
from cribo.pretraining.run import pretrain
from cribo.training.interruption import interrupted_by_signals

log = logging.getLogger("cribo")

STUDY = "study.yaml"
"""File name of the study in its folder."""

OUT = Path("studies")
"""Parent folder of studies."""

_PLAN, _CELLS, _SCORES = "plan.json", "cells", "scores"
_CONTINUE = "to continue the study, repeat the command"


@dataclass(frozen=True)
class StudyResult:
    """The state of a study after a call.

    Attributes:
        folder: folder of the study.
        table: the scores of all finished cells, with comparisons.
        failed: reasons of the cells that failed in this call, by name.
        unfinished: names of the cells that are not yet trained and scored, failed ones included.
        missing: what is missing for the rows and scores that were left out, by name.
    """

    folder: Path
    table: StudyTable
    failed: Mapping[str, str] = field(default_factory=dict)
    unfinished: Sequence[str] = ()
    missing: Mapping[str, str] = field(default_factory=dict)


class Study:
    """A study and its folder.

    Args:
        study: the study.
        folder: its folder, which may exist.
        available: whether rows and scores are left out whose data or weights are missing, instead of an error.

    Raises:
        ValueError: a row, a score or the folder is invalid, or the study has changed since it was started.
    """

    def __init__(self, study: StudyConfig, folder: Path, *, available: bool = False) -> None:
        self.study, self.folder, self.available = study, folder, available
        self.job = Job(folder, "study", resume=True)
        if self.job.resumes:
            self._join()
        self.scores = open_scores(study)
        self.missing: dict[str, str] = {}
        self._score_folders = folder_names(list(study.evaluations))

    @property
    def measurable(self) -> list[Score | StepScore]:
        """The evaluations whose data exist."""
        return [score for score in self.scores if score.missing is None]

    def plan(self) -> dict[str, RowPlan]:
        """Check all rows and scores, and return the length and cost of the cells of each row.

        Some steps are timed. What is missing is no error.

        Raises:
            ValueError: a row cannot be trained or scored.
        """
        return self._planner(timed=True).plan(self.study.names)

    def start(self) -> list[Cell]:
        """Plan the rows that are not planned yet, and return the cells whose data and weights exist.

        Raises:
            MissingData: data or weights of a row or score are missing, and the others were not asked for.
            ValueError: a row cannot be trained or scored, or the disk has too little space.
        """
        planned = self._planned_epochs()
        plans = self._planner().plan(
            [row for row in self.study.names if row not in planned and not self._is_scored(row)]
        )
        self._require_available(plans)
        new = {row: plan.epochs or 1 for row, plan in plans.items() if plan.missing is None and plan.steps is not None}
        if new:
            cells = make_cells(self.study, new)
            require_space(self.folder, sum(plans[cell.rows[0]].disk for cell in cells))
            self._join({**planned, **new})
        weights = [row for row in self.study.checkpoints if f"row '{row}'" not in self.missing]
        if not self.job.resumes:
            self._join({})
        # Parts that start together may time different numbers of epochs: all use those of the first.
        return make_cells(self.study, self._planned_epochs(), weights)

    def _planner(self, *, timed: bool = False) -> Planner:
        return Planner(self.study, self.scores, self._planned_epochs(), timed=timed)

    def _is_scored(self, row: str) -> bool:
        """Whether the weights of a row are evaluated, so that they are no longer needed."""
        if row not in self.study.checkpoints or self.study.checkpoints[row].source is None:
            return False
        [cell] = make_cells(self.study, {}, [row])
        return self.is_finished(cell)

    def _require_available(self, plans: Mapping[str, RowPlan]) -> None:
        """Note what is missing; raise an error unless the rest was asked for."""
        self.missing = named_missing(plans, self.scores)
        published = [f"row '{row}'" for row, weights in self.study.checkpoints.items() if weights.source is None]
        left_out = {name: what for name, what in self.missing.items() if name not in published}
        if not left_out:
            return
        listed = missing_lines(left_out)
        rows = [row for row in self.study.names if f"row '{row}'" not in self.missing]
        if not rows or not self.measurable:
            raise MissingData(f"nothing of this study can be run here:\n{listed}")
        if not self.available:
            raise MissingData(f"to leave out what is missing, add --available:\n{listed}")
        log.warning("left out, because it is missing:\n%s", listed)

    def run_folder(self, cell: Cell) -> Path:
        """Return the run folder of a cell."""
        return self.folder / _CELLS / cell.name

    def score_folder(self, cell: Cell, score: Score | StepScore) -> Path:
        """Return the folder of an evaluation of a cell."""
        return self.folder / _SCORES / self._score_folders[score.name] / cell.name

    def is_finished(self, cell: Cell, *, with_missing: bool = False) -> bool:
        """Whether a cell is trained, and its evaluations are finished, with or without those whose data are missing."""
        trained = isinstance(cell.source, Checkpoint) or not self.study.trains
        return (trained or (self.run_folder(cell) / SUMMARY).is_file()) and all(
            score.is_finished(self.score_folder(cell, score))
            for score in (self.scores if with_missing else self.measurable)
        )

    def run_cell(self, cell: Cell, console: Console) -> None:
        """Train and evaluate a cell, except for what is finished; no-op if another process is training it.

        Raises:
            Exception: errors of `pretrain`, `evaluate` and `profile`.
        """
        with self.job.claim(cell.name) as claimed:
            if not claimed:
                log.info("%s is being trained by another process", cell.name)
                return
            if self.study.trains and not isinstance(cell.source, Checkpoint):
                pretrain(
                    cell.source,
                    out=self.folder / _CELLS,
                    name=cell.name,
                    continue_run=True,
                    advice=_CONTINUE,
                    console=console,
                )
            try:
                self._evaluate(cell, console)
            except Interrupted as error:  # an evaluation that trains has other advice
                raise Interrupted(error.signal, None, _CONTINUE) from error
            except KeyboardInterrupt as error:
                raise KeyboardInterrupt(_CONTINUE) from error

    def table(self, cells: Sequence[Cell]) -> StudyTable:
        """Collect the scores of the finished cells, and write the table."""
        with self.job.alone():
            columns = {column.name: self._measured(column, cells) for column in self.study.columns}
            table = StudyTable(self.study, columns)
            table.write(self.folder)
            if len(self.missing) == self._published_only and all(map(self.is_finished, cells)):
                self.job.finish()
        return table

    @property
    def _published_only(self) -> int:
        """Number of rows whose weights are not public."""
        return sum(weights.source is None for weights in self.study.checkpoints.values())

    def _evaluate(self, cell: Cell, console: Console) -> None:
        """Evaluate a cell by the scores that are missing; scores on the same data share its features."""
        scores = [score for score in self.measurable if not score.is_finished(self.score_folder(cell, score))]
        data = [repr(score.data) for score in self.measurable if isinstance(score, Score)]
        with TemporaryDirectory(prefix=".features-", dir=self.folder) as cache:
            for score in scores:
                folder = self.score_folder(cell, score)
                if isinstance(score, StepScore):
                    assert not isinstance(cell.source, Checkpoint)
                    score.measure(cell.source, folder, console)
                    continue
                weights = cell.source if isinstance(cell.source, Checkpoint) else Checkpoint(str(self.run_folder(cell)))
                shared = cache if len(set(data)) < len(data) else None
                score.measure(str(weights.source), weights.options, folder, cache=shared, console=console)

    def _measured(self, column: Column, cells: Sequence[Cell]) -> Measured:
        score = next(score for score in self.scores if score.name == column.score)
        results: dict[str, dict[int, Scored]] = {row: {} for row in self.study.names}
        varied, settings = None, {}
        for cell in cells:
            folder = self.score_folder(cell, score)
            if not score.is_finished(folder):
                continue
            for row in cell.rows:
                reading = score.read(folder, column, self.study.parts.get(row))
                if reading is not None:
                    varied, settings = reading.varied, reading.settings
                    place = str(folder.relative_to(self.folder))
                    results[row][cell.seed] = Scored(reading.value, place, reading.counts)
        return Measured(column.metric or score.metrics[0], results, varied, settings)

    def _join(self, epochs: Mapping[str, int] | None = None) -> None:
        """Create the folder with the planned epochs, or accept one of the same study."""

        def write(folder: Path) -> None:
            write_json(folder / _PLAN, {"epochs": epochs or {}})
            write_text(folder / STUDY, dump_study(self.study))

        study, seed, weights = self.study, self.study.seeds[0], self.study.checkpoints
        identity = {
            "seeds": study.seeds,
            "budget": asdict(study.budget),
            "scores": study.evaluations,
            "rows": {
                row: asdict(weights[row] if row in weights else study.configuration(row, seed)) for row in study.names
            },
        }
        self.job.join(identity, write, changes=_changes, advice="Restore it, or choose another --name")
        if epochs:
            with self.job.alone():  # rows that were missing when the study was started, or other parts' rows
                write_json(self.folder / _PLAN, {"epochs": {**epochs, **self._planned_epochs()}})

    def _planned_epochs(self) -> dict[str, int]:
        path = self.folder / _PLAN
        return json.loads(path.read_text(encoding="utf-8"))["epochs"] if path.is_file() else {}


def missing_lines(missing: Mapping[str, str]) -> str:
    """Return what is missing, each thing once with the rows and scores that need it, on a line of its own.

    Args:
        missing: what is missing, by row or score.
    """
    needed = grouped((what, name) for name, what in missing.items())
    return "\n".join(f"- {what}\n  needed by {_some(names)}" for what, names in needed.items())


def _some(names: Sequence[str]) -> str:
    """Join names that may contain commas; those beyond the first two are counted."""
    return "; ".join(names[:2]) + (f"; and {len(names) - 2} more" if len(names) > 2 else "")


def named_missing(plans: Mapping[str, RowPlan], scores: Sequence[Score | StepScore]) -> dict[str, str]:
    """Return what is missing for rows and scores, by names that tell them apart."""
    rows = {f"row '{row}'": plan.missing for row, plan in plans.items() if plan.missing is not None}
    return rows | {f"score '{score.name}'": score.missing for score in scores if score.missing is not None}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Describe how a study has changed; if rows were added, removed or renamed, list only their names."""
    names = [{"rows": ", ".join(each["rows"])} for each in (before, now)]
    rows = [*describe_changes(*names)]
    values = ({name: value for name, value in each.items() if not rows or name != "rows"} for each in (before, now))
    yield from (*rows, *describe_changes(*map(flat, values)))


def run_study(
    study: StudyConfig | str | Path,
    *,
    out: str | Path = OUT,
    name: str | None = None,
    part: str | None = None,
    available: bool = False,
    console: Console | None = None,
) -> StudyResult:
    """Train and score the cells of a study, and write its table; the same as `cribo study`.

    Finished cells are kept, interrupted ones are resumed, and those that another process is training are skipped. A
    cell that fails does not stop the others. The table is written after each cell.

    Args:
        study: a study, its file, or the name of one that is part of the package.
        out: parent folder of studies.
        name: name of the study's folder; by default that of the file.
        part: "i/n" for the i-th of n shares of the cells, which can run at the same time.
        available: leave out rows and scores whose data or weights are missing; by default, they are an error.
        console: console for progress; silent by default.

    Raises:
        ValueError: the study is invalid, differs from that of the folder, or the disk has too little space.
        FileNotFoundError: data or weights of a row or score do not exist.
        Interrupted: SIGTERM or SIGUSR1 was received; repeat the call to continue. (Ctrl-C raises KeyboardInterrupt.)
    """
    console = console or Console(quiet=True)
    select = share_of(part or "1/1")
    name = name or ("study" if isinstance(study, StudyConfig) else Path(study).stem)
    run = Study(
        study if isinstance(study, StudyConfig) else load_study(study), named_folder(out, name), available=available
    )
    cells = run.start()
    own = cells[select]
    failed: dict[str, str] = {}
    open_cells = [cell for cell in own if not run.is_finished(cell)]
    begun = time.monotonic()
    with interrupted_by_signals(_CONTINUE):
        for done, cell in enumerate(open_cells):
            left = len(open_cells) - done
            seed = "" if isinstance(cell.source, Checkpoint) else f", seed {cell.seed}"
            text = f"{len(own) - left + 1}/{len(own)} {', '.join(cell.rows)}{seed}"
            if done:
                text += f"; ETA of all cells {duration((time.monotonic() - begun) / done * left)}"
            console.print(text, markup=False)
            try:
                run.run_cell(cell, console)
            except Interrupted:
                raise
            except (InputError, MissingPackage, OSError, Stopped) as error:
                failed[cell.name] = str(error)
                log.warning("%s failed: %s", cell.name, error)
            except Exception as error:
                failed[cell.name] = f"{type(error).__name__}: {error}"
                log.exception("%s failed", cell.name)
            else:
                run.table(cells)
    unfinished = [cell.name for cell in cells if not run.is_finished(cell)]
    return StudyResult(run.folder, run.table(cells), failed, unfinished, run.missing)
