"""`cribo evaluate detection`: object detection with YOLOS."""

import shlex

from cribo.cli.running import BACKBONE_SHORT, BACKBONE_SWITCHES, print_places
from cribo.console import command_console, loading, log_to
from cribo.processes import is_first_process

HELP = """\
Object detection with YOLOS: the backbone with detection tokens is finetuned on images with boxes (COCO's format), and
the boxes predicted for the validation images are scored (AP, AP50, AP75).

  cribo evaluate detection --backbone runs/mine --data COCO --runtime.precision bf16-mixed
  cribo evaluate detection --backbone runs/mine --data MINE --schedule short
  cribo evaluate detection --backbone checkpoint.pth --data.train_annotations t.json --data.train_images t/ \\
                           --data.val_annotations v.json --data.val_images v/

The backbone must be a vision transformer with a [CLS] token. The paper's schedule takes days on a GPU for COCO; to
continue after an interruption, use --out FOLDER --resume. For a first try: --schedule short --limit 20 --epochs 2
Requires: pip install "cribo-ssl[detection]"
"""

LESS_MEMORY = "use --checkpointing, --runtime.precision bf16-mixed, more --devices, or a smaller --size"

_SHORT = {
    **{short: name for short, name in BACKBONE_SHORT.items() if short != "--layers"},
    "--data": "--data.root",
    "--limit": "--data.limit",
    "--devices": "--runtime.devices",
}
_SWITCHES = (*BACKBONE_SWITCHES, "--checkpointing")


def run(words: list[str]) -> None:
    """Evaluate a backbone."""
    from cribo.cli.evaluate.options import add_resume, configuration, evaluation_parser
    from cribo.evaluation.detection.config import DetectionConfig

    # All ranks run this command; only rank 0 prints.
    console = command_console(quiet=not is_first_process())
    log_to(console)
    parser = evaluation_parser(
        "detection",
        HELP,
        data="DIR",
        drawn="the boxes are drawn",
        short=_SHORT,
        switches=_SWITCHES,
    )
    add_resume(parser)
    config, how = configuration(parser, words, DetectionConfig)
    with loading(console):
        from cribo.evaluation.detection.run import DETECTIONS, DETECTOR, evaluate_detection
        from cribo.evaluation.results import percent, result_tables
    command = shlex.join(["cribo", "evaluate", "detection", *words])
    result, folder = evaluate_detection(config, **how, command=command, console=console)
    if not is_first_process():
        return
    for table in result_tables(result):
        console.print(table)
    sizes = " · ".join(f"{size} {percent(value)}" for size, value in result.results[0]["by_size"].items())
    console.print(f"AP by the size of objects [%]: {sizes}")
    print_places(
        console,
        {
            "numbers": folder / "results.json",
            "found": folder / DETECTIONS,
            "detector": folder / DETECTOR,
            "pictures": folder / "*.png",
            "curves": f"tensorboard --logdir {folder / 'tensorboard'}",
        },
    )
