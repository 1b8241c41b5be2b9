"""`cribo evaluate dense-nn`: dense nearest-neighbour retrieval."""

import shlex

from cribo.cli.running import BACKBONE_SHORT, BACKBONE_SWITCHES, print_places
from cribo.console import command_console, loading, log_to

HELP = """\
Dense nearest-neighbour retrieval: every patch of a new image takes its label from the most similar patches of
labelled images, and the labels are scored (mIoU). Nothing is trained.

  cribo evaluate dense-nn --backbone runs/camvid --data camvid --data.root CAMVID
  cribo evaluate dense-nn --backbone checkpoint.pth --data voc --data.root VOCdevkit/VOC2012
  cribo evaluate dense-nn --backbone vit_small_patch16_224.dino --data folder --data.root MINE

--protocol hummingbird follows "Towards in-context scene understanding". Features are cached on disk: the next
evaluation of the same backbone and images starts with the search. For a first try: --data.limit 50 --ratios 1
"""

_SHORT = {**BACKBONE_SHORT, "--data": "--data.name", "--cache": "--runtime.cache", "--devices": "--runtime.devices"}
_SWITCHES = (*BACKBONE_SWITCHES, "--data.partial")

LESS_MEMORY = "lower --runtime.batch_size or --runtime.memory_gib"


def run(words: list[str]) -> None:
    """Evaluate a backbone."""
    from cribo.cli.evaluate.options import configuration, evaluation_parser
    from cribo.evaluation.dense_neighbours.config import DenseNNConfig

    console = command_console()
    log_to(console)
    parser = evaluation_parser("dense-nn", HELP, short=_SHORT, switches=_SWITCHES)
    config, how = configuration(parser, words, DenseNNConfig)
    with loading(console):
        from cribo.evaluation.dense_neighbours.run import evaluate_dense_nn
        from cribo.evaluation.results import result_tables
    command = shlex.join(["cribo", "evaluate", "dense-nn", *words])
    result, folder = evaluate_dense_nn(config, **how, command=command, console=console)
    for table in result_tables(result):
        console.print(table)
    print_places(console, {"numbers": folder / "results.json", "pictures": folder / "*.png"})
