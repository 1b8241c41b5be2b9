"""`cribo profile`: measure the cost of each part of a training step."""

from pathlib import Path

from cribo.base.arguments import Parser
from cribo.base.console import Phases, importing_networks
from cribo.base.job import Job
from cribo.cli.command import Call, Command
from cribo.cli.running import print_places
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.loading import ConfigParser, config_from, config_name, with_preset

HELP = """\
Measure the cost of each part of a training step on this machine: the paper's profiling table for your configuration,
with images per second and peak memory.

  cribo profile --config coco_vits16 --data.root COCO --kept 8,16,32
  cribo profile --config imagenet_vitb16 --data.root scenes --data.scenes.size 224 --optim.batch_size 128

The command runs training steps with a full memory bank and discards the result. For a run on several devices, it
profiles the share of one device. Without --kept, an image has as many objects as an untrained network finds.
"""


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("--out", type=Path, default=Path("profiles"), help="parent folder of the results")
    parser.add_argument(
        "--kept",
        type=list[int],
        default=[],
        help="numbers of objects per image to profile, such as 8,16,32; by default, as found by an untrained network",
    )
    parser.add_argument(
        "--bootstrapping_ratio", type=float, default=0.5, help="share of the objects with a valid match"
    )
    parser.add_argument("--steps", type=int, default=10, help="number of timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="number of steps before the timed ones")
    parser.add_argument(
        "--trace", type=Path | None, help="file for a trace of two steps, for chrome://tracing or ui.perfetto.dev"
    )
    parser.add_class_arguments(PretrainConfig)


def run(call: Call) -> None:
    """Run the command."""
    config = config_from(call.options)
    with importing_networks(call.console):
        from cribo.pretraining.profile_report import profile_table, write_profile
        from cribo.pretraining.profiling import profile

    target = Job(call.options.out / config_name(call.options.config[-1]), "profile", numbered=True)
    with Phases(call.console) as progress:
        measured = profile(
            config,
            kept=call.options.kept,
            bootstrapping_ratio=call.options.bootstrapping_ratio,
            steps=call.options.steps,
            warmup=call.options.warmup,
            trace=call.options.trace,
            progress=progress,
        )
    folder = target.create()
    paths = write_profile(measured, folder, command=call.line)
    call.console.print(profile_table(measured))
    places = {"numbers": paths[0], "picture": paths[1]}
    print_places(call.console, places if call.options.trace is None else places | {"trace": call.options.trace})


COMMAND = Command(
    help=HELP,
    usage="cribo profile [--config PRESET] [options]",
    less_memory="raise --optim.micro_batches, lower --optim.batch_size, or set --backbone.checkpointing selective",
    add_options=add_options,
    run=run,
    parser=ConfigParser,
    complete=with_preset,
)
