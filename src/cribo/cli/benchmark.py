"""`cribo benchmark`: evaluate a backbone by every protocol on every dataset of a folder."""

import shlex
from pathlib import Path

from rich.console import Console

from cribo.base.console import importing
from cribo.cli.running import BACKBONE_SHORT, print_places
from cribo.data.config import READING_SHORT

HELP = """\
Evaluate a backbone by every protocol on every dataset of a folder, and write a card: a table with baselines, a
picture, and published values of the same setting.

  cribo benchmark --backbone checkpoint.pth --data SETS --quick
  cribo benchmark --backbone runs/mine --data SETS --only dense-nn,linear --data.sets camvid,voc

SETS is a folder that contains datasets in the layouts of `cribo evaluate`, or one dataset. Baselines are the same
network with random weights, and the mean colour of patches. --quick takes minutes on a CPU: few and small images, one
draw, and no protocol that trains. Without it, protocols that train take hours on a CPU: choose others with --only.

Each row is an evaluation in --rows. To continue after an interruption, repeat the command: evaluations with the same
backbone, data and settings are reused.
"""

LESS_MEMORY = "lower --runtime.batch_size or --runtime.memory_gib, or omit the last row with --only or --data.sets"


def run(words: list[str], console: Console) -> None:
    """Run the command."""
    from cribo.base.arguments import Parser
    from cribo.evaluation.benchmark.config import BenchmarkConfig

    parser = Parser(
        prog="cribo benchmark",
        description=HELP,
        usage="cribo benchmark --backbone SOURCE --data SETS [options]",
        short={
            **BACKBONE_SHORT,
            **READING_SHORT,
            "--data": "--data.root",
            "--cache": "--runtime.cache",
            "--devices": "--runtime.devices",
        },
    )
    parser.add_argument("--out", type=Path, help="folder of the card; by default cards/<backbone>, numbered")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing card in --out")
    parser.add_argument("--rows", type=Path, default=Path("evaluations"), help="parent folder of the evaluations")
    parser.add_class_arguments(BenchmarkConfig)
    parsed = parser.parse_args(words)
    config = parser.build(BenchmarkConfig, parsed)
    with importing(console):
        from cribo.evaluation.benchmark.card import CARD, CHART
        from cribo.evaluation.benchmark.run import benchmark
        from cribo.evaluation.results import RESULTS

    command = shlex.join(["cribo", "benchmark", *words])
    card, folder = benchmark(
        config, out=parsed.out, rows=parsed.rows, overwrite=parsed.overwrite, command=command, console=console
    )
    console.print()
    console.print(card.table())
    console.print(card.summary)
    print_places(console, {"card": folder / CARD, "picture": folder / CHART, "numbers": folder / RESULTS})
