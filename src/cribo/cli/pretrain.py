"""`cribo pretrain`: learn dense representations from unlabelled images."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cribo.base.arguments import Parser
from cribo.base.console import duration, importing_networks
from cribo.base.errors import InputError
from cribo.base.wording import command_line, counted
from cribo.cli.command import Call, Command
from cribo.cli.running import print_places
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.loading import SHORT, ConfigParser, config_from, config_name, with_preset

if TYPE_CHECKING:
    from cribo.pretraining.run import Run

HELP = """\
Learn dense representations from unlabelled images.

  cribo pretrain                                                      about a minute on synthetic scenes
  cribo pretrain --config coco_vits16 --data.root COCO                from random weights, as published
  cribo pretrain --config camvid --name mine --objects.num_objects 8  a preset with changed values
  cribo pretrain --resume runs/mine                                   continue an interrupted run

To start from pretrained weights, use `cribo adapt`.

data.root is a folder (read recursively), a text file that lists images, or a folder or URL of tar shards, which
`cribo shard` writes. --config is a preset or a YAML file of the values below; values that it does not set have the
defaults shown. --print_config prints the resulting configuration.
"""


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("--out", type=Path, default=Path("runs"), help="parent folder of run folders")
    parser.add_argument("--name", type=str, help="name of the run; by default that of the preset, numbered")
    parser.add_argument(
        "--minutes",
        type=float,
        help="approximate duration of the training: sets optim.epochs by timing a few steps",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="RUN",
        help="continue the run in this folder from its last checkpoint (without a folder: the latest run); "
        "only runtime.* and the options for reading images can be changed",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="with --resume: use the custom code and the addresses that the run names. Only for runs from sources that "
        "you trust; or name them again, such as --objective my_package.MyObjective",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a run of the same --name")
    parser.add_argument(
        "--continue",
        action="store_true",
        help="continue the run --name if it exists; for schedulers that restart the same command",
    )
    parser.add_class_arguments(PretrainConfig)


def run(call: Call) -> None:
    """Run the command."""
    if call.options.resume is not None:
        for option in ("name", "minutes", "config", "overwrite", "continue"):
            if call.options[option]:
                raise InputError(f"--{option} cannot be used with --resume: it is taken from the run")
        with importing_networks(call.console):
            from cribo.pretraining.run import latest_run, overrides_in, resume

        folder = latest_run(call.options.out) if call.options.resume == "latest" else Path(call.options.resume)
        run = resume(
            folder,
            overrides=overrides_in(call.parser.expand(call.words)),
            trust=call.options.trust,
            console=call.console,
        )
    elif call.options.trust:
        raise InputError("--trust applies to --resume only: a configuration that you give may name any code")
    else:
        config = config_from(call.options)
        with importing_networks(call.console):
            from cribo.pretraining.run import pretrain

        run = pretrain(
            config,
            out=call.options.out,
            name=call.options.name,
            default_name=config_name(call.options.config[-1]),
            minutes=call.options.minutes,
            overwrite=call.options.overwrite,
            continue_run=call.options["continue"],
            console=call.console,
        )
    _print_summary(run, call.console)


def _print_summary(run: "Run", console: Console) -> None:
    from cribo.pretraining.planning import epochs_to_judge
    from cribo.pretraining.recorded import read_run_config

    summary = run.summary
    if "agreement" in summary:
        score = summary["agreement"]
        table = Table(title=Text(f"Neighbour agreement across views on {score['data']}"))
        table.add_column("features")
        table.add_column("agreement", justify="right")
        for label, key in (("this network before training", "before"), ("this network after training", "after")):
            value = "unknown" if score[key] is None else f"{100 * score[key]:.0f} %"
            table.add_row(label, value, style="bold" if key == "after" else None)
        console.print(table)
    if "dense_nn" in summary:
        score = summary["dense_nn"]
        table = Table(
            title=Text(
                f"Dense retrieval on {score.get('data', 'labelled images')}: mean intersection over union (mIoU)"
            )
        )
        table.add_column("features")
        table.add_column("mIoU", justify="right")
        for label, key in (
            ("mean colour of the patch", "mean_color"),
            ("this network before training", "before"),
            ("this network after training", "after"),
        ):
            value = "unknown" if score[key] is None else f"{100 * score[key]:.1f} %"
            table.add_row(label, value, style="bold" if key == "after" else None)
        console.print(table)
    epochs, needed = summary["epochs"], epochs_to_judge(read_run_config(run.folder))
    if epochs < needed:
        whole = duration(summary["seconds"] * needed / epochs)
        console.print(
            f"{counted(epochs, 'epoch')} {'is' if epochs == 1 else 'are'} too few to judge: `cribo pretrain` trains "
            f"{needed}, in about {whole} on this machine"
        )
    console.print(
        f"{summary['steps']} steps in {duration(summary['seconds'])}, "
        f"{summary['images_per_second']:.0f} images/s, "
        f"peak memory {summary['peak_rss_bytes'] / 2**30:.1f} GiB · {summary.get('shown', '')}",
    )
    print_places(
        console,
        {
            "backbone": run.folder / "backbone.safetensors",
            "pictures": run.folder / "report",
            "numbers": run.folder / "summary.json",
            "metrics": run.folder / "metrics.csv",
            "to repeat it": command_line("cribo", "pretrain", "--config", run.folder / "config.yaml"),
        },
    )


COMMAND = Command(
    help=HELP,
    usage="cribo pretrain [options]",
    short=SHORT,
    less_memory="raise --optim.micro_batches, or set --backbone.checkpointing selective",
    add_options=add_options,
    run=run,
    parser=ConfigParser,
    complete=with_preset,
)
