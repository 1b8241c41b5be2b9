"""`cribo evaluate`: evaluate a backbone on labelled images, with the options of a protocol."""

import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from cribo.base.arguments import Parser
from cribo.base.console import importing
from cribo.base.errors import ConfigError
from cribo.base.machine import is_first_process
from cribo.cli.command import Call, Command
from cribo.cli.running import BACKBONE_SHORT, dispatch, print_places, run_command
from cribo.data.config import READING_SHORT, Reading
from cribo.evaluation.protocol import PROTOCOLS
from cribo.features.config import BackboneSource
from cribo.training.loggers import TENSORBOARD

USAGE = """\
usage: cribo evaluate <evaluation> [options]

evaluations:
  dense-nn        dense nearest-neighbour retrieval: label patches by their nearest labelled patches
  linear          linear segmentation: train one linear layer on the frozen features
  segmenter       finetuning with Segmenter: train the backbone and a mask transformer end to end
  detection       object detection with YOLOS: train a detector initialised with the backbone's weights
  image-nn        image-level nearest neighbours: classify images by their nearest training images
  overclustering  unsupervised segmentation: cluster patches, and match the clusters with classes
  discovery       object discovery: find an object in each image by LOST and TokenCut
  correspondence  semantic correspondence: find the keypoints of one image in another
  depth           depth estimation: by the most similar patches of other images, and by a linear probe
  video           video label propagation: follow the objects of the first frame through a video
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
    from cribo.evaluation.protocol import find_protocol

    try:
        protocol = find_protocol(name)
    except ConfigError as error:
        print(f"cribo evaluate: {error}", file=sys.stderr)
        return 2
    return run_command(f"evaluate {name}", evaluation_command(name, protocol), words)


def evaluation_command(name: str, protocol: type[Any]) -> Command:
    """Return the command that evaluates by a protocol.

    Args:
        name: name on the command line.
        protocol: class of the protocol.
    """
    parts = _parts(protocol)
    options = {
        (f"{part}." if part else "") + field.name: field for part, kind in parts.items() for field in fields(kind)
    }
    first = fields(protocol.data_type)[0].name
    return Command(
        help=protocol.description,
        usage=f"cribo evaluate {name} --backbone SOURCE --data DIR [options]",
        less_memory=protocol.less_memory,
        add_options=partial(_add_options, name, protocol),
        run=partial(_run, name, protocol),
        short={
            **BACKBONE_SHORT,
            **READING_SHORT,
            "--data": f"--data.{first}",
            **{f"--{option.split('.')[1]}": f"--{option}" for option in _SHORT if option in options},
            **protocol.aliases,
        },
    )


def _parts(protocol: type[Any]) -> dict[str, type[Any]]:
    """Return the types of the groups of options."""
    return {"backbone": BackboneSource, "data": protocol.data_type, "runtime": protocol.runtime_type, "": protocol}


def _add_options(name: str, protocol: type[Any], parser: Parser) -> None:
    parser.add_argument(
        "--out", type=Path, help=f"folder for results and pictures; by default evaluations/{name}-..., numbered"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing evaluation in --out")
    parser.add_argument("--pictures", type=int, default=6, help=f"number of {protocol.pictures}")
    parser.add_class_arguments(Reading, "reading")
    if protocol.trains():
        advice = (
            "continue the evaluation in --out, or without --out the last one of its name; start it if there is none. "
            "For job schedulers"
        )
        parser.add_argument("--resume", action="store_true", help=advice)
    for part, kind in _parts(protocol).items():
        parser.add_class_arguments(kind, part or None)
    parser.set_defaults({f"runtime.{option}": value for option, value in protocol.runtime_defaults.items()})


def _run(name: str, protocol: type[Any], call: Call) -> None:
    if not protocol.variants() and any(word.partition("=")[0] == "--variant" for word in call.words):
        raise ConfigError(f"{name} has no variants: omit --variant")
    made = call.parser.instantiate(call.options)
    settings = protocol(**{field.name: made[field.name] for field in fields(protocol)})
    settings.check_packages()
    settings.check_backbone(made.backbone)
    how = {option: call.options[option] for option in _RUN_OPTIONS if option in call.options}
    with importing(call.console):
        from cribo.evaluation.results import result_tables
        from cribo.evaluation.runner import evaluate
    result, folder = evaluate(
        settings,
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
    for part in (*result_tables(result), *settings.report(result)):
        call.console.print(part)
    places = {"numbers": folder / "results.json", "pictures": folder / "*.png", **settings.places(folder)}
    if TENSORBOARD not in getattr(made.runtime, "logger", ()):
        places.pop("curves", None)
    print_places(call.console, places)
