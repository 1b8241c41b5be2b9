"""The command `cribo`: one sub-command per job. Parses, calls, prints; the work is elsewhere."""

import logging
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

  cribo pretrain --config adapt --data.root IMAGES         continue pretrained weights (most people want this)
  cribo pretrain --config coco_vits16 --data.root COCO     from scratch, as published

IMAGES is a folder, nested or not, or a text file that lists images. Every value below can be set in a YAML file,
too; --print_config shows them all.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 done, 1 failed on the way, 2 refused, 130 interrupted."""
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
    from cribo.data import UnreadableImage
    from cribo.pretraining import ConfigError, NonFiniteLoss, TooManyUnreadable
    from cribo.pretraining.presets import (
        DEFAULT_PRESET,
        ConfigParser,
        add_config_arguments,
        config_from,
    )
    from cribo.pretraining.run import latest_run, pretrain, resume

    console = Console()
    _log_to(console)
    parser = ConfigParser(prog="cribo pretrain", description=_PRETRAIN_HELP)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of run folders")
    parser.add_argument("--name", type=str | None, help="of this run; the preset's, numbered, by default")
    parser.add_argument(
        "--minutes", type=float | None, help="about how long to train here: sets optim.epochs by a short timing"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="continue the run in this folder from its last checkpoint (without a folder: the latest run)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a run of the same --name"
    )
    add_config_arguments(parser)
    try:
        if "--resume" in words or any(word.startswith("--resume=") for word in words):
            folder, overrides = _resume_arguments(words)
            run = resume(folder or latest_run(_out_of(words)), overrides=overrides, console=console)
        else:
            if not any(word == "--config" or word.startswith("--config=") for word in words):
                words = ["--config", DEFAULT_PRESET, *words]
            parsed = parser.parse_args(words)
            name = Path(str(parsed.config[-1])).stem if parsed.config else DEFAULT_PRESET
            ...
    except (ConfigError, ValueError, UnreadableImage) as error:
        print(f"cribo pretrain: {error}", file=sys.stderr)
        return 2
    except (NonFiniteLoss, TooManyUnreadable) as error:
        print(f"cribo pretrain: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    _print_summary(run, console)
    return 0
