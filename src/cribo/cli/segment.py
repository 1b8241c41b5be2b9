"""`cribo segment`: label the pixels of many images given a few labelled examples."""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from cribo.apps.segment.config import AnomalyConfig, SegmentConfig, SegmenterConfig, VideoConfig
from cribo.base.arguments import Parser
from cribo.base.console import importing_networks
from cribo.base.wording import counted
from cribo.cli.command import Call, Command
from cribo.cli.running import (
    BACKBONE_SHORT,
    SUGGESTED,
    SUGGESTION,
    add_results_folder,
    print_places,
    print_unreadable,
)
from cribo.data.config import READING_SHORT
from cribo.features.config import AnomalySettings, PropagationSettings
from cribo.features.memory.settings import SegmentationSettings

if TYPE_CHECKING:
    from cribo.apps.segment.anomaly import Anomalies
    from cribo.apps.segment.instances import InstanceCounts
    from cribo.apps.segment.results import Segmented

HELP = f"""\
Label the pixels of many images given a few labelled examples; two are enough to start. The backbone is not trained. Its
blocks, whitening, and the head (nearest neighbours, ridge regression or both) are chosen by cross-validation over the
examples. The command prints the choice and the expected mIoU.

  cribo segment FRAMES --backbone runs/mine --examples EXAMPLES
  cribo segment FRAMES --backbone runs/mine --examples EXAMPLES --memory mine.safetensors
  cribo segment 'MORE/**/*.jpg' --backbone runs/mine --memory mine.safetensors --out RESULT
  cribo segment --memory mine.safetensors --list               list its examples with their accuracy when left out
  cribo segment --memory mine.safetensors --remove a.jpg 7     remove examples by name or number
  cribo segment FRAMES --video --backbone runs/mine --labels MASKS   propagate labels through videos
  cribo segment FRAMES --segmenter evaluations/mine            label by the result of `cribo evaluate segmenter`
  cribo segment IMAGES --anomaly --backbone runs/mine --examples NORMAL   find what is not in normal images

EXAMPLES contains a.jpg and a.png (or a_labels.png), or images/a.jpg and labels/a.png, or images and the labels of
another tool: COCO, YOLO, CVAT, Label Studio, LabelMe, GeoJSON. Label maps contain class indices (255: no class), only 0
and 255, or colours that classes.txt lists. The results are label maps, overlays, confidences, summary.csv and
contact.png; --write yolo,cvat writes the labels for other tools, too; --instances cell counts the objects of a class
and splits those that touch. To continue after an interruption, repeat the command with --resume. If classes are
confused, add examples of them; --suggest 5 lists images with uncertain labels. If small objects are missed in large
images, use --scale 1 --window 448. If it is too slow, use --size 384, or --engine ray for several GPUs or machines.

Without a backbone of your own, start with --backbone {SUGGESTED} (licence apache-2.0).
"""


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    _add_results(parser)
    parser.add_argument("--suggest", type=int, default=0, help="number of images to suggest for labelling next")
    _add_write(parser)
    parser.add_class_arguments(SegmentConfig, skip={"settings"})
    parser.add_class_arguments(SegmentationSettings)


def _add_results(parser: Parser, what: str = "images") -> None:
    """Add the options of the output folder."""
    add_results_folder(parser, "segmented/<images>")
    parser.add_argument("--pictures", type=int, default=6, help=f"number of {what} in contact.png")


def _of_results(call: Call) -> dict[str, Any]:
    """Return the keyword arguments that all functions that write results share."""
    chosen = {name: call.options[name] for name in ("out", "resume", "overwrite", "pictures")}
    return {**chosen, "command": call.line, "console": call.console}


def _add_write(parser: Parser) -> None:
    """Add the options for the formats of other tools."""
    parser.add_argument(
        "--write",
        type=tuple[str, ...],
        default=(),
        help="also write all labels for other tools: one or more of coco, yolo, cvat, label-studio, labelme, geojson, "
        "voc, and in the coordinates of a map, geotiff and geojson-wgs84, such as coco,yolo",
    )
    parser.add_argument(
        "--write_min_area",
        type=int,
        default=0,
        help="in the files of --write, give regions with fewer pixels the label of the nearest larger region, so that "
        "people can correct them; such as 196, a patch of 14 x 14. Label maps stay exact; not with --instances",
    )


