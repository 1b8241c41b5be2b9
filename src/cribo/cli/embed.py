"""`cribo embed`: write the features of many images to files."""

from cribo.apps.embed.config import EmbedConfig
from cribo.base.arguments import Parser
from cribo.base.console import duration, importing_networks
from cribo.base.wording import counted
from cribo.cli.command import Call, Command
from cribo.cli.running import BACKBONE_SHORT, add_results_folder, print_places, print_unreadable
from cribo.data.config import READING_SHORT

HELP = """\
Write the features of many images to Parquet, Lance, NumPy or safetensors files.

  cribo embed IMAGES --backbone SOURCE                         a vector for each image
  cribo embed IMAGES --backbone SOURCE --features patches      one for each patch, with row and column
  cribo embed IMAGES --backbone SOURCE --features objects      one for each object, with box and area
  cribo embed IMAGES --backbone SOURCE --map umap              and x, y of each vector, to show them as points
  cribo embed IMAGES --backbone SOURCE --engine ray            on several GPUs, or on a cluster

IMAGES is a folder (read recursively), a text file that lists images, tar shards, Parquet files, or a URL of any of
these. Features are written in parts as they are computed, so that memory is bounded. To continue after an interruption,
repeat the command with --resume. For a job array: --part 3/8 in the third of eight jobs, then cribo merge.
"""


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    add_results_folder(parser, "features/<images>")
    parser.add_class_arguments(EmbedConfig)


def run(call: Call) -> None:
    """Run the command."""
    config = call.build(EmbedConfig)
    with importing_networks(call.console):
        from cribo.apps.embed.run import ABOUT, SKIPPED, embed_images

    embedded = embed_images(
        config,
        out=call.options.out,
        resume=call.options.resume,
        overwrite=call.options.overwrite,
        command=call.line,
        console=call.console,
    )
    fresh = embedded.images - embedded.reused
    before = f", {embedded.reused} already encoded" if embedded.reused else ""
    call.console.print(f"{counted(fresh, 'image')} in {duration(embedded.seconds)}{before}")
    print_unreadable(call.console, [*embedded.skipped.items()], SKIPPED)
    drawn = {} if embedded.map is None else {"map": embedded.map}
    print_places(call.console, {"features": embedded.features, **drawn, "about": embedded.folder / ABOUT})


COMMAND = Command(
    help=HELP,
    by_position=["--images"],
    usage="cribo embed IMAGES --backbone SOURCE [options]",
    short={**BACKBONE_SHORT, **READING_SHORT},
    less_memory="lower --batch_size, or --size",
    add_options=add_options,
    run=run,
)
