"""`cribo shard`: pack images into few large files."""

from pathlib import Path

from rich.console import Console

from cribo.cli.running import guarded, print_places
from cribo.console import Phases, loading, log_to

HELP = """\
Pack images into few large tar files, which are read fast where single files are slow: from network file systems and
from object storage.

  cribo shard IMAGES OUT                 the files as they are
  cribo shard PHOTOGRAPHS OUT --size 512 the shorter side no longer than 512 pixels
  cribo pretrain --data.root OUT         or --data.root s3://bucket/prefix, where OUT has been copied

Crops are mostly smaller than photographs: with --size, what is decoded and fetched becomes less. OUT appears when it
is complete; unreadable images are left out and listed in OUT/skipped.csv.
"""

LESS_MEMORY = "lower --threads"


def main(words: list[str]) -> int:
    """Run the command."""
    return guarded("cribo shard", _shard, words, less_memory=LESS_MEMORY)


def _shard(words: list[str]) -> None:
    from cribo.arguments import Parser
    from cribo.data.limits import MAX_PIXELS

    console = Console(soft_wrap=True)
    log_to(console)
    parser = Parser(prog="cribo shard", description=HELP, usage="cribo shard IMAGES OUT [options]")
    parser.add_argument("images", metavar="IMAGES", type=str, help="a folder, or a text file that lists images")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of the shards; it must not exist")
    parser.add_argument("--size", type=int, help="of the shorter side, at most, in pixels; as it is when not given")
    parser.add_argument("--shard_mb", type=float, default=64.0, help="about how large a shard is, in MB")
    parser.add_argument(
        "--max_unreadable", type=float, default=0.01, help="share of the images that may be unreadable and left out"
    )
    parser.add_argument("--max_pixels", type=int, default=MAX_PIXELS, help="larger images are unreadable")
    parser.add_argument("--threads", type=int, help="that read and decode; as many as there are cores when not given")
    parsed = parser.parse_args(words)
    with loading(console):
        from cribo.data.images import open_images
        from cribo.data.shard_writing import write_shards

    source = open_images(parsed.images, max_pixels=parsed.max_pixels)
    with Phases(console) as progress:
        written = write_shards(
            source,
            parsed.out,
            size=parsed.size,
            shard_bytes=round(parsed.shard_mb * 1e6),
            max_unreadable=parsed.max_unreadable,
            threads=parsed.threads,
            progress=progress,
        )
    console.print(
        f"{written.images} images in {written.shards} shards, {written.size_bytes / 1e6:.1f} MB; "
        f"{len(written.skipped)} were unreadable",
        highlight=False,
    )
    print_places(console, {"shards": written.folder, "to train": f"cribo pretrain --data.root {written.folder}"})
