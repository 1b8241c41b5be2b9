"""`cribo evaluate image-nn`: image-level nearest neighbours."""

import shlex

from rich.console import Console

from cribo.cli.running import BACKBONE_SHORT, BACKBONE_SWITCHES, print_places
from cribo.console import loading, log_to

HELP = """\
Image-level nearest neighbours: an image takes the class that its most similar training images vote for, by the
backbone's global tokens; nothing is trained, and the classes are scored (top-1, top-5), as in DINO.

  cribo evaluate image-nn --backbone runs/imagenet --data imagenet --data.root ILSVRC2012
  cribo evaluate image-nn --backbone vit_small_patch16_224.dino --data folder --data.root MINE
  cribo evaluate image-nn --backbone mean-colour --data folder --data.root MINE

A folder holds train/<class>/* and val/<class>/*, or, without a split, <class>/*: each image is then classified by all
the others. Where images come in series (frames of one film, crops of one photograph), give a split that keeps each
series on one side: else an image finds its own series, and the score says little of new images.

Features are kept on disk. What was interrupted goes on where it stopped when the same command is given again, and the
next evaluation of the same backbone and images begins with the search. A first try: --limit 200
"""

_SHORT = {
    **{option: long for option, long in BACKBONE_SHORT.items() if option != "--layers"},
    "--data": "--data.name",
    "--limit": "--data.limit",
    "--cache": "--runtime.cache",
    "--devices": "--runtime.devices",
}
_SWITCHES = (*BACKBONE_SWITCHES, "--data.partial")

LESS_MEMORY = "lower --runtime.batch_size or --runtime.memory_gib"


def run(words: list[str]) -> None:
    """Evaluate a backbone."""
    from cribo.cli.evaluate.options import configuration, evaluation_parser
    from cribo.evaluation.image_neighbours.config import ImageNNConfig

    console = Console(soft_wrap=True)
    log_to(console)
    parser = evaluation_parser("image-nn", HELP, drawn="the nearest ones are drawn", short=_SHORT, switches=_SWITCHES)
    config, how = configuration(parser, words, ImageNNConfig)
    with loading(console):
        from cribo.evaluation.image_neighbours.run import confused_table, evaluate_image_nn
        from cribo.evaluation.results import result_tables
    command = shlex.join(["cribo", "evaluate", "image-nn", *words])
    result, folder = evaluate_image_nn(config, **how, command=command, console=console)
    for table in (*result_tables(result), *confused_table(result)):
        console.print(table)
    print_places(console, {"numbers": folder / "results.json", "pictures": folder / "*.png"})