def _written(call: Call) -> dict[str, Any]:
    """Return the keyword arguments of the files of other tools."""
    return {name: call.options[name] for name in ("write", "write_min_area")}


def run(call: Call) -> None:
    """Run the command."""
    given = vars(call.parser.parse_args(call.words, defaults=False))  # others are those of the memory file
    settings = {field.name: given[field.name] for field in fields(SegmentationSettings) if field.name in given}
    config = call.build(SegmentConfig, settings=settings)
    with importing_networks(call.console):
        from cribo.apps.segment.run import SUGGESTED, segment_images

    segmented = segment_images(
        config,
        suggestions=call.options.suggest,
        **_written(call),
        **_of_results(call),
    )
    _print_segmented(call, segmented, {"label next": SUGGESTED} if call.options.suggest else {})


def _print_segmented(call: Call, segmented: "Segmented", others: Mapping[str, str] | None = None) -> None:
    """Print the results and their places, with those of other files."""
    from cribo.apps.segment.results import INSTANCES, OVERVIEW, SUMMARY
    from cribo.data.labelled.formats import LABEL_FORMATS

    table = Table(title=f"Share of each class in all images{', and its instances' * bool(segmented.instances)}")
    table.add_column("class")
    for title in ("pixels", *(("instances", "per image", "mean area", "confidence") * bool(segmented.instances))):
        table.add_column(title, justify="right")
    for name, share in segmented.shares.items():
        table.add_row(name, f"{share:.1%}", *_instance_cells(segmented.instances.get(name)))
    call.console.print(table)
    call.console.print(segmented.speed)
    print_unreadable(call.console, [*segmented.skipped.items()], SUMMARY)
    print_places(
        call.console,
        {
            "labels": segmented.folder / "labels",
            "overlays": segmented.folder / "overlays",
            "confidence": segmented.folder / "confidence",
            **({INSTANCES: segmented.folder / INSTANCES} if segmented.instances else {}),
            "numbers": segmented.folder / SUMMARY,
            **({"overview": segmented.folder / OVERVIEW} if call.options.pictures else {}),
            **{name: segmented.folder / LABEL_FORMATS[name].written for name in call.options.write},
            **{what: segmented.folder / file for what, file in (others or {}).items()},
        },
    )


def _instance_cells(counts: "InstanceCounts | None") -> list[str]:
    """Return the cells of a class: number of instances, per image, mean area and confidence."""
    if counts is None:
        return []
    means = (f"{counts.area:.0f}", f"{counts.confidence:.0%}") if counts.count else ()
    return [str(counts.count), f"{counts.per_image:.1f}", *means]


def _add_memory_options(parser: Parser) -> None:
    """Add the options for the examples of a memory."""
    parser.add_argument("--memory", type=str, required=True, help="file of the memory")
    parser.add_argument("--list", action="store_true", help="list its examples")
    parser.add_argument("--remove", type=str, nargs="+", default=[], help="names or numbers of examples to remove")


def _edit_memory(call: Call) -> None:
    """Print the examples of a memory, after removing those of --remove."""
    file = call.options.memory
    with importing_networks(call.console):
        from cribo.apps.segment.editing import list_examples, remove_examples
        from cribo.apps.segment.run import describe_memory
        from cribo.features.memory.memory import SegmentationMemory

    if call.options.remove:
        memory = remove_examples(file, call.options.remove)
    else:
        memory = SegmentationMemory.load(file, None, device="cpu")
    table = Table(title=Text(f"Examples of {file}"))
    for name in ("number", "example", "correct if left out", "classes"):
        table.add_column(name, justify="left" if name in ("example", "classes") else "right", overflow="fold")
    for each in list_examples(memory):
        classes = ", ".join(f"{name} {share:.0%}" for name, share in each.shares.items())
        correct = "" if each.correct is None else f"{each.correct:.0%}"
        table.add_row(str(each.number), Text(each.name), correct, Text(classes))
    call.console.print(table)
    describe_memory(memory, call.console)


