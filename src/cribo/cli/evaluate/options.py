"""The options that the commands of evaluations have in common."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from cribo.arguments import Parser

_OF_THE_RUN = ("out", "overwrite", "resume", "pictures")


def evaluation_parser(
    name: str,
    description: str,
    *,
    data: str = "NAME --data.root DIR",
    drawn: str = "the prediction is drawn",
    short: Mapping[str, str],
    switches: Collection[str],
) -> Parser:
    """A parser of an evaluation's own options, to which those of its configuration are added by `configuration`.

    Args:
        name: of the evaluation, as the command line has it.
        description: for the help.
        data: what follows `--data` in the usage.
        drawn: of how many images --pictures says what.
        short: options that may be said in fewer words.
        switches: options of two values that stand for `true` when they are given without one.
    """
    parser = Parser(
        prog=f"cribo evaluate {name}",
        description=description,
        usage=f"cribo evaluate {name} --backbone SOURCE --data {data} [options]",
        short=short,
        switches=switches,
    )
    parser.add_argument(
        "--out", type=Path, help=f"folder for results and pictures; evaluations/{name}-..., numbered, by default"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an evaluation that stands in --out")
    parser.add_argument("--pictures", type=int, default=6, help=f"of how many images {drawn}")
    parser.add_argument("--config", action="config", help="a YAML file with options, which the others override")
    return parser


def add_resume(parser: Parser) -> None:
    """Let an evaluation that trains be gone on with."""
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with what stands in --out, if there is something: for a scheduler that starts a command again",
    )


def configuration(parser: Parser, words: Sequence[str], config: type[Any]) -> tuple[Any, dict[str, Any]]:
    """Words as the configuration of an evaluation, and how it is to be run.

    Args:
        parser: of `evaluation_parser`.
        words: to parse.
        config: the configuration's dataclass.

    Returns:
        the configuration; and `out`, `overwrite` and `pictures` by name, with `resume` where there is such an option.

    Raises:
        ConfigError: they cannot be used.
    """
    parser.add_class_arguments(config)
    parsed = parser.parse_args(words)
    made = parser.instantiate(parsed)
    how = {option: parsed[option] for option in _OF_THE_RUN if option in parsed}
    return config(**{field.name: made[field.name] for field in fields(config)}), how
