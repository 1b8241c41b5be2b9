"""`cribo evaluate detection`: object detection with YOLOS."""

import shlex
from pathlib import Path

from rich.console import Console

from cribo.cli.running import BACKBONE_SHORT, BACKBONE_SWITCHES, print_places
from cribo.console import log_to
from cribo.processes import is_first_process

HELP = """\
Object detection with YOLOS: the backbone gets detection tokens and is finetuned as a whole on images with boxes
(COCO's format); the boxes that it finds in the validation images are scored (AP, AP50, AP75).

  cribo evaluate detection --backbone runs/mine --data COCO --runtime.precision bf16-mixed
  cribo evaluate detection --backbone runs/mine --data MINE --schedule short
  cribo evaluate detection --backbone checkpoint.pth --data.train_annotations t.json --data.train_images t/ \\
                           --data.val_annotations v.json --data.val_images v/

The backbone must be a vision transformer with a [CLS] token. The paper's schedule takes days of a GPU on COCO:
--out FOLDER --resume goes on where it was stopped. A first try: --schedule short --limit 20 --epochs 2
Needs: pip install "cribo-ssl[detection]"
"""

LESS_MEMORY = "give --checkpointing, --runtime.precision bf16-mixed, more --devices, or a smaller --size"

_SHORT = {
    **{short: name for short, name in BACKBONE_SHORT.items() if short != "--layers"},
    "--data": "--data.root",
    "--limit": "--data.limit",
    "--devices": "--runtime.devices",
}
_SWITCHES = (*BACKBONE_SWITCHES, "--checkpointing")


def run(words: list[str]) -> None:
    """Evaluate a backbone."""
    from cribo.arguments import Parser
    from cribo.evaluation.detection.config import DetectionConfig
    from cribo.evaluation.detection.run import DETECTIONS, DETECTOR, evaluate_detection
    from cribo.evaluation.results import percent, result_tables

    # The processes of further devices run this command too, and have nothing to add to what the first one says.
    console = Console(soft_wrap=True, quiet=not is_first_process())
    log_to(console)
    parser = Parser(
        prog="cribo evaluate detection",
        description=HELP,
        usage="cribo evaluate detection --backbone SOURCE --data DIR [options]",
        short=_SHORT,
        switches=_SWITCHES,
    )
    parser.add_argument(
        "--out", type=Path, help="folder for results and pictures; evaluations/detection-..., numbered, by default"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what stands in --out")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with what stands in --out, if there is something: for schedulers that start a command again",
    )
    parser.add_argument("--pictures", type=int, default=6, help="of how many images the boxes are drawn")
    parser.add_argument("--config", action="config", help="a YAML file with options, which the others override")
    parser.add_class_arguments(DetectionConfig)
    parsed = parser.parse_args(words)
    made = parser.instantiate(parsed)
    config = DetectionConfig(**{name: made[name] for name in DetectionConfig.__dataclass_fields__})
    result, folder = evaluate_detection(
        config,
        out=parsed.out,
        overwrite=parsed.overwrite,
        resume=parsed.resume,
        pictures=parsed.pictures,
        command=shlex.join(["cribo", "evaluate", "detection", *words]),
        console=console,
    )
    if not is_first_process():
        return
    for table in result_tables(result):
        console.print(table)
    sizes = " · ".join(f"{size} {percent(value)}" for size, value in result.results[0]["by_size"].items())
    console.print(f"AP by the size of objects [%]: {sizes}", highlight=False)
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
