"""`cribo distill`: train a network to predict the dense features of another one."""

from rich.console import Console

from cribo.base.console import importing
from cribo.base.wording import command_line
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

LESS_MEMORY = """set --training '{"optim.micro_batches": 2}'"""


def run(words: list[str], console: Console) -> None:
    """Run the command."""
    from cribo.apps.adapt.config import DistillConfig
    from cribo.base.arguments import Parser

    parser = Parser(
        prog="cribo distill",
        description=HELP,
        by_position=["--images"],
        usage="cribo distill IMAGES --teacher SOURCE --backbone SOURCE [options]",
        short={**BACKBONE_SHORT, **READING_SHORT, "--teacher": "--teacher.source"},
    )
    add_named_results(parser, "distillation", "distilled", "student")
    parser.add_class_arguments(DistillConfig)
    parser.explain("--backbone.source", NETWORK)
    parser.explain("--teacher.source", NETWORK)
    parsed = parser.parse_args(words)
    config = parser.build(DistillConfig, parsed)
    with importing(console):
        from cribo.apps.adapt.distilling import distill
        from cribo.apps.adapt.sequence import VERDICT
        from cribo.models.saving import WEIGHTS_FILE

    distilled = distill(
        config, out=parsed.out, name=parsed.name, resume=parsed.resume, overwrite=parsed.overwrite, console=console
    )
    console.print()
    for sentence in distilled.verdict.sentences:
        console.print(sentence)
    print_places(
        console,
        {
            "backbone": distilled.folder / WEIGHTS_FILE,
            "verdict": distilled.folder / VERDICT,
            "to use it": command_line("cribo", "segment", "--backbone", distilled.folder, "..."),
        },
    )
