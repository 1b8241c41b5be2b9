"""`cribo explore`: a page to look at what was learned."""

from pathlib import Path

from rich.console import Console

from cribo.cli.running import BACKBONE_SHORT, BACKBONE_SWITCHES, guarded
from cribo.console import loading, log_to

HELP = """\
Open a page to look at what was learned: the curves of a run, its view pairs and their clusters, nearest objects across
a collection of images, features as colours, and segmentation from a few painted examples.

  cribo explore --run runs/camvid                       a run; objects of some of its images are found at the start
  cribo explore --db street.db                          a database of objects, as cribo index makes one
  cribo explore --run runs/camvid --db street.db        both
  cribo explore --backbone vit_small_patch16_224.dino --images PHOTOGRAPHS

The page is for this machine alone (127.0.0.1). To open it to others, give --host 0.0.0.0: whoever reaches the port can
then see the images. Nothing is sent to, or loaded from, anywhere else. Ctrl-C ends it.
"""

LESS_MEMORY = "lower --max_megapixels, or use --device cpu"


def main(words: list[str]) -> int:
    """Run the command."""
    return guarded("cribo explore", _explore, words, less_memory=LESS_MEMORY)


def _explore(words: list[str]) -> None:
    from cribo.arguments import Parser
    from cribo.explorer.config import Asked, Limits
    from cribo.retrieval.source import BackboneSource

    console = Console(soft_wrap=True)
    log_to(console)
    parser = Parser(
        prog="cribo explore",
        description=HELP,
        usage="cribo explore [--run DIR] [--db DIR] [--backbone SOURCE] [--images DIR] [options]",
        short=BACKBONE_SHORT,
        switches=BACKBONE_SWITCHES,
    )
    parser.add_argument("--run", type=Path, help="a run folder, as cribo pretrain makes one; it may still be going on")
    parser.add_argument("--db", type=str, help="a database of objects, a folder or URL, as cribo index makes one")
    parser.add_argument("--images", type=Path, help="a folder of images, if they are not where run or database say")
    parser.add_argument(
        "--limit", type=int, default=100, help="of how many images objects are found at the start, without --db"
    )
    parser.add_argument("--host", type=str, default="127.0.0.1", help="0.0.0.0 lets other machines see the page")
    parser.add_argument("--port", type=int, default=7860, help="of the page; 0 takes a free one")
    parser.add_argument("--max_megabytes", type=float, default=20.0, help="of a picture that is dropped on the page")
    parser.add_argument("--max_megapixels", type=float, default=40.0, help="of such a picture")
    parser.add_argument("--device", type=str, help="of the network, such as cuda:0; a GPU if there is one")
    parser.add_class_arguments(BackboneSource, "backbone", skip={"source"})
    parser.add_argument(
        "--backbone.source",
        type=str,
        help="whose features are shown, if not those of the database or of the run: a run folder, a checkpoint, timm's "
        "name, or mean-colour",
    )
    parsed = parser.parse_args(words)
    limits = Limits(megabytes=parsed.max_megabytes, megapixels=parsed.max_megapixels)
    asked = Asked(
        run=parsed.run,
        db=parsed.db,
        backbone=None if parsed.backbone.source is None else BackboneSource(**vars(parsed.backbone)),
        images=parsed.images,
        limit=parsed.limit,
        device=parsed.device,
    )
    with loading(console):
        from cribo.explorer.run import explore

    explore(asked, host=parsed.host, port=parsed.port, limits=limits, console=console)
