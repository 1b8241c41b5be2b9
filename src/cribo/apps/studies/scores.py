"""The evaluations of a study, from their options in its file."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cribo.apps.studies.config import STEP, Column, StudyConfig
from cribo.apps.studies.metrics import Reading
from cribo.apps.studies.steps import StepScore, open_steps, require_part
from cribo.base.arguments import Parser
from cribo.base.devices import resolve_devices
from cribo.base.errors import ConfigError, InputError, MissingData
from cribo.evaluation.config import EvaluationRuntime, TrainingRuntime
from cribo.evaluation.data import PLACES, Splits
from cribo.evaluation.intervals import read_counts
from cribo.evaluation.protocol import Protocol, find_protocol
from cribo.evaluation.results import RESULTS, read_result
from cribo.evaluation.run import Run
from cribo.evaluation.runner import evaluate
from cribo.features.config import BackboneSource
from cribo.models import Backbone

_EVALUATION = "evaluation"
_CELL = "cell"  # stands for the source of a backbone until it is trained


@dataclass(frozen=True)
class Score:
    """An evaluation of every cell of a study.

    Attributes:
        name: name in the study.
        protocol: the protocol with its settings.
        data: instance of the protocol's `data_type`; None if they are missing.
        splits: the opened data; None if they are missing.
        runtime: instance of the protocol's `runtime_type`, with one device.
        backbone: options of the backbone; its source is replaced by a run folder or weights.
        missing: why the data are missing; None if they exist.
    """

    name: str
    protocol: Protocol
    data: Any
    splits: Splits | None
    runtime: Any
    backbone: BackboneSource
    missing: str | None = None

    @property
    def metrics(self) -> Sequence[str]:
        """Metrics of the evaluation, the headline first."""
        return self.protocol.metrics

    def check(self, backbone: Backbone, source: str, options: Mapping[str, Any]) -> None:
        """Raise an error if a network does not support the evaluation.

        Args:
            backbone: the network.
            source: its weights, which finetuning loads again with other settings.
            options: further options of the backbone.

        Raises:
            ConfigError: as above; the message names the score.
        """
        if self.splits is None:
            return
        own = replace(self.backbone, source=source, **options)
        run = Run(own, self.splits, self.runtime, backbone, {}, Console(quiet=True), num_pictures=0)
        try:
            self.protocol.prepare(run)
        except InputError as error:
            raise ConfigError(f"scores.{self.name}: {error}") from error

    def is_finished(self, folder: Path) -> bool:
        """Whether a folder contains the finished evaluation of a cell."""
        return (folder / RESULTS).is_file()

    def measure(
        self, source: str, options: Mapping[str, Any], folder: Path, *, cache: str | None, console: Console
    ) -> None:
        """Evaluate a network, and write the result to a folder.

        Args:
            source: a run folder, or weights as for `cribo evaluate --backbone`.
            options: further options of the backbone.
            folder: the folder.
            cache: folder of features that are shared with other evaluations; None for none.
            console: console for progress.
        """
        runtime = self.runtime
        if isinstance(runtime, EvaluationRuntime):
            runtime = replace(runtime, cache=cache or "none")
        evaluate(
            self.protocol,
            replace(self.backbone, source=source, **options),
            self.data,
            runtime,
            out=folder,
            resume=self.protocol.trains(),
            pictures=0,
            console=console,
        )

    def read(self, folder: Path, column: Column, part: str | None) -> Reading | None:
        """Read a column from the folder of a finished evaluation; None if the metric has no value.

        Args:
            folder: the folder.
            column: the column.
            part: not used: networks have no parts.

        Raises:
            ConfigError: the evaluation has no such value of the varied setting.
        """
        result = read_result(folder)
        points = result.points
        varied = next(iter(points)) if column.at is None else column.at
        if varied not in points:
            raise ConfigError(
                f"scores.{column.name}.at must be one of {', '.join(map(str, points))}, the values of {result.varies}, "
                f"got {varied}"
            )
        value = points[varied][column.metric or self.metrics[0]]
        data = {key: own for key, own in result.data.items() if key not in PLACES}
        if value is None:
            return None
        return Reading(value, {**result.settings, "data": data}, varied, read_counts(folder, varied))


def open_scores(study: StudyConfig) -> list[Score | StepScore]:
    """Create the evaluations of a study from their options, and open their data.

    Raises:
        ConfigError: a protocol, option, metric or part does not exist, or a value is out of range; the message names
            the score.
    """
    scores = {name: _open(name, dict(given)) for name, given in study.evaluations.items()}
    for part in (*study.parts.values(), *(column.part for column in study.columns if column.part is not None)):
        require_part(part)
    for column in study.columns:
        score = scores[column.score]
        if column.metric is not None and column.metric not in score.metrics:
            raise ConfigError(
                f"scores.{column.name}.metric must be one of {', '.join(score.metrics)}, got {column.metric}"
            )
        if column.part is not None and not isinstance(score, StepScore):
            raise ConfigError(f"scores.{column.name}.part is for the evaluation {STEP}: remove it")
    return list(scores.values())


def _open(name: str, given: dict[str, Any]) -> Score | StepScore:
    try:
        evaluation = given.pop(_EVALUATION, name)
        return open_steps(name, given) if evaluation == STEP else _open_protocol(name, evaluation, given)
    except InputError as error:
        raise ConfigError(f"scores.{name}: {error}") from error


def _open_protocol(name: str, evaluation: str, given: dict[str, Any]) -> Score:
    kind = find_protocol(evaluation)
    words = list(_words(given))
    missing, data, splits = None, None, None
    try:
        made = _made(kind, words)
        data = made.data
    except MissingData as error:  # a folder is looked up when the data are created
        missing = str(error)
        of_data = ("--data", *(short for short, option in kind.aliases.items() if option.startswith("--data.")))
        made = _made(kind, [word for word in words if not word.partition("=")[0].startswith(of_data)], data=False)
    if data is not None:
        try:
            splits = data.open()
        except MissingData as error:
            missing = str(error)
    protocol = kind(**{part.name: made[part.name] for part in fields(kind)})
    backbone, runtime = made.backbone, made.runtime
    if backbone.source != _CELL:
        raise ConfigError(f"backbone.source is the network of each cell, got {backbone.source}: remove it")
    protocol.check_packages()
    protocol.check_backbone(backbone)
    return Score(name, protocol, data, splits, _on_one_device(runtime), backbone, missing)


def _made(kind: type[Protocol], words: Sequence[str], *, data: bool = True) -> Any:
    """Create settings, runtime and backbone of a protocol from options, and its data unless they are left out."""
    first = fields(kind.data_type)[0].name
    short = {"--data": f"--data.{first}", **kind.aliases} if data else {}
    parser = Parser(short=short)
    parts = {"data": kind.data_type} if data else {}
    for part, options in {**parts, "runtime": kind.runtime_type, None: kind, "backbone": BackboneSource}.items():
        parser.add_class_arguments(options, part)
    defaults = {f"runtime.{option}": value for option, value in kind.runtime_defaults.items()}
    parser.set_defaults({"backbone.source": _CELL, **defaults})
    return parser.instantiate(parser.parse_args(list(words)))


def _on_one_device(runtime: Any) -> Any:
    """Restrict a runtime to one device, because the parts of a study may share a machine."""
    if isinstance(runtime, TrainingRuntime):
        given = [device for device in (runtime.devices, runtime.num_nodes) if str(device) not in ("auto", "1")]
        single = replace(runtime, devices=1)
    else:
        given = [] if runtime.devices is None or len(runtime.devices) == 1 else [",".join(runtime.devices)]
        single = replace(runtime, devices=resolve_devices(runtime.devices)[:1])
    if given:
        raise ConfigError(f"a cell is scored on one device, got {given[0]}: remove runtime.devices and num_nodes")
    return single


def _words(options: Mapping[str, Any], prefix: str = "--") -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _words(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={value if isinstance(value, str) else json.dumps(value)}"
