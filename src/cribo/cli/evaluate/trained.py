"""What the commands of evaluations that train have in common: their options, and what they print."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from cribo.arguments import Parser
from cribo.cli.running import BACKBONE_SHORT, BACKBONE_SWITCHES, print_places

SHORT = {
    **BACKBONE_SHORT,
    "--data": "--data.name",
    "--limit": "--data.limit",
    "--accelerator": "--runtime.accelerator",
    "--devices": "--runtime.devices",
}
SWITCHES = (*BACKBONE_SWITCHES, "--data.partial")


def parse(
    name: str, words: Sequence[str], config: type[Any], description: str, *, lists: Sequence[str] = ()
) -> tuple[Any, dict[str, Any]]:
    """Words as the configuration of an evaluation, and how it is to be run.

    Args:
        name: of the evaluation, as the command line has it.
        words: to parse.
        config: the configuration's dataclass.
        description: for the help.
        lists: options whose values may be given as `1,8,64`.

    Returns:
        the configuration, and `out`, `overwrite`, `resume` and `pictures` by name.

    Raises:
        ConfigError: they cannot be used.
    """
    parser = Parser(
        prog=f"cribo evaluate {name}",
        description=description,
        usage=f"cribo evaluate {name} --backbone SOURCE --data NAME --data.root DIR [options]",
        short=SHORT,
        switches=SWITCHES,
        lists=lists,
    )
    parser.add_argument(
        "--out", type=Path, help=f"folder for results and pictures; evaluations/{name}-..., numbered, by default"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an evaluation that stands in --out")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with what stands in --out, if there is something: for a scheduler that starts a command again",
    )
    parser.add_argument("--pictures", type=int, default=6, help="of how many images the prediction is drawn")
    parser.add_argument("--config", action="config", help="a YAML file with options, which the others override")
    parser.add_class_arguments(config)
    parsed = parser.parse_args(words)
    made = parser.instantiate(parsed)
    run = {option: parsed[option] for option in ("out", "overwrite", "resume", "pictures")}
    return config(**{field.name: made[field.name] for field in fields(config)}), run


def print_result(console: Console, result: Any, folder: Path, *, also: Mapping[str, Path | str] | None = None) -> None:
    """The tables of a result, and where everything is.

    Args:
        console: where to.
        result: an `EvaluationResult`.
        folder: that it was written to.
        also: further places.
    """
    from cribo.evaluation.results import metric_title, percent, result_tables, varied_title, varied_value

    for table in result_tables(result):
        console.print(table)
    if len(result.results) > 1:
        best = max(result.results, key=lambda row: row[result.headline])
        where = f"{varied_title(result.varies)} {varied_value(result.varies, best[result.varies])}"
        found = f"{metric_title(result.headline)} {percent(best[result.headline])} %"
        console.print(f"  best         {found} at {where}", highlight=False)
    places = {"numbers": folder / "results.json", "pictures": folder / "*.png", "curves": folder / "tensorboard"}
    print_places(console, {**places, **(also or {})})
