"""Pictures of images with true and predicted boxes."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cribo.base.colours import distinct_colours, rgb
from cribo.base.drawing import line_handle, panel_grid, title_row
from cribo.base.wording import counted
from cribo.data.labelled.detection import BoxedImages
from cribo.evaluation.detection.scoring import Detections
from cribo.evaluation.pages import draw_box, show_image

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
    colours = [rgb(colour) for colour in distinct_colours(len(images.classes))]
    truths = [images.boxes(index) for index in indices]
    drawn = {label for truth in truths for label in truth.labels.tolist()}
    drawn.update(label for index in indices for label in found.labels[index][found.scores[index] >= SURE].tolist())
    handles = [
        *(Patch(facecolor=colours[label], label=images.classes[label]) for label in sorted(drawn)),
        *([line_handle("crowd, not counted", "0.3", dashed=True)] if any(t.crowd.any() for t in truths) else ()),
    ]
    figure, rows = panel_grid(
        [images.size(index) for index in indices],
        ("labels", f"found, probability ≥ {SURE:g}"),
        title=title,
        row_titles=True,
        handles=handles or [line_handle("no objects", "none")],
    )
    for row, index, truth in zip(rows, indices, truths, strict=True):
        scores = found.scores[index]
        # In ascending order, so that the most probable box is on top.
        places = [place for place in scores.argsort().tolist() if scores[place] >= SURE]
        title_row(row, images.name(index), f"{counted(int((~truth.crowd).sum()), 'object')}, {len(places)} found")
        image = images.load(index)
        for axes in row:
            show_image(axes, image)
        boxes = (part.tolist() for part in (truth.corners, truth.labels, truth.crowd))
        for corners, label, crowd in zip(*boxes, strict=True):
            _draw(row[0], corners, images.classes[label], colours[label], dashed=crowd)
        for place in places:
            label = int(found.labels[index, place])
            text = f"{images.classes[label]} {100 * float(scores[place]):.0f} %"
            _draw(row[1], found.corners[index, place].tolist(), text, colours[label])
    return figure


def _draw(
    axes: Axes, corners: Sequence[float], text: str, colour: tuple[float, float, float], *, dashed: bool = False
) -> None:
    """Draw a box with a text in its upper left corner."""
    draw_box(axes, corners, colour, dashed=dashed)
    box = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
    left, top = max(0.0, corners[0]), max(0.0, corners[1])
    ink = "black" if np.dot(colour, (0.3, 0.6, 0.1)) > 0.45 else "white"
    axes.text(left, top, text, fontsize=8, color=ink, va="top", clip_on=True, bbox=box)
