"""Runner of benchmarks."""

import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cribo.base.errors import InputError, MissingPackage, if_interrupted
from cribo.base.job import Job
from cribo.evaluation.benchmark.card import BACKBONE, MEAN, UNTRAINED, Card, CardRow
from cribo.evaluation.benchmark.config import BenchmarkConfig
from cribo.evaluation.benchmark.plan import PlannedRow, make_plan
from cribo.evaluation.protocol import Protocol
from cribo.evaluation.results import OUT, RESULTS, EvaluationResult, read_result
from cribo.evaluation.runner import evaluate_run, identity, is_result_of, open_run
from cribo.evaluation.training import is_evaluation_of
from cribo.features.config import MEAN_COLOUR, BackboneSource
from cribo.features.encoder import mean_colour_backbone, open_network
from cribo.features.reading import completed_for
from cribo.models import Backbone

log = logging.getLogger("cribo")


@dataclass(frozen=True)
class _Subject:
    """A backbone or baseline, with its patch size and its fixed input size (None for any size)."""

    source: BackboneSource
    patch_size: int
    image_size: int | None


CARDS = Path("cards")
"""Parent folder of cards without --out."""


def benchmark(
    config: BenchmarkConfig,
    *,
    out: Path | None = None,
    rows: Path = OUT,
    overwrite: bool = False,
    command: str = "",
    console: Console | None = None,
) -> tuple[Card, Path]:
    """Evaluate a backbone and its baselines with all protocols on all data sets, and write a card.

    Each row is an evaluation with its own folder, as written by `evaluate`. Finished evaluations of the same backbone,
    data and settings are reused, and interrupted trainings are resumed. A row that fails does not stop the others; the
    card lists the reason.

    Args:
        config: backbone, data sets and protocols.
        out: folder of the card; by default a numbered folder `cards/<backbone>`.
        rows: parent folder of the evaluations.
        overwrite: replace an existing card in `out`.
        command: command line that reproduces the benchmark, stored in the result.
        console: console for the plan and progress bars.

    Returns:
        The card and its folder.

    Raises:
        DataError: the folder has no known data set, or lacks one of `data.sets`.
        ConfigError: a protocol does not exist, or does not support the backbone.
        FolderError: the folder of the card cannot be created.
        InputError: all rows failed.
        Interrupted: SIGTERM or SIGUSR1 was received; repeat the call to resume. (Ctrl-C raises KeyboardInterrupt.)
        NonFiniteLoss: training has diverged.
    """
    console = console or Console(quiet=True)
    config = replace(config, reading=completed_for(config.backbone, config.reading))  # also for the baselines
    plan = make_plan(config)
    network, about = open_network(config.backbone, in_chans=config.reading.in_chans)
    subjects = _subjects(config.backbone, network)
    del network
    target = Job(
        out or CARDS / about["name"],
        "card",
        numbered=out is None,
        overwrite=overwrite,
        inputs=(config.backbone.source, config.data.root, rows),
    )
    console.print(plan.table())
    measured = []
    for number, row in enumerate(plan.rows, start=1):
        console.print(f"{number}/{len(plan.rows)} {row.protocol.name} on {row.set}")
        with if_interrupted(lambda: f"finished evaluations are in {rows}; to continue, repeat the command"):
            measured.append(_measure_row(row, subjects, config, rows, command, console))
    card = Card(about, measured, plan.left_out, config.quick, command)
    if not card.measured:
        reasons = "; ".join(f"{row.name}: {row.reasons[BACKBONE]}" for row in card.rows)
        raise InputError(f"all evaluations failed: {reasons}")
    return card, target.create(card.write)


def _measure_row(
    row: PlannedRow,
    subjects: Mapping[str, _Subject],
    config: BenchmarkConfig,
    parent: Path,
    command: str,
    console: Console,
) -> CardRow:
    """Evaluate the backbone and its baselines; failed baselines are recorded in the row."""
    done = CardRow(row.protocol.name, row.set, row.protocol.quick_limit)
    for role, subject in subjects.items():
        try:
            done.results[role], done.folders[role] = _evaluation(row, subject, config, parent, command, console)
        except (InputError, MissingPackage) as error:
            done.reasons[role] = str(error)
            if role == BACKBONE:
                log.warning("%s: %s", row.name, error)
                break
    return done


def _subjects(source: BackboneSource, network: Backbone) -> dict[str, _Subject]:
    """Return the backbone and its baselines: the untrained network, and the mean colour of patches."""
    found = _Subject(source, network.patch_size, network.fixed_size)
    subjects = {BACKBONE: found}
    if source.source != MEAN_COLOUR:
        if source.pretrained:
            subjects[UNTRAINED] = replace(found, source=replace(source, pretrained=False))
        subjects[MEAN] = _Subject(BackboneSource(MEAN_COLOUR), mean_colour_backbone().patch_size, None)
    return subjects


def _evaluation(
    row: PlannedRow, subject: _Subject, config: BenchmarkConfig, parent: Path, command: str, console: Console
) -> tuple[EvaluationResult, Path]:
    """Return the existing evaluation of this row, or run it."""
    runtime = _runtime(row.protocol, config)
    settings = _settings(row.protocol, subject, config)
    how = {"pictures": config.pictures, "reading": config.reading}
    run, protocol = open_run(settings, subject.source, row.data, runtime, **how, console=console)
    for folder in _numbered(parent / f"{row.name}-{run.about['name']}"):
        if (folder / RESULTS).is_file() and is_result_of(found := read_result(folder), run, protocol):
            log.info("%s: reusing existing results", folder)
            return found, folder
        resume = protocol.trains() and is_evaluation_of(folder, identity(run, protocol))
        if resume or not folder.exists():
            return evaluate_run(run, protocol, out=folder, resume=resume, command=command)
    raise AssertionError("unreachable")


def _numbered(path: Path) -> Iterator[Path]:
    return (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in itertools.count(1))


def _settings(protocol: type[Protocol], subject: _Subject, config: BenchmarkConfig) -> Protocol:
    if config.quick:
        return protocol.quick(subject.patch_size, subject.image_size)
    has_schedule = any(setting.name == "schedule" for setting in fields(protocol))
    return protocol(**({"schedule": config.schedule} if has_schedule else {}))


def _runtime(protocol: type[Protocol], config: BenchmarkConfig) -> Any:
    """Return the runtime of a protocol, with the protocol's defaults for unchanged options."""
    given = config.training if protocol.trains() else config.runtime
    if not isinstance(given, protocol.runtime_type):
        return None
    unchanged = {part.name for part in fields(given) if getattr(given, part.name) == part.default}
    return replace(given, **{name: value for name, value in protocol.runtime_defaults.items() if name in unchanged})
