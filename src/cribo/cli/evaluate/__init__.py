"""`cribo evaluate`: evaluate a backbone on labelled images, with the options of a protocol."""

import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from cribo.base.arguments import Parser
from cribo.base.console import importing_networks
from cribo.base.errors import ConfigError
from cribo.base.machine import is_first_process
from cribo.cli.command import Call, Command
from cribo.cli.running import BACKBONE_SHORT, dispatch, print_places, run_command
from cribo.data.config import READING_SHORT, Reading
from cribo.evaluation.config import PROTOCOLS, Settings
from cribo.features.config import BackboneSource
from cribo.training.loggers import TENSORBOARD

_SUMMARIES = "\n".join(f"  {name:15} {row.summary}" for name, row in PROTOCOLS.items())

USAGE = f"""\
usage: cribo evaluate <evaluation> [options]

evaluations:
{_SUMMARIES}
  compare         compare results, also with published ones if the settings are the same

An evaluation may also be the import path of a custom protocol (docs/extending.md).
`cribo evaluate <evaluation> --help` lists its options.
"""

EVALUATIONS = (*PROTOCOLS, "compare")

_RUN_OPTIONS = ("out", "overwrite", "resume", "pictures")
_SHORT = ("data.limit", "runtime.cache", "runtime.devices", "runtime.accelerator", "runtime.logger")


def main(words: list[str]) -> int:
    """Run an evaluation."""
    if words and "." in words[0]:
        return _evaluate(words[0], words[1:])
    commands = {name: partial(_evaluate, name) for name in EVALUATIONS}
    return dispatch(words, "cribo evaluate", "evaluation", USAGE, commands)


def _evaluate(name: str, words: list[str]) -> int:
    if name == "compare":
        from cribo.cli.evaluate import compare

        return run_command("evaluate compare", compare.COMMAND, words)
    from cribo.evaluation.protocol import find_settings

    try:
        kind = find_settings(name)
    except ConfigError as error:
        print(f"cribo evaluate: {error}", file=sys.stderr)
        return 2
    return run_command(f"evaluate {name}", evaluation_command(name, kind), words)


def evaluation_command(name: str, settings: type[Settings]) -> Command:
    """Return the command that evaluates by a protocol.

    Args:
        name: name on the command line.
        settings: class of the protocol's settings.
    """
    parts = _parts(settings)
    options = {
        (f"{part}." if part else "") + field.name: field for part, kind in parts.items() for field in fields(kind)
    }
    first = fields(settings.data_type)[0].name
    return Command(
        help=settings.description,
        usage=f"cribo evaluate {name} --backbone SOURCE --data DIR [options]",
        less_memory=settings.less_memory,
        add_options=partial(_add_options, name, settings),
        run=partial(_run, name, settings),
        short={
            **BACKBONE_SHORT,
            **READING_SHORT,
            "--data": f"--data.{first}",
            **{f"--{option.split('.')[1]}": f"--{option}" for option in _SHORT if option in options},
            **settings.aliases,
        },
        complete=partial(_without_variant, name, settings),
    )


def _parts(settings: type[Settings]) -> dict[str, type[Any]]:
    """Return the types of the groups of options."""
    return {"backbone": BackboneSource, "data": settings.data_type, "runtime": settings.runtime_type, "": settings}


def _add_options(name: str, settings: type[Settings], parser: Parser) -> None:
    parser.add_argument(
        "--out", type=Path, help=f"folder for results and pictures; by default evaluations/{name}-..., numbered"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing evaluation in --out")
    parser.add_argument("--pictures", type=int, default=6, help=f"number of {settings.pictures}")
    parser.add_class_arguments(Reading, "reading")
    if settings.trains():
        advice = (
            "continue the evaluation in --out, or without --out the last one of its name; start it if there is none. "
            "For job schedulers"
        )
        parser.add_argument("--resume", action="store_true", help=advice)
    for part, kind in _parts(settings).items():
        parser.add_class_arguments(kind, part or None)
    parser.set_defaults({f"runtime.{option}": value for option, value in settings.runtime_defaults.items()})


def _without_variant(name: str, kind: type[Settings], words: Sequence[str]) -> Sequence[str]:
    """Refuse --variant for a protocol without variants, for which the parser would suggest another option."""
    if not kind.variants() and any(word.partition("=")[0] == "--variant" for word in words):
        raise ConfigError(f"{name} has no variants: omit --variant")
    return words


def _run(name: str, kind: type[Settings], call: Call) -> None:
    made = call.parser.instantiate(call.options)
    values = {field.name: made[field.name] for field in fields(kind)}
    settings = kind(**values)
    settings.check_packages()
    settings.check_backbone(made.backbone)
    how = {option: call.options[option] for option in _RUN_OPTIONS if option in call.options}
    with importing_networks(call.console):
        from cribo.evaluation.protocol import find_protocol
        from cribo.evaluation.results import result_tables
        from cribo.evaluation.runner import evaluate

        protocol = find_protocol(name)(**values)
    result, folder = evaluate(
        protocol,
        made.backbone,
        made.data,
        made.runtime,
        **how,
        reading=made.reading,
        command=call.line,
        console=call.console,
    )
    if not is_first_process():
        return
    for part in (*result_tables(result), *protocol.report(result)):
        call.console.print(part)
    places = {"numbers": folder / "results.json", "pictures": folder / "*.png", **protocol.places(folder)}
    if TENSORBOARD not in getattr(made.runtime, "logger", ()):
        places.pop("curves", None)
    print_places(call.console, places)