_MEMORY = Command(
    help="List the examples of a memory, or remove some.",
    usage="cribo segment --memory FILE (--list | --remove EXAMPLE ...)",
    less_memory="use a machine with more memory",
    add_options=_add_memory_options,
    run=_edit_memory,
)

_VIDEO_HELP = """\
Label all frames of videos given some labelled frames, by propagation through the video as in `cribo evaluate video`:
forwards from each labelled frame, and backwards from the next one. Use it to follow individual objects, such as one
animal among others; to find all objects of some classes, use `cribo segment` without --video.

  cribo segment FRAMES --video --backbone runs/mine --examples LABELLED
  cribo segment FRAMES --video --backbone runs/mine --labels MASKS
  cribo segment clip.mp4 --video --backbone runs/mine --labels MASKS --write coco

FRAMES has numbered frames, in a folder for each video; LABELLED has some of them with labels, with the names of the
frames; MASKS has label maps only, 000123.png for the frame 000123.jpg or frame 123 of the file. Label the first frame;
where objects are lost, label a later one, and repeat the command. To continue after an interruption, use --resume.
"""


def _add_video_options(parser: Parser) -> None:
    """Add the options of labelling videos."""
    _add_results(parser, "frames")
    parser.add_argument("--video", action="store_true", help="propagate labels through videos")
    _add_write(parser)
    parser.add_class_arguments(VideoConfig)
    parser.add_class_arguments(PropagationSettings)


def _label_video(call: Call) -> None:
    """Label the frames of videos, and print the results."""
    config, settings = call.build(VideoConfig), call.build(PropagationSettings)
    with importing_networks(call.console):
        from cribo.apps.segment.video import segment_video

    segmented = segment_video(
        config,
        settings,
        **_written(call),
        **_of_results(call),
    )
    _print_segmented(call, segmented)


_VIDEO = Command(
    help=_VIDEO_HELP,
    usage="cribo segment FRAMES --video --backbone SOURCE (--examples DIR | --labels DIR) [options]",
    by_position=["--images"],
    short={**BACKBONE_SHORT, **READING_SHORT},
    suggestions={"--backbone": SUGGESTION},
    less_memory="lower --batch_size or --side",
    add_options=_add_video_options,
    run=_label_video,
)

_SEGMENTER_HELP = """\
Label images by the network that `cribo evaluate segmenter` trained, with the resizing and windows of its evaluation. It
needs no examples; classes and colours are those of its data.

  cribo evaluate segmenter --data camvid --backbone runs/mine --out evaluations/mine
  cribo segment FRAMES --segmenter evaluations/mine
  cribo segment FRAMES --segmenter mine.safetensors --out RESULT --write coco

The results are those of `cribo segment`: label maps, overlays, confidences, summary.csv and contact.png. The confidence
is the softmax of the network, and is not calibrated. To continue after an interruption, use --resume.
"""


def _add_segmenter_options(parser: Parser) -> None:
    """Add the options of labelling with a trained segmenter."""
    _add_results(parser)
    _add_write(parser)
    parser.add_class_arguments(SegmenterConfig)


def _apply_segmenter(call: Call) -> None:
    """Label images by a trained segmenter, and print the results."""
    config = call.build(SegmenterConfig)
    with importing_networks(call.console):
        from cribo.apps.segment.trained import apply_segmenter

    segmented = apply_segmenter(
        config,
        **_written(call),
        **_of_results(call),
    )
    _print_segmented(call, segmented)


_SEGMENTER = Command(
    help=_SEGMENTER_HELP,
    usage="cribo segment IMAGES --segmenter PATH [options]",
    by_position=["--images"],
    short=READING_SHORT,
    less_memory="use --device cpu, or smaller images",
    add_options=_add_segmenter_options,
    run=_apply_segmenter,
)

