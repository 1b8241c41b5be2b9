"""`cribo adapt`: adapt a pretrained backbone to a folder of images."""

from cribo.apps.adapt.config import AdaptConfig
from cribo.base.arguments import Parser
from cribo.base.console import importing_networks
from cribo.base.wording import command_line
from cribo.cli.command import Call, Command
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


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    add_named_results(parser, "adaptation", "adapted", "backbone")
    parser.add_class_arguments(AdaptConfig)
    parser.explain("--backbone.source", NETWORK)


def run(call: Call) -> None:
    """Run the command."""
    config = call.build(AdaptConfig)
    with importing_networks(call.console):
        from cribo.apps.adapt.run import PICTURE, adapt
        from cribo.apps.adapt.sequence import VERDICT
        from cribo.models.saving import WEIGHTS_FILE

    adapted = adapt(
        config,
        out=call.options.out,
        name=call.options.name,
        resume=call.options.resume,
        overwrite=call.options.overwrite,
        console=call.console,
    )
    call.console.print()
    for sentence in adapted.verdict.sentences:
        call.console.print(sentence)
    print_places(
        call.console,
        {
            "backbone": adapted.folder / WEIGHTS_FILE,
            "verdict": adapted.folder / VERDICT,
            "picture": adapted.folder / PICTURE,
            "to use it": command_line("cribo", "segment", "--backbone", adapted.folder, "..."),
        },
    )


COMMAND = Command(
    help=HELP,
    by_position=["--images"],
    usage="cribo adapt IMAGES --backbone SOURCE [options]",
    short={**BACKBONE_SHORT, **READING_SHORT},
    suggestions={"--backbone": SUGGESTION},
    less_memory="""set --training '{"optim.micro_batches": 2}'""",
    add_options=add_options,
    run=run,
)
