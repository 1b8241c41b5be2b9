"""`cribo distill`: train a network to predict the dense features of another one."""

from cribo.apps.adapt.config import DistillConfig
from cribo.base.arguments import Parser
from cribo.base.console import importing_networks
from cribo.base.wording import command_line
from cribo.cli.command import Call, Command
from cribo.cli.running import BACKBONE_SHORT, NETWORK, add_named_results, print_places
from cribo.data.config import READING_SHORT

HELP = """\
Train a small network to predict the dense features of another one, on your images and without labels.

  cribo distill IMAGES --teacher SOURCE --backbone SOURCE
  cribo distill IMAGES --teacher adapted/vits14-adapted --backbone resnet18.a1_in1k
  cribo distill IMAGES --teacher SOURCE --backbone SOURCE --minutes 60 --labelled SOME_LABELLED

IMAGES is a folder (read recursively), or a text file that lists images. The teacher is any network that the other
commands take, also an adapted one; its architecture, width and patch size may differ from the student's. The student
starts from its own weights, or from random ones with --pretrained false. First, a linear layer is fitted behind it that
predicts the teacher's patches (about a minute). Then the student is trained so that its features become the teacher's.
At the end, the command reports whether this helped: by dense retrieval and by segmentation on labelled images (at least
ten), or by how well the teacher is predicted. It exports the best network, which evaluate, segment, index and export
take as --backbone. To continue after an interruption, repeat the command with --name NAME --resume.
"""


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    add_named_results(parser, "distillation", "distilled", "student")
    parser.add_class_arguments(DistillConfig)
    parser.explain("--backbone.source", NETWORK)
    parser.explain("--teacher.source", NETWORK)


def run(call: Call) -> None:
    """Run the command."""
    config = call.build(DistillConfig)
    with importing_networks(call.console):
        from cribo.apps.adapt.distilling import distill
        from cribo.apps.adapt.sequence import VERDICT
        from cribo.models.saving import WEIGHTS_FILE

    distilled = distill(
        config,
        out=call.options.out,
        name=call.options.name,
        resume=call.options.resume,
        overwrite=call.options.overwrite,
        console=call.console,
    )
    call.console.print()
    for sentence in distilled.verdict.sentences:
        call.console.print(sentence)
    print_places(
        call.console,
        {
            "backbone": distilled.folder / WEIGHTS_FILE,
            "verdict": distilled.folder / VERDICT,
            "to use it": command_line("cribo", "segment", "--backbone", distilled.folder, "..."),
        },
    )


COMMAND = Command(
    help=HELP,
    by_position=["--images"],
    usage="cribo distill IMAGES --teacher SOURCE --backbone SOURCE [options]",
    short={**BACKBONE_SHORT, **READING_SHORT, "--teacher": "--teacher.source"},
    less_memory="""set --training '{"optim.micro_batches": 2}'""",
    add_options=add_options,
    run=run,
)
