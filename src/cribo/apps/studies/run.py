"""Runs the cells of a study, and collects their scores."""

import dataclasses
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from cribo.apps.studies.cells import Cell, RowPlan, make_cells, plan_rows, require_space
from cribo.apps.studies.config import StudyConfig, dump_study, folder_names, load_study, share_of
from cribo.apps.studies.scores import Score, open_scores
from cribo.apps.studies.table import Measured, Scored, StudyTable
from cribo.base.console import duration
from cribo.base.errors import InputError, Interrupted, MissingPackage, Stopped
from cribo.base.files import write_json, write_text
from cribo.base.job import Job, describe_changes, flat, named_folder
from cribo.evaluation.config import EvaluationRuntime
from cribo.evaluation.data import PLACES
from cribo.evaluation.intervals import read_counts
from cribo.evaluation.results import RESULTS, read_result
from cribo.evaluation.runner import evaluate
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
    """

    folder: Path
    table: StudyTable
    failed: Mapping[str, str] = field(default_factory=dict)
    unfinished: Sequence[str] = ()


class Study:
    """A study and its folder.

    Args:
        study: the study.
        folder: its folder, which may exist.

    Raises:
        ValueError: a row, a score or the folder is invalid, or the study has changed since it was started.
    """

    def __init__(self, study: StudyConfig, folder: Path) -> None:
        self.study, self.folder = study, folder
        self.job = Job(folder, "study", resume=True)
        if self.job.resumes:
            self._join()
        self.scores = open_scores(study.scores)
        self._score_folders = folder_names(list(study.scores))

    def plan(self, *, timed: bool = False) -> dict[str, RowPlan]:
        """Check all rows and scores, and return the length and cost of the trainings of each row.

        Args:
            timed: whether to time some steps of each row for an estimate.

        Raises:
            ValueError: a row cannot be trained or scored.
        """
        return plan_rows(self.study, self.scores, self._planned_epochs(), timed=timed)

    def start(self) -> list[Cell]:
        """Plan and record the study unless that is done, and return all cells.

        Raises:
            ValueError: a row cannot be trained or scored, or the disk has too little space.
        """
        if not self.job.resumes:
            plans = self.plan()
            epochs = {row: plan.epochs for row, plan in plans.items()}
            require_space(self.folder, sum(plans[cell.rows[0]].disk for cell in make_cells(self.study, epochs)))
            self._join(epochs)
        # Parts that start together may time different numbers of epochs: all use those of the first.
        return make_cells(self.study, self._planned_epochs())

    def run_folder(self, cell: Cell) -> Path:
        """Return the run folder of a cell."""
        return self.folder / _CELLS / cell.name

    def score_folder(self, cell: Cell, score: Score) -> Path:
        """Return the folder of an evaluation of a cell."""
        return self.folder / _SCORES / self._score_folders[score.name] / cell.name

    def is_finished(self, cell: Cell) -> bool:
        """Whether a cell is trained, and all its evaluations are finished."""
        results = [self.score_folder(cell, score) / RESULTS for score in self.scores]
        return all(path.is_file() for path in (self.run_folder(cell) / SUMMARY, *results))

    def run_cell(self, cell: Cell, console: Console) -> None:
        """Train and evaluate a cell, except for what is finished; no-op if another process is training it.

        Raises:
            Exception: errors of `pretrain` and `evaluate`.
        """
        with self.job.claim(cell.name) as claimed:
            if not claimed:
                log.info("%s is being trained by another process", cell.name)
                return
            run = pretrain(
                cell.config,
                out=self.folder / _CELLS,
                name=cell.name,
                continue_run=True,
                advice=_CONTINUE,
                console=console,
            )
            try:
                self._evaluate(cell, run.folder, console)
            except Interrupted as error:  # an evaluation that trains has other advice
                raise Interrupted(error.signal, None, _CONTINUE) from error
            except KeyboardInterrupt as error:
                raise KeyboardInterrupt(_CONTINUE) from error

    def table(self, cells: Sequence[Cell]) -> StudyTable:
        """Collect the scores of the finished cells, and write the table."""
        with self.job.alone():
            table = StudyTable(self.study, {score.name: self._measured(score, cells) for score in self.scores})
            table.write(self.folder)
            if all(map(self.is_finished, cells)):
                self.job.finish()
        return table

    def _evaluate(self, cell: Cell, run: Path, console: Console) -> None:
        """Evaluate a trained cell by the scores that are missing; scores on the same data share its features."""
        shares = len({repr(score.data) for score in self.scores}) < len(self.scores)
        with TemporaryDirectory(prefix=".features-", dir=self.folder) as cache:
            for score in self.scores:
                folder, runtime = self.score_folder(cell, score), score.runtime
                if (folder / RESULTS).is_file():
                    continue
                if isinstance(runtime, EvaluationRuntime):
                    runtime = dataclasses.replace(runtime, cache=cache if shares else "none")
                evaluate(
                    score.protocol,
                    dataclasses.replace(score.backbone, source=str(run)),
                    score.data,
                    runtime,
                    out=folder,
                    resume=score.protocol.trains(),
                    pictures=0,
                    console=console,
                )

    def _measured(self, score: Score, cells: Sequence[Cell]) -> Measured:
        results: dict[str, dict[int, Scored]] = {row: {} for row in self.study.changes_of_rows}
        metric, value, settings = score.protocol.metrics[0], None, {}
        for cell in cells:
            folder = self.score_folder(cell, score)
            if not (folder / RESULTS).is_file():
                continue
            result = read_result(folder)
            value, point = next(iter(result.points.items()))
            if point[metric] is None:
                continue
            settings = {**result.settings, "data": {key: own for key, own in result.data.items() if key not in PLACES}}
            scored = Scored(point[metric], str(folder.relative_to(self.folder)), read_counts(folder, value))
            for row in cell.rows:
                results[row][cell.seed] = scored
        return Measured(metric, results, value, settings)

    def _join(self, epochs: Mapping[str, int] | None = None) -> None:
        """Create the folder with the planned epochs, or accept one of the same study."""

        def write(folder: Path) -> None:
            write_json(folder / _PLAN, {"epochs": epochs})
            write_text(folder / STUDY, dump_study(self.study))

        study, seed = self.study, self.study.seeds[0]
        identity = {
            "seeds": study.seeds,
            "budget": asdict(study.budget),
            "scores": study.scores,
            "rows": {row: asdict(study.configuration(row, seed)) for row in study.changes_of_rows},
        }
        self.job.join(identity, write, changes=_changes, advice="Restore it, or choose another --name")

    def _planned_epochs(self) -> dict[str, int]:
        path = self.folder / _PLAN
        return json.loads(path.read_text(encoding="utf-8"))["epochs"] if path.is_file() else {}


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
        console: console for progress; silent by default.

    Raises:
        ValueError: the study is invalid, differs from that of the folder, or the disk has too little space.
        FileNotFoundError: a file of a row or score does not exist.
        Interrupted: SIGTERM or SIGUSR1 was received; repeat the call to continue. (Ctrl-C raises KeyboardInterrupt.)
    """
    console = console or Console(quiet=True)
    select = share_of(part or "1/1")
    name = name or ("study" if isinstance(study, StudyConfig) else Path(study).stem)
    run = Study(study if isinstance(study, StudyConfig) else load_study(study), named_folder(out, name))
    cells = run.start()
    own = cells[select]
    failed: dict[str, str] = {}
    open_cells = [cell for cell in own if not run.is_finished(cell)]
    begun = time.monotonic()
    with interrupted_by_signals(_CONTINUE):
        for done, cell in enumerate(open_cells):
            left = len(open_cells) - done
            text = f"{len(own) - left + 1}/{len(own)} {', '.join(cell.rows)}, seed {cell.seed}"
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
    return StudyResult(run.folder, run.table(cells), failed, [cell.name for cell in cells if not run.is_finished(cell)])
