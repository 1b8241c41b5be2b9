"""`cribo embed`: write the features of many images to files."""

import shlex

from rich.console import Console

from cribo.base.console import duration, importing
from cribo.base.wording import counted
from cribo.cli.running import BACKBONE_SHORT, add_results_folder, print_places, print_unreadable
from cribo.data.config import READING_SHORT

HELP = """\
Write the features of many images to Parquet, Lance, NumPy or safetensors files.

  cribo embed IMAGES --backbone SOURCE                         a vector for each image
  cribo embed IMAGES --backbone SOURCE --features patches      one for each patch, with row and column
  cribo embed IMAGES --backbone SOURCE --features objects      one for each object, with box and area
  cribo embed IMAGES --backbone SOURCE --engine ray            on several GPUs, or on a cluster

IMAGES is a folder (read recursively), a text file that lists images, tar shards, Parquet files, or a URL of any of
these. Features are written in parts as they are computed, so that memory is bounded. To continue after an interruption,
repeat the command with --resume. For a job array: --part 3/8 in the third of eight jobs, then cribo merge.
"""

LESS_MEMORY = "lower --batch_size, or --size"


def run(words: list[str], console: Console) -> None:
    """Run the command."""
    from cribo.apps.embed.config import EmbedConfig
    from cribo.base.arguments import Parser

    parser = Parser(
        prog="cribo embed",
        description=HELP,
        by_position=["--images"],
        usage="cribo embed IMAGES --backbone SOURCE [options]",
        short={**BACKBONE_SHORT, **READING_SHORT},
    )
    add_results_folder(parser, "features/<images>")
    parser.add_class_arguments(EmbedConfig)
    parsed = parser.parse_args(words)
    config = parser.build(EmbedConfig, parsed)
    with importing(console):
        from cribo.apps.embed.run import ABOUT, SKIPPED, embed_images

    embedded = embed_images(
        config,
        out=parsed.out,
        resume=parsed.resume,
        overwrite=parsed.overwrite,
        command=shlex.join(["cribo", "embed", *words]),
        console=console,
    )
    fresh = embedded.images - embedded.reused
    before = f", {embedded.reused} already encoded" if embedded.reused else ""
    console.print(f"{counted(fresh, 'image')} in {duration(embedded.seconds)}{before}")
    print_unreadable(console, [*embedded.skipped.items()], SKIPPED)
    print_places(console, {"features": embedded.features, "about": embedded.folder / ABOUT})
