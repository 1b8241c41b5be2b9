"""`cribo profile`: what a training step costs on this machine, part by part."""

import shlex
from pathlib import Path

from rich.console import Console

from cribo.cli.running import guarded, print_places
from cribo.console import Phases, loading, log_to

HELP = """\
What a training step costs on this machine, part by part: the paper's profiling table for your own configuration, with
memory by what holds it, and how well the processor is used.

  cribo profile --config coco_vits16 --data.root COCO --kept 8,16,32
  cribo profile --config imagenet_vitb16 --data.root scenes --data.scenes.size 224 --optim.batch_size 128

Steps of the real training are taken on a full memory bank; nothing is kept of them. Of a run over several devices, one
device's part is profiled. Without --kept, as many objects count as a random network finds.
"""

LESS_MEMORY = "raise --optim.micro_batches, lower --optim.batch_size, or set --backbone.checkpointing selective"


def main(words: list[str]) -> int:
    """Run the command."""
    return guarded("cribo profile", _profile, words, less_memory=LESS_MEMORY)


def _profile(words: list[str]) -> None:
    from cribo.files import make_numbered_folder
    from cribo.pretraining.presets import ConfigParser, add_config_arguments, config_from, config_name, with_preset

    console = Console(soft_wrap=True)
    log_to(console)
    parser = ConfigParser(
        prog="cribo profile",
        description=HELP,
        usage="cribo profile [--config PRESET] [options]",
    )
    parser.add_argument("--out", type=Path, default=Path("profiles"), help="folder of the folders of profiles")
    parser.add_argument(
        "--kept",
        type=list[int],
        default=[],
        help="objects that every image is given, such as 8,16,32: cost follows them; as found when not given",
    )
    parser.add_argument(
        "--bootstrapping_ratio", type=float, default=0.5, help="share of the objects that are given a valid match"
    )
    parser.add_argument("--steps", type=int, default=10, help="that are timed, after --warmup others")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    add_config_arguments(parser)
    words = with_preset(words)
    parsed = parser.parse_args(words)
    config = config_from(parsed)
    with loading(console):
        from cribo.pretraining.profile_report import profile_tables, write_profile
        from cribo.pretraining.profiling import profile

    with Phases(console) as progress:
        measured = profile(
            config,
            kept=parsed.kept,
            bootstrapping_ratio=parsed.bootstrapping_ratio,
            steps=parsed.steps,
            warmup=parsed.warmup,
            progress=progress,
        )
    folder = make_numbered_folder(parsed.out, config_name(parsed.config[-1]))
    paths = write_profile(measured, folder, command=shlex.join(["cribo", "profile", *words]))
    for table in profile_tables(measured):
        console.print(table)
    print_places(console, {"numbers": paths[0], "picture": paths[1]})
