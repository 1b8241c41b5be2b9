"""The evaluations of a study, from their options in its file."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from rich.console import Console

from cribo.base.arguments import Parser
from cribo.base.devices import resolve_devices
from cribo.base.errors import ConfigError, InputError
from cribo.evaluation.config import TrainingRuntime
from cribo.evaluation.data import Splits
from cribo.evaluation.protocol import Protocol, find_protocol
from cribo.evaluation.run import Run
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
        data: instance of the protocol's `data_type`.
        splits: the opened data.
        runtime: instance of the protocol's `runtime_type`, with one device.
        backbone: options of the backbone; its source is replaced by a run folder.
    """

    name: str
    protocol: Protocol
    data: Any
    splits: Splits
    runtime: Any
    backbone: BackboneSource


def open_scores(options: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """Create the evaluations from their options, and open their data.

    Raises:
        ConfigError: a protocol or option does not exist, a value is out of range, or data are missing; the message
            names the score.
    """
    return [_open(name, dict(given)) for name, given in options.items()]


def check_score(score: Score, backbone: Backbone) -> None:
    """Raise an error if a network does not support an evaluation.

    Raises:
        ConfigError: as above; the message names the score.
    """
    run = Run(score.backbone, score.splits, score.runtime, backbone, {}, Console(quiet=True), num_pictures=0)
    try:
        score.protocol.prepare(run)
    except InputError as error:
        raise ConfigError(f"scores.{score.name}: {error}") from error


def _open(name: str, given: dict[str, Any]) -> Score:
    try:
        kind = find_protocol(given.pop(_EVALUATION, name))
        first = fields(kind.data_type)[0].name
        parser = Parser(short={"--data": f"--data.{first}", **kind.aliases})
        for part, options in {"data": kind.data_type, "runtime": kind.runtime_type, None: kind}.items():
            parser.add_class_arguments(options, part)
        parser.add_class_arguments(BackboneSource, "backbone")
        defaults = {f"runtime.{option}": value for option, value in kind.runtime_defaults.items()}
        parser.set_defaults({"backbone.source": _CELL, **defaults})
        made = parser.instantiate(parser.parse_args(list(_words(given))))
        protocol = kind(**{part.name: made[part.name] for part in fields(kind)})
        backbone, runtime = made.backbone, made.runtime
        if backbone.source != _CELL:
            raise ConfigError(f"backbone.source is the trained network of each cell, got {backbone.source}: remove it")
        protocol.check_packages()
        protocol.check_backbone(backbone)
        runtime = _on_one_device(runtime)
        return Score(name, protocol, made.data, made.data.open(), runtime, backbone)
    except InputError as error:
        raise ConfigError(f"scores.{name}: {error}") from error


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
