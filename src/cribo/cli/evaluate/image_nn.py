"""`cribo evaluate image-nn`: image-level nearest neighbours."""

import shlex

from cribo.cli.running import BACKBONE_SHORT, BACKBONE_SWITCHES, print_places
from cribo.console import command_console, loading, log_to

HELP = """\
Image-level nearest neighbours: each image is classified by a vote of the training images with the most similar global
tokens, as in DINO, and the classes are scored (top-1, top-5). Nothing is trained.

  cribo evaluate image-nn --backbone runs/imagenet --data imagenet --data.root ILSVRC2012
  cribo evaluate image-nn --backbone vit_small_patch16_224.dino --data folder --data.root MINE
  cribo evaluate image-nn --backbone mean-colour --data folder --data.root MINE

A folder contains train/<class>/* and val/<class>/*, or, without a split, <class>/*: each image is then classified by
all others. If images come in series (frames of one film, crops of one photograph), provide a split that keeps each
series on one side; otherwise images are classified by their own series, and the score is too high.

Features are cached on disk. An interrupted evaluation continues when the same command is repeated, and the next
evaluation of the same backbone and images starts with the search. For a first try: --limit 200
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

    console = command_console()
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
