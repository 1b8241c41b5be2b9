"""`cribo shard`: pack images into a few large files."""

from pathlib import Path

from rich.console import Console

from cribo.base.console import Phases, importing
from cribo.base.wording import command_line, counted
from cribo.cli.running import print_places

HELP = """\
Pack images into a few large tar files, which are faster to read from network file systems and object storage than
many small files.

  cribo shard PHOTOGRAPHS                            unchanged files
  cribo shard PHOTOGRAPHS --size 512                 shorter side at most 512 pixels
  cribo pretrain --data.root shards/photographs      train on the shards; or s3://bucket/prefix, if copied there

Crops are usually smaller than photographs, so --size reduces the time for decoding and downloads. The folder is created
atomically; unreadable images are omitted and listed in its skipped.csv.
"""

LESS_MEMORY = "lower --workers"


def run(words: list[str], console: Console) -> None:
    """Run the command."""
    from cribo.base.arguments import Parser
    from cribo.data.config import Reading

    parser = Parser(
        prog="cribo shard",
        description=HELP,
        usage="cribo shard IMAGES [OUT] [options]",
        by_position=["--images", "--out"],
    )
    parser.add_argument("--images", type=str, required=True, help="a folder, or a text file that lists images")
    parser.add_argument("--out", type=Path, help="folder of the shards; it must not exist. [shards/<images>]")
    parser.add_argument("--size", type=int, help="maximum shorter side in pixels; by default, images are unchanged")
    parser.add_argument("--shard_mb", type=float, default=64.0, help="approximate size of a shard in MB")
    parser.add_argument(
        "--max_unreadable", type=float, default=0.01, help="maximum share of unreadable images, which are omitted"
    )
    parser.add_class_arguments(Reading)
    parser.add_argument("--workers", type=int, help="number of threads that read images; by default one per core")
    parsed = parser.parse_args(words)
    with importing(console):
        from cribo.data.sources.images import collection_name, open_images
        from cribo.data.sources.shard_writing import write_shards

    source = open_images(parsed.images, reading=parser.build(Reading, parsed))
    with Phases(console) as progress:
        written = write_shards(
            source,
            parsed.out or Path("shards") / collection_name(parsed.images),
            size=parsed.size,
            shard_bytes=round(parsed.shard_mb * 1e6),
            max_unreadable=parsed.max_unreadable,
            workers=parsed.workers,
            progress=progress,
        )
    console.print(
        f"{counted(written.images, 'image')} in {counted(written.shards, 'shard')}, {written.size_bytes / 1e6:.1f} MB"
        + (f"; {counted(len(written.skipped), 'image')} could not be read" if written.skipped else "")
    )
    to_train = command_line("cribo", "pretrain", "--data.root", written.folder)
    print_places(console, {"shards": written.folder, "to train": to_train})