_ANOMALY_HELP = f"""\
Find images that differ from normal ones, and where, given normal images without labels, which should show all that is
normal: use it for images of the same kind of object or material. Nothing is trained: the distance of a patch is
1 - cosine to the most similar patch in the normal images, and the score of an image is the mean of its largest
distances (AnomalyDINO).

  cribo segment IMAGES --anomaly --backbone runs/mine --examples NORMAL
  cribo segment 'parts/**/*.jpg' --anomaly --backbone runs/mine --examples 'parts/good/*.jpg' --size 672

The results are a map of distances and an overlay for each image, summary.csv with the scores, and contact.png with the
highest ones. The threshold is the largest score of a normal image that is left out and compared with the others. If
normal images are above it, add them to NORMAL. If anomalies are below it, look at the image that the threshold names,
and remove it if it is not normal; for small anomalies, raise --size. To continue after an interruption, use --resume.

Without a backbone of your own, start with --backbone {SUGGESTED} (licence apache-2.0).
"""

_SHOWN = 10  # images with the highest scores to print


def _add_anomaly_options(parser: Parser) -> None:
    """Add the options of anomaly detection."""
    _add_results(parser)
    parser.add_argument("--anomaly", action="store_true", help="find anomalies given normal images")
    parser.add_class_arguments(AnomalyConfig)
    parser.add_class_arguments(AnomalySettings)


def _find_anomalies(call: Call) -> None:
    """Score the images, and print the results."""
    config, settings = call.build(AnomalyConfig), call.build(AnomalySettings)
    with importing_networks(call.console):
        from cribo.apps.segment.anomaly import find_anomalies

    found = find_anomalies(
        config,
        settings,
        **_of_results(call),
    )
    _print_anomalies(call, found)


def _print_anomalies(call: Call, found: "Anomalies") -> None:
    """Print the highest scores, the number of images above the threshold, and the places of the results."""
    from cribo.apps.segment.anomaly import MAPS, OVERLAYS
    from cribo.apps.segment.results import OVERVIEW, SUMMARY

    table = Table(title="Highest scores")
    table.add_column("image", overflow="fold")
    table.add_column("score", justify="right")
    table.add_column("above threshold")
    for image in found.images[:_SHOWN]:
        table.add_row(Text(image.name), f"{image.score:.3f}", "yes" if found.is_above(image) else "")
    call.console.print(table)
    call.console.print(Text(found.verdict))
    if among := sum(image.is_normal for image in found.images):
        call.console.print(f"{counted(among, 'image')} among the normal images: compared with the other normal images")
    call.console.print(found.speed)
    print_unreadable(call.console, [*found.skipped.items()], SUMMARY)
    print_unreadable(call.console, [(f"normal image {name}", why) for name, why in found.unread.items()])
    print_places(
        call.console,
        {
            "maps": found.folder / MAPS,
            "overlays": found.folder / OVERLAYS,
            "numbers": found.folder / SUMMARY,
            **({"overview": found.folder / OVERVIEW} if call.options.pictures else {}),
        },
    )


_ANOMALY = Command(
    help=_ANOMALY_HELP,
    usage="cribo segment IMAGES --anomaly --backbone SOURCE --examples NORMAL [options]",
    by_position=["--images"],
    short={**BACKBONE_SHORT, **READING_SHORT},
    suggestions={"--backbone": SUGGESTION},
    less_memory="lower --batch_size or --size, or use fewer normal images",
    add_options=_add_anomaly_options,
    run=_find_anomalies,
)

COMMAND = Command(
    help=HELP,
    usage="cribo segment IMAGES --backbone SOURCE --examples DIR [options]",
    by_position=["--images"],
    short=BACKBONE_SHORT,
    suggestions={"--backbone": SUGGESTION},
    less_memory="lower --batch_size or --size, or use --window",
    add_options=add_options,
    run=run,
    others={
        "--list": _MEMORY,
        "--remove": _MEMORY,
        "--video": _VIDEO,
        "--segmenter": _SEGMENTER,
        "--anomaly": _ANOMALY,
    },
)
