"""`cribo evaluate compare`: compare results of evaluations."""

from pathlib import Path

from cribo.base.arguments import Parser
from cribo.base.console import importing
from cribo.cli.command import Call, Command

HELP = """\
Compare results: the settings that differ, the classes that differ most, and published figures of the same variant
and settings.

  cribo evaluate compare evaluations/dense-nn-voc-mine evaluations/dense-nn-voc-dino
"""


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("results", nargs="+", type=Path, help="folders of evaluations, or their results.json")
    parser.add_argument("--out", type=Path, help="folder for compare.md, compare.json and compare.png")
    parser.add_argument(
        "--sweeps", action="store_true", help="also show published figures for other hyperparameters of the pretraining"
    )


def run(call: Call) -> None:
    """Run the command."""
    with importing(call.console):
        from cribo.evaluation.comparison import compare

    comparison = compare(call.options.results, sweeps=call.options.sweeps)
    for table in comparison.tables():
        call.console.print(table)
    if call.options.out is not None:
        for path in comparison.write(call.options.out):
            call.console.print(f"  {path}")


COMMAND = Command(
    help=HELP,
    usage="cribo evaluate compare RESULT [RESULT ...] [options]",
    less_memory="compare fewer results at once",
    add_options=add_options,
    run=run,
)
