"""`cribo evaluate linear`: a linear head on frozen features."""

import shlex

from cribo.console import command_console, loading, log_to
from cribo.processes import is_first_process

HELP = """\
Linear segmentation: one linear layer is trained on the patch tokens of the frozen backbone, its logits are
upsampled to pixels, and the labels of the validation images are scored (mIoU). All learning rates are trained
in one pass over the features; the best one is reported.

  cribo evaluate linear --backbone runs/coco --data voc --data.root VOCdevkit/VOC2012
  cribo evaluate linear --backbone vit_small_patch16_224.dino --data ade20k --data.root ADEChallengeData2016 \\
      --layers 4 --runtime.precision bf16-mixed --out linear-ade20k --resume
  cribo evaluate linear --backbone runs/camvid --data camvid --data.root CAMVID --schedule short

The default settings are the paper's: 80,000 or 160,000 iterations of 16 crops of 512 pixels, which take hours on a
GPU. --schedule short takes minutes on a laptop; its scores are only comparable with each other. For a first try:
--schedule short --limit 20 --iterations 20
"""

LESS_MEMORY = "lower --batch_size or --crop"


def run(words: list[str]) -> None:
    """Evaluate a backbone."""
    from cribo.cli.evaluate.trained import parse, print_result
    from cribo.evaluation.segmentation.config import LinearConfig

    # All ranks run this command; only rank 0 prints.
    console = command_console(quiet=not is_first_process())
    log_to(console)
    config, how = parse("linear", words, LinearConfig, HELP)
    with loading(console):
        from cribo.evaluation.segmentation.run import evaluate_linear
    command = shlex.join(["cribo", "evaluate", "linear", *words])
    result, folder = evaluate_linear(config, **how, command=command, console=console)
    if is_first_process():
        print_result(console, result, folder)
