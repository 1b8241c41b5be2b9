"""Pictures of images with true and predicted boxes."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cribo.colours import distinct_colours, rgb
from cribo.data.detection import BoxedImages
from cribo.evaluation.detection.scoring import Detections
from cribo.evaluation.pages import draw_box, show_image
from cribo.evaluation.pictures import draw_rows

SURE = 0.5
"""Minimum probability of the predictions to draw."""


def draw_boxes(indices: Sequence[int], images: BoxedImages, found: Detections, *, title: str) -> Figure:
    """Draw the true boxes of each image next to those predicted with a probability of at least 0.5.

    Args:
        indices: indices of the images, at least one.
        images: images with true boxes.
        found: detections in all images.
        title: title of the figure.
    """
    classes = images.classes
    colours = [rgb(colour) for colour in distinct_colours(len(classes))]

    def draw(index: int, axes: Sequence[Axes]) -> tuple[str, str]:
        image = images.load(index)
        for part in axes:
            show_image(part, image)
        truth, scores = images.boxes(index), found.scores[index]
        rows = zip(truth.corners.tolist(), truth.labels.tolist(), truth.crowd.tolist(), strict=True)
        for corners, label, crowd in rows:
            draw_box(axes[0], corners, colours[label], dashed=crowd)
            _name(axes[0], corners, classes[label], colours[label])
        # In ascending order, so that the most probable box is on top.
        shown = [place for place in scores.argsort().tolist() if scores[place] >= SURE]
        for place in shown:
            label, corners = int(found.labels[index, place]), found.corners[index, place].tolist()
            draw_box(axes[1], corners, colours[label])
            _name(axes[1], corners, f"{classes[label]} {100 * float(scores[place]):.0f} %", colours[label])
        count = int((~truth.crowd).sum())
        return images.name(index), f"{count} object{'s' * (count != 1)}, {len(shown)} found"

    return draw_rows(
        indices,
        draw,
        aspects=[height / width for height, width in map(images.size, indices)],
        headings=("labels", f"found, probability ≥ {SURE:g}"),
        handles=_legend(indices, images, found, colours),
        title=title,
    )


def _name(axes: Axes, corners: Sequence[float], text: str, colour: tuple[float, float, float]) -> None:
    """Write a text into the upper left corner of a box."""
    box = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
    left, top = max(0.0, corners[0]), max(0.0, corners[1])
    ink = "black" if np.dot(colour, (0.3, 0.6, 0.1)) > 0.45 else "white"
    axes.text(left, top, text, fontsize=8, color=ink, va="top", clip_on=True, bbox=box)


def _legend(
    indices: Sequence[int],
    images: BoxedImages,
    found: Detections,
    colours: Sequence[tuple[float, float, float]],
) -> list[Patch | Line2D]:
    drawn: set[int] = set()
    has_crowds = False
    for index in indices:
        truth = images.boxes(index)
        drawn |= {*truth.labels.tolist(), *found.labels[index][found.scores[index] >= SURE].tolist()}
        has_crowds |= bool(truth.crowd.any())
    handles: list[Patch | Line2D] = [
        Patch(facecolor=colours[label], label=images.classes[label]) for label in sorted(drawn)
    ]
    if has_crowds:
        handles.append(Line2D([], [], color="0.3", linestyle="--", label="crowd, not counted"))
    return handles or [Line2D([], [], linestyle="none", label="no objects")]
