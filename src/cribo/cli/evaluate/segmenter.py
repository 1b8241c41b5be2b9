"""`cribo evaluate segmenter`: a backbone finetuned end to end."""

import shlex

from cribo.console import command_console, loading, log_to
from cribo.processes import is_first_process

HELP = """\
Finetuning with Segmenter: the backbone is trained end to end with a mask transformer on its tokens (two blocks,
one learnable token per class), and the labels of the validation images are scored (mIoU). Each learning rate is
trained separately from the same weights; the best one is reported, and its network is saved.

  cribo evaluate segmenter --backbone runs/coco --data voc --data.root VOCdevkit/VOC2012 \\
      --runtime.precision bf16-mixed --out segmenter-voc --resume
  cribo evaluate segmenter --backbone runs/camvid --data camvid --data.root CAMVID --schedule short
  cribo evaluate segmenter --backbone vit_small_patch16_224.dino --data folder --data.root MINE \\
      --iterations 20000 --learning_rates 3e-5

The default settings are the paper's: 80,000 iterations of 16 crops of 512 pixels at four learning rates take 1.1e18
floating-point operations for a ViT-S/16 (ViT-B/16: 3.9e18), and 160,000 iterations twice that. This takes hours to
days on GPUs with --runtime.precision bf16-mixed, and is not feasible on CPUs. To reduce it, use one learning rate (a
quarter), fewer --iterations, or --schedule short, which takes minutes for a small network on a laptop. Scores are only
comparable between equal settings. For a first try: --schedule short --limit 20 --iterations 20 --learning_rates 1e-3

If a GPU runs out of memory: --checkpointing selective, more --devices, or a smaller --batch_size.
"""

LESS_MEMORY = "use --checkpointing selective (vision transformers), or lower --batch_size or --crop"


def run(words: list[str]) -> None:
    """Finetune and evaluate a backbone."""
    from cribo.cli.evaluate.trained import parse, print_result
    from cribo.evaluation.segmentation.config import SegmenterConfig

    # All ranks run this command; only rank 0 prints.
    console = command_console(quiet=not is_first_process())
    log_to(console)
    config, how = parse("segmenter", words, SegmenterConfig, HELP)
    with loading(console):
        from cribo.evaluation.segmentation.finetuning import evaluate_segmenter
        from cribo.evaluation.segmentation.trained import SEGMENTER_FILE
    command = shlex.join(["cribo", "evaluate", "segmenter", *words])
    result, folder = evaluate_segmenter(config, **how, command=command, console=console)
    if is_first_process():
        places = {"curves": folder / "lr=*" / "tensorboard", "network": folder / SEGMENTER_FILE}
        print_result(console, result, folder, also=places)
