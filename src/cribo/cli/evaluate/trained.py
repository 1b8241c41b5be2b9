"""Shared by the evaluations that train a segmentation: options and printed results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cribo.cli.evaluate.options import add_resume, configuration, evaluation_parser
from cribo.cli.running import BACKBONE_SHORT, BACKBONE_SWITCHES, print_places

SHORT = {
    **BACKBONE_SHORT,
    "--data": "--data.name",
    "--limit": "--data.limit",
    "--accelerator": "--runtime.accelerator",
    "--devices": "--runtime.devices",
}
SWITCHES = (*BACKBONE_SWITCHES, "--data.partial")


def parse(name: str, words: Sequence[str], config: type[Any], description: str) -> tuple[Any, dict[str, Any]]:
    """Parse words as the configuration of a trained segmentation and options of its run (`configuration`).

    Args:
        name: of the evaluation on the command line.
        words: to parse.
        config: the configuration's dataclass.
        description: for the help.

    Raises:
        ConfigError: for invalid options.
    """
    parser = evaluation_parser(name, description, short=SHORT, switches=SWITCHES)
    add_resume(parser)
    return configuration(parser, words, config)


def print_result(console: Console, result: Any, folder: Path, *, also: Mapping[str, Path | str] | None = None) -> None:
    """Print the tables of a result and the paths of its files.

    Args:
        console: to print to.
        result: an `EvaluationResult`.
        folder: folder of the result.
        also: further paths, by name.
    """
    from cribo.evaluation.results import metric_title, percent, result_tables, varied_title, varied_value

    for table in result_tables(result):
        console.print(table)
    if len(result.results) > 1:
        best = max(result.results, key=lambda row: row[result.headline])
        where = f"{varied_title(result.varies)} {varied_value(result.varies, best[result.varies])}"
        found = f"{metric_title(result.headline)} {percent(best[result.headline])} %"
        console.print(f"  best         {found} at {where}")
    places = {"numbers": folder / "results.json", "pictures": folder / "*.png", "curves": folder / "tensorboard"}
    print_places(console, {**places, **(also or {})})
