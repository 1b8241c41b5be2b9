"""Pictures of images with true and predicted boxes."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cribo.data.detection import BoxedImages
from cribo.drawing import region_colour
from cribo.evaluation.detection.scoring import Detections
from cribo.evaluation.pages import draw_box, show_image, write_pages
from cribo.evaluation.pictures import draw_rows

SURE = 0.5
"""Minimum probability of the predictions to draw."""


def write_boxes(images: BoxedImages, found: Detections, folder: Path, *, title: str, number: int) -> None:
    """Draw some of the images, six per file: `predictions.png`, `predictions-2.png`, ...

    Args:
        images: images with true boxes.
        found: detections in all images.
        folder: output folder.
        title: title of the figures.
        number: number of images to draw.
    """

    def draw(indices: Sequence[int]) -> Figure:
        return draw_boxes(indices, images, found, title=title)

    write_pages(folder, "predictions", range(len(images)), draw, number=number)


def draw_boxes(indices: Sequence[int], images: BoxedImages, found: Detections, *, title: str) -> Figure:
    """Draw the true boxes of each image next to those predicted with a probability of at least 0.5.

    Args:
        indices: indices of the images, at least one.
        images: images with true boxes.
        found: detections in all images.
        title: title of the figure.
    """
    classes = images.classes

    def draw(index: int, axes: Sequence[Axes]) -> str:
        image = images.load(index)
        for part in axes:
            show_image(part, image)
        truth, scores = images.boxes(index), found.scores[index]
        rows = zip(truth.corners.tolist(), truth.labels.tolist(), truth.crowd.tolist(), strict=True)
        for corners, label, crowd in rows:
            draw_box(axes[0], corners, _colour(label, classes), dashed=crowd)
        # In ascending order, so that the most probable box is on top.
        shown = [place for place in scores.argsort().tolist() if scores[place] >= SURE]
        for place in shown:
            colour, corners = _colour(int(found.labels[index, place]), classes), found.corners[index, place].tolist()
            draw_box(axes[1], corners, colour)
            label = f"{100 * float(scores[place]):.0f}"
            box = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
            left, top = max(0.0, corners[0]), max(0.0, corners[1])
            axes[1].text(left, top, label, fontsize=6, color="white", va="top", clip_on=True, bbox=box)
        return f"{images.name(index)}: {int((~truth.crowd).sum())} objects, {len(shown)} found"

    return draw_rows(
        indices,
        draw,
        aspects=[height / width for height, width in map(images.size, indices)],
        cell=(5.2, 4.2),
        headings=("labels", f"found, probability ≥ {SURE:g}"),
        handles=_legend(indices, images, found),
        title=title,
    )


def _colour(label: int, classes: Sequence[str]) -> tuple[float, float, float]:
    if len(classes) > 10:
        return region_colour(label, len(classes))
    red, green, blue, _ = mpl.colormaps["tab10"](label)
    return red, green, blue


def _legend(indices: Sequence[int], images: BoxedImages, found: Detections) -> list[Patch | Line2D]:
    drawn: set[int] = set()
    has_crowds = False
    for index in indices:
        truth = images.boxes(index)
        drawn |= {*truth.labels.tolist(), *found.labels[index][found.scores[index] >= SURE].tolist()}
        has_crowds |= bool(truth.crowd.any())
    handles: list[Patch | Line2D] = [
        Patch(facecolor=_colour(label, images.classes), label=images.classes[label]) for label in sorted(drawn)
    ]
    if has_crowds:
        handles.append(Line2D([], [], color="0.3", linestyle="--", label="crowd, not counted"))
    return handles or [Line2D([], [], linestyle="none", label="no objects")]
