"""`cribo benchmark`: evaluate a backbone by every protocol on every dataset of a folder."""

from pathlib import Path

from cribo.base.arguments import Parser
from cribo.base.console import importing_networks
from cribo.cli.command import Call, Command
from cribo.cli.running import BACKBONE_SHORT, print_places
from cribo.data.config import READING_SHORT
from cribo.evaluation.benchmark.config import BenchmarkConfig

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


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("--out", type=Path, help="folder of the card; by default cards/<backbone>, numbered")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing card in --out")
    parser.add_argument("--rows", type=Path, default=Path("evaluations"), help="parent folder of the evaluations")
    parser.add_class_arguments(BenchmarkConfig)


def run(call: Call) -> None:
    """Run the command."""
    config = call.build(BenchmarkConfig)
    with importing_networks(call.console):
        from cribo.evaluation.benchmark.card import CARD, CHART
        from cribo.evaluation.benchmark.run import benchmark
        from cribo.evaluation.results import RESULTS

    command = call.line
    card, folder = benchmark(
        config,
        out=call.options.out,
        rows=call.options.rows,
        overwrite=call.options.overwrite,
        command=command,
        console=call.console,
    )
    call.console.print()
    call.console.print(card.table())
    call.console.print(card.summary)
    print_places(call.console, {"card": folder / CARD, "picture": folder / CHART, "numbers": folder / RESULTS})


COMMAND = Command(
    help=HELP,
    usage="cribo benchmark --backbone SOURCE --data SETS [options]",
    short={
        **BACKBONE_SHORT,
        **READING_SHORT,
        "--data": "--data.root",
        "--cache": "--runtime.cache",
        "--devices": "--runtime.devices",
    },
    less_memory="lower --runtime.batch_size or --runtime.memory_gib, or omit the last row with --only or --data.sets",
    add_options=add_options,
    run=run,
)
