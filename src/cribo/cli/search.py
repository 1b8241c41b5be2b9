"""`cribo search`: find the objects of a collection that are most similar to a given one."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from cribo.apps.search.config import SearchConfig
from cribo.base.arguments import Parser
from cribo.base.console import importing, importing_networks
from cribo.base.wording import command_line, counted
from cribo.cli.command import Call, Command
from cribo.cli.running import print_places
from cribo.data.config import READING_SHORT

if TYPE_CHECKING:
    from cribo.apps.search.config import SearchConfig
    from cribo.apps.search.duplicates import DuplicatePair
    from cribo.apps.search.search import SearchResult

HELP = """\
Find the objects in a database of `cribo index` that are most similar to a given one.

  cribo search --db photographs.db --image ONE.jpg --point 320,200      the object at that pixel
  cribo search --db photographs.db --image ONE.jpg --box 40,60,200,180  the content of the box
  cribo search --db photographs.db --image ONE.jpg --object 3           its fourth-largest object
  cribo search --db photographs.db --image ONE.jpg                      each of its objects
  cribo search --db photographs.db --image ONE.jpg --path 'night/*' --one_per_image --min_similarity 0.6
  cribo search --db photographs.db --duplicates                         pairs of similar images

ONE.jpg may be any image. The backbone is not needed for an indexed and unchanged image, except with --box. Results are
results.json (boxes, masks in COCO format, similarities), sheet.png (a contact sheet), and coco.json with --coco.
"""

_LISTED = 20  # pairs of images


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_class_arguments(SearchConfig)
    parser.add_argument("--out", type=Path, help="folder for the results; by default searches/<image>, numbered")
    parser.add_argument("--overwrite", action="store_true", help="replace existing results in --out")


def run(call: Call) -> None:
    """Run the command."""
    config = call.build(SearchConfig)
    reads_entries = config.duplicates or config.object is not None  # of the database, without a network
    with (importing if reads_entries else importing_networks)(call.console):
        from cribo.apps.search.search import COCO, RESULTS, SHEET, search_duplicates, search_objects

    command = call.line
    if config.duplicates:
        pairs, folder = search_duplicates(
            config, out=call.options.out, overwrite=call.options.overwrite, command=command
        )
        call.console.print(_table_of_pairs(pairs))
        print_places(call.console, {"picture": folder / SHEET, "numbers": folder / RESULTS})
        return
    result = search_objects(config, out=call.options.out, overwrite=call.options.overwrite, command=command)
    call.console.print(_table(result) if any(result.found) else _nothing_found(config))
    gone = sorted(path for path, state in result.states.items() if state)
    if gone:
        call.console.print(
            f"{len(gone)} of the images were changed or deleted since they were indexed, such as {gone[0]}: "
            f"update the database with {command_line('cribo', 'index', '--db', config.db)}",
        )
    places = {"picture": result.folder / SHEET, "numbers": result.folder / RESULTS}
    print_places(call.console, {**places, **({"COCO": result.folder / COCO} if config.coco else {})})


def _table_of_pairs(pairs: "list[DuplicatePair]") -> Table:
    """Return a table of the most similar pairs."""
    table = Table(title=f"{counted(len(pairs), 'pair')} of similar images")
    for name in ("similarity", "image", "image"):
        table.add_column(name, overflow="fold")
    for pair in pairs[:_LISTED]:
        table.add_row(f"{pair.similarity:.3f}", Text(pair.first), Text(pair.second))
    if len(pairs) > _LISTED:
        table.caption = f"and {len(pairs) - _LISTED} more: see results.json"
    return table


def _nothing_found(config: "SearchConfig") -> str:
    """Return the sentence for a search without results."""
    limits = {"--path": config.path, "--min_similarity": config.min_similarity}
    given = [f"{option} {value}" for option, value in limits.items() if value is not None]
    return "no objects of other images were found" + (f" with {' and '.join(given)}" if given else "")


def _table(result: "SearchResult") -> Table:
    """Return a table of the found objects; for several queries, of the nearest object of each."""
    query, found, states, _ = result
    several = len(found) > 1
    what = "each object" if several else query.regions[0].name
    table = Table(title=Text(f"Most similar to {what} of {query.name}"))
    for name in ("query" if several else "rank", "similarity", "image", "object", "box"):
        table.add_column(name, justify="left" if name in ("query", "image", "box") else "right", overflow="fold")
    if any(states.values()):
        table.add_column("image now")
    for number, nearest in enumerate(found):
        for rank, one in enumerate(nearest[: 1 if several else None], start=1):
            table.add_row(
                query.regions[number].name if several else str(rank),
                *(f"{one.similarity:.3f}", Text(one.image)),  # a name may contain markup
                *(str(one.object.number), ",".join(map(str, one.object.box))),
                *((states.get(one.image) or "as indexed",) if any(states.values()) else ()),
            )
    if several:
        table.caption = "only the nearest object of each query; see the picture and results.json for the others"
    return table


COMMAND = Command(
    help=HELP,
    usage="cribo search --db DB --image IMAGE [--point x,y | --box x0,y0,x1,y1 | --object NUMBER] [options]\n"
    "       cribo search --db DB --duplicates [options]",
    short=READING_SHORT,
    less_memory="use --device cpu, or a smaller image",
    add_options=add_options,
    run=run,
)
