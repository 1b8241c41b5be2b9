"""The command `cribo`: one sub-command per job. Parses, calls, prints; the work is elsewhere."""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

if TYPE_CHECKING:
    from cribo.pretraining.run import Run

_USAGE = """\
usage: cribo <command> [options]

commands:
  pretrain    learn dense representations from unlabelled images

`cribo pretrain` with no options trains on made-up scenes, a few minutes on a laptop.
`cribo pretrain --help` lists its options; `cribo --version` says which version this is.
"""

_PRETRAIN_HELP = """\
Learn dense representations from unlabelled images.

With no options: a few minutes on made-up scenes, to see that everything works. On your own images:

  cribo pretrain --config adapt --data.root IMAGES         continue pretrained weights
  cribo pretrain --config coco_vits16 --data.root COCO     from scratch, as published

IMAGES is a folder, nested or not, or a text file that lists images. Every value below
can be put in a YAML file, too; the defaults shown hold where the preset says nothing,
and --print_config shows what would run.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; exit status 0 done, 1 failed on the way, 2 refused, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--version"]:
        import cribo

        print(cribo.__version__)
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0 if words else 2
    command, *rest = words
    if command != "pretrain":
        print(f"cribo: unknown command {command!r}: the command is pretrain", file=sys.stderr)
        return 2
    return _pretrain(rest)


def _pretrain(words: list[str]) -> int:
    # Imported here, so that `cribo --help` does not wait for torch.
    from cribo.data import UnreadableImage
    from cribo.pretraining import NonFiniteLoss, TooManyUnreadable
    from cribo.pretraining.presets import (
        DEFAULT_PRESET,
        ConfigParser,
        add_config_arguments,
        config_from,
        config_name,
    )
    from cribo.pretraining.run import latest_run, overrides_in, pretrain, resume

    # The processes of further devices run this command too, and have nothing to add to what the first one says.
    console = Console(soft_wrap=True, quiet=os.environ.get("LOCAL_RANK", "0") != "0")
    _log_to(console)
    parser = ConfigParser(prog="cribo pretrain", description=_PRETRAIN_HELP, usage="cribo pretrain [options]")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of run folders")
    parser.add_argument("--name", type=str, help="of this run; the preset's, numbered, by default")
    parser.add_argument(
        "--minutes", type=float, help="about how long to train here: sets optim.epochs by a short timing"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="RUN",
        help="continue the run in this folder from its last checkpoint (without a folder: the latest run); "
        "only runtime.*, data.root and data.workers can be changed",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a run of the same --name")
    add_config_arguments(parser)
    names = {word.partition("=")[0] for word in words}
    if not names & {"--config", "--resume"}:
        words = ["--config", DEFAULT_PRESET, *words]
    try:
        parsed = parser.parse_args(words)
        if parsed.resume is not None:
            for option in ("name", "minutes", "config", "overwrite"):
                if parsed[option]:
                    raise ValueError(f"--{option} does not go with --resume: the run knows its own")
            folder = latest_run(parsed.out) if parsed.resume == "latest" else Path(parsed.resume)
            run = resume(folder, overrides=overrides_in(words), console=console)
        else:
            run = pretrain(
                config_from(parsed),
                out=parsed.out,
                name=parsed.name,
                default_name=config_name(parsed.config[-1]),
                minutes=parsed.minutes,
                overwrite=parsed.overwrite,
                console=console,
            )
    except (NonFiniteLoss, TooManyUnreadable, UnreadableImage) as error:
        print(f"cribo pretrain: {error}", file=sys.stderr)
        return 1
    except (ValueError, FileNotFoundError, ConnectionError) as error:  # what a user can mend before any work
        print(f"cribo pretrain: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # no room for what the run leaves, say
        print(f"cribo pretrain: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    _print_summary(run, console)
    return 0


def _log_to(console: Console) -> None:
    log = logging.getLogger("cribo")
    log.setLevel(logging.INFO)
    log.handlers = [RichHandler(console=console, show_path=False, show_level=True, log_time_format="%H:%M:%S")]
    log.propagate = False


def _print_summary(run: "Run", console: Console) -> None:
    from cribo.pretraining.progress import duration

    summary = run.summary
    if "dense_nn" in summary:
        score = summary["dense_nn"]
        table = Table(title="Dense nearest-neighbour retrieval on held-out images")
        table.add_column("features")
        table.add_column("mIoU", justify="right")
        for label, key in (
            ("mean colour of the patch", "mean_color"),
            ("this network before training", "before"),
            ("this network after training", "after"),
        ):
            table.add_row(label, f"{100 * score[key]:.1f} %", style="bold" if key == "after" else None)
        console.print(table)
    console.print(
        f"{summary['steps']} steps in {duration(summary['seconds'])}, "
        f"{summary['images_per_second']:.0f} images/s, "
        f"peak memory {summary['peak_rss_bytes'] / 2**30:.1f} GiB, "
        f"bootstrapping ratio {summary['bootstrapping_ratio']:.0%}",
        highlight=False,
    )
    for label, path in (
        ("backbone", run.folder / "backbone.safetensors"),
        ("pictures", run.folder / "report"),
        ("numbers", run.folder / "summary.json"),
        ("metrics", run.folder / "metrics.csv"),
        ("to repeat it", f"cribo pretrain --config {run.folder / 'config.yaml'}"),
    ):
        console.print(f"  {label:<13}{path}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
