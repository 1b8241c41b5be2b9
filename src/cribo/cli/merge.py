"""`cribo merge`: join the results of jobs on shares of the images."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from cribo.base.arguments import Parser
from cribo.base.console import importing
from cribo.base.wording import command_line, counted
from cribo.cli.command import Call, Command
from cribo.cli.running import print_places, print_unreadable

HELP = """\
Join the results of cribo embed, index or segment on the shares of a collection, as one command would have written them.
Files are linked, not copied, where possible; objects are copied into a new database.

  cribo merge features/street-*of3 --out features/street
  cribo merge objects/street-*of3.lance --out s3://bucket/objects

A job array of SLURM, which works on eight shares and joins them when all have succeeded:

  #SBATCH --array=1-8
  cribo embed street --backbone SOURCE --part $SLURM_ARRAY_TASK_ID/8
  sbatch --dependency=afterok:JOB --wrap 'cribo merge features/street-*of8 --out features/street'
"""


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "parts", nargs="+", type=str, help="results of all shares: folders; for databases, folders or URLs"
    )
    parser.add_argument("--out", type=str, required=True, help="place of the joined results; it must be new")
    parser.add_argument("--overwrite", action="store_true", help="replace existing results in --out; not a database")


def run(call: Call) -> None:
    """Run the command."""
    command = call.line
    kind = _kind(call.options.parts[0], call.console)
    if kind == "embedding":
        _merge_embeddings(call.options.parts, Path(call.options.out), call.options.overwrite, command, call.console)
    elif kind == "segmentation":
        _merge_segmentations(call.options.parts, Path(call.options.out), call.options.overwrite, command, call.console)
    else:
        _merge_databases(call.options.parts, call.options.out, call.options.overwrite, call.console)


def _kind(place: str, console: Console) -> str:
    """Return the kind of results in a folder or at a URL: embedding, segmentation or database."""
    from cribo.base.errors import DataError
    from cribo.base.job import result_kind

    kind = None if "://" in place else result_kind(Path(place).expanduser())
    if kind in ("embedding", "segmentation"):
        return kind
    if kind is not None:
        raise DataError(f"{place} contains {kind} results: give results of cribo embed, index or segment")
    with importing(console):
        from cribo.apps.search.database import holds_database
        from cribo.base.files import require
    if "://" not in place:
        require(Path(place).expanduser())
    if not holds_database(place):
        raise DataError(f"{place} contains no results of cribo embed, index or segment: give results of --part i/n")
    return "database"


def _merge_embeddings(parts: Sequence[str], out: Path, overwrite: bool, command: str, console: Console) -> None:
    with importing(console):
        from cribo.apps.embed.merging import merge_embeddings
        from cribo.apps.embed.run import ABOUT, SKIPPED

    merged = merge_embeddings(parts, out=out, overwrite=overwrite, command=command)
    console.print(f"{counted(merged.images, 'image')} of {counted(len(parts), 'part')}")
    print_unreadable(console, [*merged.skipped.items()], SKIPPED)
    print_places(console, {"features": merged.features, "about": merged.folder / ABOUT})


def _merge_segmentations(parts: Sequence[str], out: Path, overwrite: bool, command: str, console: Console) -> None:
    with importing(console):
        from cribo.apps.segment.merging import merge_segmentations
        from cribo.apps.segment.results import FOLDERS, INSTANCES, SUMMARY

    merged = merge_segmentations(parts, out=out, overwrite=overwrite, command=command)
    console.print(f"{counted(merged.images, 'image')} of {counted(len(parts), 'part')}")
    print_unreadable(console, [*merged.skipped.items()], SUMMARY)
    folders = (*FOLDERS, INSTANCES) if merged.instances else FOLDERS
    print_places(console, {**{name: merged.folder / name for name in folders}, "numbers": merged.folder / SUMMARY})


def _merge_databases(parts: Sequence[str], out: str, overwrite: bool, console: Console) -> None:
    from cribo.base.errors import ConfigError

    if overwrite:
        raise ConfigError(f"--overwrite cannot replace a database: delete {out}, or choose another --out")
    with importing(console):
        from cribo.apps.search.merging import merge_databases

    merged = merge_databases(parts, out=out, console=console)
    database = merged.database
    console.print(
        f"{counted(len(database), 'object')} of {counted(database.count_images(), 'image')} of "
        f"{counted(len(parts), 'part')}"
    )
    if merged.unreadable:
        console.print(f"{counted(merged.unreadable, 'image')} could not be read")
    number, first = merged.unread
    if number:
        console.print(
            f"warning: {counted(number, 'image')} could not be read by the jobs and may be missing, such as {first}: "
            f"{command_line('cribo', 'index', '--db', database.uri)} tries again"
        )
    if merged.quality is not None:
        console.print(merged.quality.text)
    again = command_line("cribo", "search", "--db", database.uri, "--image", "IMAGE", "--point", "x,y")
    print_places(console, {"database": database.uri, "to search": again})


COMMAND = Command(
    help=HELP,
    usage="cribo merge PART [PART ...] --out FOLDER [options]",
    less_memory="merge on a machine with more memory",
    add_options=add_options,
    run=run,
)
