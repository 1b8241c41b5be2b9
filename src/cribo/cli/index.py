"""`cribo index`: store the objects of a collection of images in a database."""

from rich.filesize import decimal

from cribo.apps.search.config import IndexConfig
from cribo.base.arguments import Parser
from cribo.base.console import duration, importing_networks
from cribo.base.wording import command_line, counted
from cribo.cli.command import Call, Command
from cribo.cli.running import (
    BACKBONE_SHORT,
    add_optional_backbone,
    optional_backbone,
    print_places,
    print_unreadable,
)
from cribo.data.config import READING_SHORT

HELP = """\
Find the objects in every image of a collection and store them in a database (Lance) for cribo search.

  cribo index PHOTOGRAPHS --backbone runs/camvid
  cribo index --db objects/photographs.lance            update it after images were added, changed or deleted
  cribo index PHOTOGRAPHS --backbone vit_small_patch16_224.dino --db s3://bucket/photographs
  cribo index PHOTOGRAPHS --backbone runs/camvid --engine ray       on several GPUs

PHOTOGRAPHS is a folder (read recursively), a text file that lists images, tar shards, Parquet files, or a URL of these.
Objects are clusters of an image's patches: nothing is labelled or trained. Only new and changed images are processed;
the command can be stopped and restarted at any time. Then: cribo search --db DATABASE --image ONE.jpg
"""


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_class_arguments(IndexConfig, skip={"backbone", "trust"})
    add_optional_backbone(
        parser,
        "a run folder or its backbone.safetensors; a timm name; a checkpoint of another project; or mean-colour. Not "
        "needed if --db exists",
    )


def run(call: Call) -> None:
    """Run the command."""
    config = call.build(IndexConfig, backbone=optional_backbone(call.options), trust=call.options.backbone.trust)
    with importing_networks(call.console):
        from cribo.apps.search.run import index_collection

    summary, database, quality = index_collection(config, console=call.console)
    print_unreadable(call.console, [*summary.unreadable, *summary.unread])
    speed = f", {summary.images_per_second:.1f} images/s" if summary.images_per_second else ""
    call.console.print(
        f"{counted(summary.new, 'new image')}, {summary.changed} changed, {summary.unchanged} unchanged, "
        f"{summary.removed} removed; {duration(summary.seconds)}{speed}",
    )
    size = database.size_bytes()
    call.console.print(
        f"{counted(len(database), 'object')} of {counted(database.count_images(), 'image')}"
        + ("" if size is None else f", {decimal(size)}"),
    )
    if quality is not None:
        call.console.print(quality.text)
    again = command_line("cribo", "search", "--db", database.uri, "--image", "IMAGE", "--point", "x,y")
    print_places(call.console, {"database": database.uri, "to search": again})


COMMAND = Command(
    help=HELP,
    by_position=["--images"],
    usage="cribo index IMAGES --backbone SOURCE [options]\n       cribo index --db DIR_OR_URL [options]",
    short={**BACKBONE_SHORT, **READING_SHORT},
    less_memory="lower --batch_size, or --size",
    add_options=add_options,
    run=run,
)
