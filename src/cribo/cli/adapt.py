"""`cribo adapt`: adapt a pretrained backbone to a folder of images."""

from rich.console import Console

from cribo.base.console import importing
from cribo.base.wording import command_line
from cribo.cli.running import BACKBONE_SHORT, NETWORK, SUGGESTED, SUGGESTION, add_named_results, print_places
from cribo.data.config import READING_SHORT

HELP = f"""\
Adapt a pretrained backbone to your images: without labels, in a quarter of an hour on a laptop.

  cribo adapt IMAGES --backbone SOURCE
  cribo adapt IMAGES --backbone SOURCE --minutes 1
  cribo adapt IMAGES --backbone SOURCE --labelled SOME_LABELLED --second OTHER_LABELLED

IMAGES is a folder (read recursively), or a text file that lists images. First, a linear layer is fitted in closed form
to the patches of the images (about a minute; --minutes 1 stops here). Then the last blocks are trained to give the
same place the same features in two views. At the end, the command reports whether this helped: by dense retrieval and
by segmentation on labelled images (at least ten), or without labels by neighbour agreement across views. It exports the
best network, which evaluate, segment, index and export take as --backbone. To continue after an interruption, repeat
the command with --name NAME --resume.

Without a backbone of your own, start with --backbone {SUGGESTED} (licence apache-2.0).
"""

LESS_MEMORY = """set --training '{"optim.micro_batches": 2}'"""


def run(words: list[str], console: Console) -> None:
    """Run the command."""
    from cribo.apps.adapt.config import AdaptConfig
    from cribo.base.arguments import Parser

    parser = Parser(
        prog="cribo adapt",
        description=HELP,
        by_position=["--images"],
        usage="cribo adapt IMAGES --backbone SOURCE [options]",
        short={**BACKBONE_SHORT, **READING_SHORT},
        suggestions={"--backbone": SUGGESTION},
    )
    add_named_results(parser, "adaptation", "adapted", "backbone")
    parser.add_class_arguments(AdaptConfig)
    parser.explain("--backbone.source", NETWORK)
    parsed = parser.parse_args(words)
    config = parser.build(AdaptConfig, parsed)
    with importing(console):
        from cribo.apps.adapt.run import PICTURE, adapt
        from cribo.apps.adapt.sequence import VERDICT
        from cribo.models.saving import WEIGHTS_FILE

    adapted = adapt(
        config, out=parsed.out, name=parsed.name, resume=parsed.resume, overwrite=parsed.overwrite, console=console
    )
    console.print()
    for sentence in adapted.verdict.sentences:
        console.print(sentence)
    print_places(
        console,
        {
            "backbone": adapted.folder / WEIGHTS_FILE,
            "verdict": adapted.folder / VERDICT,
            "picture": adapted.folder / PICTURE,
            "to use it": command_line("cribo", "segment", "--backbone", adapted.folder, "..."),
        },
    )
