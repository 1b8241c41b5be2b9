"""Pictures of images with true and predicted boxes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from jaxtyping import Float, Int64, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from cribo.data.detection import BoxedImages, Boxes
from cribo.drawing import region_colour, write_figure
from cribo.evaluation.data import spread
from cribo.evaluation.detection.scoring import Detections
from cribo.evaluation.pictures import draw_rows, pages

SURE = 0.5
"""Minimum probability of the predictions to draw."""

_ROWS_PER_PICTURE = 6


@dataclass(frozen=True)
class BoxPanel:
    """An image with its true and predicted boxes.

    Attributes:
        name: name of the image.
        image: RGB image.
        truth: true boxes.
        corners: (q, 4) corners of the predicted boxes.
        labels: (q,) predicted classes.
        scores: (q,) predicted probabilities.
    """

    name: str
    image: UInt8[Tensor, "3 h w"]
    truth: Boxes
    corners: Float[Tensor, "q 4"]
    labels: Int64[Tensor, " q"]
    scores: Float[Tensor, " q"]


def panels_of(images: BoxedImages, found: Detections, count: int) -> list[BoxPanel]:
    """Return panels of evenly spaced images."""
    return [
        BoxPanel(
            images.name(index),
            images.load(index),
            images.boxes(index),
            found.corners[index],
            found.labels[index],
            found.scores[index],
        )
        for index in spread(len(images), count)
    ]


def write_boxes(panels: Sequence[BoxPanel], classes: Sequence[str], folder: Path, *, title: str) -> None:
    """Write `predictions.png`, `predictions-2.png`, ... with six images each to a folder."""
    for name, part in pages("predictions", panels, _ROWS_PER_PICTURE):
        write_figure(folder / f"{name}.png", draw_boxes(part, classes, title=title))


def draw_boxes(panels: Sequence[BoxPanel], classes: Sequence[str], *, title: str) -> Figure:
    """Draw the true boxes of each image next to those predicted with a probability of at least 0.5.

    Args:
        panels: at least one.
        classes: class names.
        title: title of the figure.

    Raises:
        ValueError: `panels` is empty.
    """

    def draw(panel: BoxPanel, axes: Sequence[Axes]) -> str:
        height, width = panel.image.shape[1:]
        for part in axes:
            part.imshow(panel.image.permute(1, 2, 0).numpy(), interpolation="antialiased")
            part.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
            part.set_axis_off()
        truth = panel.truth
        rows = zip(truth.corners.tolist(), truth.labels.tolist(), truth.crowd.tolist(), strict=True)
        for corners, label, crowd in rows:
            _draw_box(axes[0], corners, _colour(label, classes), dashed=crowd)
        # In ascending order, so that the most probable box is on top.
        shown = [place for place in panel.scores.argsort().tolist() if panel.scores[place] >= SURE]
        for place in shown:
            colour, corners = _colour(int(panel.labels[place]), classes), panel.corners[place].tolist()
            _draw_box(axes[1], corners, colour)
            box = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
            left, top, score = max(0.0, corners[0]), max(0.0, corners[1]), 100 * float(panel.scores[place])
            axes[1].text(left, top, f"{score:.0f}", fontsize=6, color="white", va="top", clip_on=True, bbox=box)
        return f"{panel.name}: {int((~truth.crowd).sum())} objects, {len(shown)} found"

    return draw_rows(
        panels,
        draw,
        aspects=[panel.image.shape[1] / panel.image.shape[2] for panel in panels],
        cell=(5.2, 4.2),
        headings=("labels", f"found, probability ≥ {SURE:g}"),
        handles=_legend(panels, classes),
        title=title,
    )


def _draw_box(
    axes: Axes, corners: Sequence[float], colour: tuple[float, float, float], *, dashed: bool = False
) -> None:
    left, top, right, bottom = corners
    corner = left - 0.5, top - 0.5  # imshow places pixel centres at integers
    style = {"edgecolor": colour, "linewidth": 1.4, "linestyle": "--" if dashed else "-"}
    axes.add_patch(Rectangle(corner, right - left, bottom - top, fill=False, **style))


def _colour(label: int, classes: Sequence[str]) -> tuple[float, float, float]:
    if len(classes) > 10:
        return region_colour(label, len(classes))
    red, green, blue, _ = mpl.colormaps["tab10"](label)
    return red, green, blue


def _legend(panels: Sequence[BoxPanel], classes: Sequence[str]) -> list[Patch | Line2D]:
    drawn: set[int] = set()
    for panel in panels:
        drawn |= {*panel.truth.labels.tolist(), *panel.labels[panel.scores >= SURE].tolist()}
    handles: list[Patch | Line2D] = [
        Patch(facecolor=_colour(label, classes), label=classes[label]) for label in sorted(drawn)
    ]
    if any(bool(panel.truth.crowd.any()) for panel in panels):
        handles.append(Line2D([], [], color="0.3", linestyle="--", label="crowd, not counted"))
    return handles or [Line2D([], [], linestyle="none", label="no objects")]
