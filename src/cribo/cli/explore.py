"""`cribo explore`: a web page to inspect a run or a collection."""

import secrets
from pathlib import Path

from cribo.base.arguments import Parser
from cribo.base.console import importing_networks
from cribo.cli.access import read_secret
from cribo.cli.command import Call, Command
from cribo.cli.running import (
    BACKBONE_SHORT,
    add_optional_backbone,
    optional_backbone,
)
from cribo.data.config import READING_SHORT
from cribo.explorer.config import ExploreConfig, Limits

HELP = """\
Open a web page with the view pairs of a run and their clusters, nearest objects across a collection of images, features
as colours, and labelling of images from a few painted examples.

  cribo explore CAMVID --run runs/camvid                a run; finds the objects of some of its images at start-up
  cribo explore --db street.db                          a database of objects, created by cribo index
  cribo explore CAMVID --run runs/camvid --db street.db   both
  cribo explore PHOTOGRAPHS --backbone vit_small_patch16_224.dino
  cribo explore PHOTOGRAPHS --backbone vit_small_patch16_224.dino --examples EXAMPLES --limit 0
                                                        label examples for cribo segment by painting

The page is served to this machine only (127.0.0.1). With --host 0.0.0.0, other machines can open it with a password,
which is printed. A password of your own is best read from a file (--password_file) or from the environment variable
CRIBO_PASSWORD: other users of this machine can see the arguments of commands. Nothing is sent to, or loaded from,
other servers. Ctrl-C stops the server.
"""

PASSWORD = "CRIBO_PASSWORD"
"""Environment variable with the password of the page."""


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_class_arguments(ExploreConfig, skip={"backbone", "trust"})
    parser.add_argument("--host", type=str, default="127.0.0.1", help="0.0.0.0 allows other machines to open the page")
    parser.add_argument("--port", type=int, default=7860, help="port of the page; 0 takes a free one")
    parser.add_argument(
        "--password",
        type=str,
        help="password of the page, visible in the list of processes: --password_file or the environment variable "
        f"{PASSWORD} hides it; with a --host other than this machine, random by default",
    )
    parser.add_argument("--password_file", type=Path, help="file whose first line is the password of the page")
    parser.add_argument("--no_password", action="store_true", help="allow access to the page without a password")
    parser.add_class_arguments(Limits)
    add_optional_backbone(
        parser,
        "backbone to use instead of that of the database or run: a run folder, a checkpoint, a timm name, or "
        "mean-colour",
    )


def run(call: Call) -> None:
    """Run the command."""
    limits = call.build(Limits)
    config = call.build(
        ExploreConfig,
        backbone=optional_backbone(call.options),
        trust=call.options.backbone.trust,
    )
    options = call.options
    password = read_secret(
        "password", PASSWORD, options.password_file, given=options.password, none=options.no_password
    )
    with importing_networks(call.console):
        from cribo.explorer.run import explore
        from cribo.explorer.server import is_loopback

    if password is None and not call.options.no_password and not is_loopback(call.options.host):
        password = secrets.token_urlsafe(9)
    explore(
        config, host=call.options.host, port=call.options.port, limits=limits, console=call.console, password=password
    )


COMMAND = Command(
    help=HELP,
    by_position=["--images"],
    usage="cribo explore [IMAGES] [--run DIR] [--db DIR] [--backbone SOURCE] [--examples DIR] [options]",
    short={**BACKBONE_SHORT, **READING_SHORT},
    less_memory="lower --max_megapixels, or use --device cpu",
    add_options=add_options,
    run=run,
)
