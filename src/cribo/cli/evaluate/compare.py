"""`cribo evaluate compare`: compare results of evaluations."""

from pathlib import Path

from rich.console import Console

from cribo.base.console import importing

HELP = """\
Compare results: the settings that differ, the classes that differ most, and published figures of the same variant
and settings.

  cribo evaluate compare evaluations/dense-nn-voc-mine evaluations/dense-nn-voc-dino
"""

LESS_MEMORY = "compare fewer results at once"


def run(words: list[str], console: Console) -> None:
    """Run the command."""
    from cribo.base.arguments import Parser

    parser = Parser(prog="cribo evaluate compare", description=HELP)
    parser.add_argument("results", nargs="+", type=Path, help="folders of evaluations, or their results.json")
    parser.add_argument("--out", type=Path, help="folder for compare.md, compare.json and compare.png")
    parser.add_argument(
        "--sweeps", action="store_true", help="also show published figures for other hyperparameters of the pretraining"
    )
    parsed = parser.parse_args(words)
    with importing(console):
        from cribo.evaluation.comparison import compare

    comparison = compare(parsed.results, sweeps=parsed.sweeps)
    for table in comparison.tables():
        console.print(table)
    if parsed.out is not None:
        for path in comparison.write(parsed.out):
            console.print(f"  {path}")
