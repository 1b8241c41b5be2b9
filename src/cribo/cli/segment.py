"""`cribo segment`: label the pixels of many images by a few labelled examples."""

import shlex
from pathlib import Path

from rich.table import Table

from cribo.cli.running import BACKBONE_SHORT, BACKBONE_SWITCHES, guarded, print_places
from cribo.console import command_console, loading, log_to

HELP = """\
Label the pixels of many images by a few labelled examples; two are enough to begin. The backbone is not trained. Its
blocks, whitening, and the head (nearest neighbours, ridge regression or both) are chosen by leaving out examples. The
command prints the choice and the mIoU to expect.

  cribo segment --backbone runs/mine --examples EXAMPLES --images FRAMES --out RESULT
  cribo segment --backbone runs/mine --examples EXAMPLES --images FRAMES --out RESULT --memory mine.safetensors
  cribo segment --backbone runs/mine --memory mine.safetensors --images 'MORE/**/*.jpg' --out RESULT2

EXAMPLES contains a.jpg and a.png (or a_labels.png), or images/a.jpg and labels/a.png, or images and one JSON file in
COCO's format. RESULT receives label maps, overlays, confidences, summary.csv and contact.png. To continue after an
interruption, repeat the command with --resume. If classes are confused, add examples of them; --suggest 5 names images
that show what is uncertain. If small things are missed in large images, use --scale 1 --window 448. If it is too slow,
use --size 384.
"""

LESS_MEMORY = "lower --batch_size or --size, or use --window"


def main(words: list[str]) -> int:
    """Run the command."""
    return guarded("cribo segment", _segment, words, less_memory=LESS_MEMORY)


def _segment(words: list[str]) -> None:
    from cribo.arguments import Parser
    from cribo.segmentation.config import SegmentConfig

    console = command_console()
    log_to(console)
    parser = Parser(
        prog="cribo segment",
        description=HELP,
        usage="cribo segment --backbone SOURCE --examples DIR --images DIR --out DIR [options]",
        short=BACKBONE_SHORT,
        switches=BACKBONE_SWITCHES,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results; it must be new")
    parser.add_argument("--resume", action="store_true", help="continue the interrupted command that wrote to --out")
    parser.add_argument("--overwrite", action="store_true", help="replace existing results in --out")
    parser.add_argument("--pictures", type=int, default=6, help="number of images in contact.png")
    parser.add_argument("--suggest", type=int, default=0, help="number of images to suggest for labelling next")
    parser.add_argument("--config", action="config", help="a YAML file of options, overridden by the command line")
    parser.add_class_arguments(SegmentConfig)
    parsed = parser.parse_args(words)
    made = parser.instantiate(parsed)
    config = SegmentConfig(**{name: made[name] for name in SegmentConfig.__dataclass_fields__})
    with loading(console):
        from cribo.segmentation.run import OVERVIEW, SUGGESTED, SUMMARY, segment_images, speed

    segmented = segment_images(
        config,
        out=parsed.out,
        resume=parsed.resume,
        overwrite=parsed.overwrite,
        pictures=parsed.pictures,
        suggestions=parsed.suggest,
        command=shlex.join(["cribo", "segment", *words]),
        console=console,
    )
    table = Table(title="Share of each class in all images")
    table.add_column("class")
    table.add_column("pixels", justify="right")
    for name, share in segmented.shares.items():
        table.add_row(name, f"{share:.1%}")
    console.print(table)
    console.print(speed(segmented))
    if segmented.skipped:
        console.print(f"{len(segmented.skipped)} could not be read: {', '.join(segmented.skipped)}")
    print_places(
        console,
        {
            "labels": segmented.folder / "labels",
            "overlays": segmented.folder / "overlays",
            "confidence": segmented.folder / "confidence",
            "numbers": segmented.folder / SUMMARY,
            **({"overview": segmented.folder / OVERVIEW} if parsed.pictures else {}),
            **({"label next": segmented.folder / SUGGESTED} if parsed.suggest else {}),
        },
    )
