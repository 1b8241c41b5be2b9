"""`cribo segment`: label the pixels of many images given a few labelled examples."""

import shlex
from dataclasses import fields

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cribo.base.console import importing
from cribo.cli.running import (
    BACKBONE_SHORT,
    SUGGESTED,
    SUGGESTION,
    add_results_folder,
    print_places,
    print_unreadable,
)

HELP = f"""\
Label the pixels of many images given a few labelled examples; two are enough to start. The backbone is not trained. Its
blocks, whitening, and the head (nearest neighbours, ridge regression or both) are chosen by cross-validation over the
examples. The command prints the choice and the expected mIoU.

  cribo segment FRAMES --backbone runs/mine --examples EXAMPLES
  cribo segment FRAMES --backbone runs/mine --examples EXAMPLES --memory mine.safetensors
  cribo segment 'MORE/**/*.jpg' --backbone runs/mine --memory mine.safetensors --out RESULT
  cribo segment --memory mine.safetensors --list               list its examples with their accuracy when left out
  cribo segment --memory mine.safetensors --remove a.jpg 7     remove examples by name or number

EXAMPLES contains a.jpg and a.png (or a_labels.png), or images/a.jpg and labels/a.png, or images and one JSON file in
COCO format. Label maps contain class indices (255: no class), only 0 and 255, or colours that classes.txt lists. The
results are label maps, overlays, confidences, summary.csv and contact.png. To continue after an interruption, repeat
the command with --resume. If classes are confused, add examples of them; --suggest 5 lists images with uncertain
labels. If small objects are missed in large images, use --scale 1 --window 448. If it is too slow, use --size 384, or
--engine ray for several GPUs or machines.

Without a backbone of your own, start with --backbone {SUGGESTED} (licence apache-2.0).
"""

LESS_MEMORY = "lower --batch_size or --size, or use --window"


def run(words: list[str], console: Console) -> None:
    """Run the command."""
    from cribo.apps.segment.config import SegmentConfig
    from cribo.apps.segment.settings import SegmentationSettings
    from cribo.base.arguments import Parser

    if {"--list", "--remove"} & {word.partition("=")[0] for word in words}:
        _edit_memory(words, console)
        return
    parser = Parser(
        prog="cribo segment",
        description=HELP,
        usage="cribo segment IMAGES --backbone SOURCE --examples DIR [options]",
        by_position=["--images"],
        short=BACKBONE_SHORT,
        suggestions={"--backbone": SUGGESTION},
    )
    add_results_folder(parser, "segmented/<images>")
    parser.add_argument("--pictures", type=int, default=6, help="number of images in contact.png")
    parser.add_argument("--suggest", type=int, default=0, help="number of images to suggest for labelling next")
    parser.add_argument("--coco", action="store_true", help="also write all labels to coco.json, in COCO format")
    parser.add_class_arguments(SegmentConfig, skip={"settings"})
    parser.add_class_arguments(SegmentationSettings)
    parsed = parser.parse_args(words)
    given = vars(parser.parse_args(words, defaults=False))  # others are those of the memory file
    settings = {field.name: given[field.name] for field in fields(SegmentationSettings) if field.name in given}
    config = parser.build(SegmentConfig, parsed, settings=settings)
    with importing(console):
        from cribo.apps.segment.run import COCO, OVERVIEW, SUGGESTED, SUMMARY, segment_images

    segmented = segment_images(
        config,
        out=parsed.out,
        resume=parsed.resume,
        overwrite=parsed.overwrite,
        pictures=parsed.pictures,
        suggestions=parsed.suggest,
        coco=parsed.coco,
        command=shlex.join(["cribo", "segment", *words]),
        console=console,
    )
    table = Table(title="Share of each class in all images")
    table.add_column("class")
    table.add_column("pixels", justify="right")
    for name, share in segmented.shares.items():
        table.add_row(name, f"{share:.1%}")
    console.print(table)
    console.print(segmented.speed)
    print_unreadable(console, [*segmented.skipped.items()], SUMMARY)
    print_places(
        console,
        {
            "labels": segmented.folder / "labels",
            "overlays": segmented.folder / "overlays",
            "confidence": segmented.folder / "confidence",
            "numbers": segmented.folder / SUMMARY,
            **({"overview": segmented.folder / OVERVIEW} if parsed.pictures else {}),
            **({"COCO": segmented.folder / COCO} if parsed.coco else {}),
            **({"label next": segmented.folder / SUGGESTED} if parsed.suggest else {}),
        },
    )


def _edit_memory(words: list[str], console: Console) -> None:
    """Print the examples of a memory, after removing those of --remove."""
    from cribo.base.arguments import Parser

    parser = Parser(prog="cribo segment", usage="cribo segment --memory FILE (--list | --remove EXAMPLE ...)")
    parser.add_argument("--memory", type=str, required=True, help="file of the memory")
    parser.add_argument("--list", action="store_true", help="list its examples")
    parser.add_argument("--remove", type=str, nargs="+", default=[], help="names or numbers of examples to remove")
    parsed = parser.parse_args(words)
    with importing(console):
        from cribo.apps.segment.editing import list_examples, remove_examples
        from cribo.apps.segment.memory import SegmentationMemory
        from cribo.apps.segment.run import describe_memory

    if parsed.remove:
        memory = remove_examples(parsed.memory, parsed.remove)
    else:
        memory = SegmentationMemory.load(parsed.memory, None, device="cpu")
    table = Table(title=Text(f"Examples of {parsed.memory}"))
    for name in ("number", "example", "correct if left out", "classes"):
        table.add_column(name, justify="left" if name in ("example", "classes") else "right", overflow="fold")
    for each in list_examples(memory):
        classes = ", ".join(f"{name} {share:.0%}" for name, share in each.shares.items())
        correct = "" if each.correct is None else f"{each.correct:.0%}"
        table.add_row(str(each.number), Text(each.name), correct, Text(classes))
    console.print(table)
    describe_memory(memory, console)
