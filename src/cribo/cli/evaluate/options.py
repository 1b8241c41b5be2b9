"""Options that all evaluations share."""

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
    """Return a parser of the shared options; `configuration` adds those of the evaluation.

    Args:
        name: of the evaluation on the command line.
        description: for the help.
        data: text after `--data` in the usage.
        drawn: what --pictures draws, for its help.
        short: short names of options.
        switches: boolean options that mean `true` if no value follows.
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
    parser.add_argument("--overwrite", action="store_true", help="replace an existing evaluation in --out")
    parser.add_argument("--pictures", type=int, default=6, help=f"number of images for which {drawn}")
    parser.add_argument("--config", action="config", help="a YAML file of options, overridden by the command line")
    return parser


def add_resume(parser: Parser) -> None:
    """Add the option --resume."""
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the evaluation in --out, if there is one, or start it; for job schedulers",
    )


def configuration(parser: Parser, words: Sequence[str], config: type[Any]) -> tuple[Any, dict[str, Any]]:
    """Parse words as the configuration of an evaluation and options of its run.

    Args:
        parser: of `evaluation_parser`.
        words: to parse.
        config: the configuration's dataclass.

    Returns:
        The configuration, and a dictionary of `out`, `overwrite`, `pictures` and, if the parser has it, `resume`.

    Raises:
        ConfigError: for invalid options.
    """
    parser.add_class_arguments(config)
    parsed = parser.parse_args(words)
    made = parser.instantiate(parsed)
    how = {option: parsed[option] for option in _OF_THE_RUN if option in parsed}
    return config(**{field.name: made[field.name] for field in fields(config)}), how
