"""`cribo shard`: pack images into a few large files."""

from pathlib import Path

from rich.filesize import decimal

from cribo.base.arguments import Parser
from cribo.base.console import Phases, importing
from cribo.base.wording import command_line, counted
from cribo.cli.command import Call, Command
from cribo.cli.running import print_places
from cribo.data.config import Reading

HELP = """\
Pack images into a few large tar files, which are faster to read from network file systems and object storage than
many small files.

  cribo shard PHOTOGRAPHS                            unchanged files
  cribo shard PHOTOGRAPHS --size 512                 shorter side at most 512 pixels
  cribo pretrain --data.root shards/photographs      train on the shards; or s3://bucket/prefix, if copied there

Crops are usually smaller than photographs, so --size reduces the time for decoding and downloads. The folder is created
atomically; unreadable images are omitted and listed in its skipped.csv.
"""


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("--images", type=str, required=True, help="a folder, or a text file that lists images")
    parser.add_argument("--out", type=Path, help="folder of the shards; it must not exist. [shards/<images>]")
    parser.add_argument("--size", type=int, help="maximum shorter side in pixels; by default, images are unchanged")
    parser.add_argument("--shard_mb", type=float, default=64.0, help="approximate size of a shard in MB")
    parser.add_argument(
        "--max_unreadable", type=float, default=0.01, help="maximum share of unreadable images, which are omitted"
    )
    parser.add_class_arguments(Reading)
    parser.add_argument("--workers", type=int, help="number of threads that read images; by default one per core")


def run(call: Call) -> None:
    """Run the command."""
    with importing(call.console):
        from cribo.data.sources.images import collection_name, open_images
        from cribo.data.sources.shard_writing import write_shards

    source = open_images(call.options.images, reading=call.build(Reading))
    with Phases(call.console) as progress:
        written = write_shards(
            source,
            call.options.out or Path("shards") / collection_name(call.options.images),
            size=call.options.size,
            shard_bytes=round(call.options.shard_mb * 1e6),
            max_unreadable=call.options.max_unreadable,
            workers=call.options.workers,
            progress=progress,
        )
    call.console.print(
        f"{counted(written.images, 'image')} in {counted(written.shards, 'shard')}, {decimal(written.size_bytes)}"
        + (f"; {counted(len(written.skipped), 'image')} could not be read" if written.skipped else "")
    )
    to_train = command_line("cribo", "pretrain", "--data.root", written.folder)
    print_places(call.console, {"shards": written.folder, "to train": to_train})


COMMAND = Command(
    help=HELP,
    usage="cribo shard IMAGES [OUT] [options]",
    by_position=["--images", "--out"],
    less_memory="lower --workers",
    add_options=add_options,
    run=run,
)
