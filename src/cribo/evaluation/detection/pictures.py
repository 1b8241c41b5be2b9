"""Boxes over images: what is there beside what was found."""

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
from cribo.drawing import house_style, region_colour, write_figure
from cribo.evaluation.detection.scoring import Detections

SURE = 0.5
"""The probability from which predictions are drawn."""

_WIDTH, _HEIGHT = 5.2, 4.2  # inch, of an image at most
_TITLE, _HEADING, _LEGEND_LINE = 0.34, 0.2, 0.21
_ROWS_PER_PICTURE = 6


@dataclass(frozen=True)
class BoxPanel:
    """One image with its objects and what was found in it.

    Attributes:
        name: of the image.
        image: RGB.
        truth: its objects.
        corners: (q, 4) of what was found.
        labels: (q,), the class of each.
        scores: (q,), how sure the detector is.
    """

    name: str
    image: UInt8[Tensor, "3 h w"]
    truth: Boxes
    corners: Float[Tensor, "q 4"]
    labels: Int64[Tensor, " q"]
    scores: Float[Tensor, " q"]


def panels_of(images: BoxedImages, found: Detections, count: int) -> list[BoxPanel]:
    """Some of the images, evenly spread."""
    count = min(count, len(images))
    chosen = [place * len(images) // count for place in range(count)]
    return [
        BoxPanel(
            images.name(index),
            images.load(index),
            images.boxes(index),
            found.corners[index],
            found.labels[index],
            found.scores[index],
        )
        for index in chosen
    ]


def write_pictures(panels: Sequence[BoxPanel], classes: Sequence[str], folder: Path, *, title: str) -> list[Path]:
    """Write `predictions.png`, `predictions-2.png`, ... of six images each into a folder, and return them."""
    written = []
    for number, start in enumerate(range(0, len(panels), _ROWS_PER_PICTURE), start=1):
        figure = draw_boxes(panels[start : start + _ROWS_PER_PICTURE], classes, title=title)
        written.append(write_figure(folder / f"predictions{'' if number == 1 else f'-{number}'}.png", figure))
    return written


def draw_boxes(panels: Sequence[BoxPanel], classes: Sequence[str], *, title: str) -> Figure:
    """A row for each image: its true boxes, and beside them what was found with a probability of 0.5 or more.

    Args:
        panels: at least one.
        classes: their names.
        title: of the figure.

    Raises:
        ValueError: no panel.
    """
    if not panels:
        raise ValueError("panels must hold at least one image, got 0")
    heights = [min(_HEIGHT, _WIDTH * panel.image.shape[1] / panel.image.shape[2]) for panel in panels]
    handles = _legend(panels, classes)
    columns = min(len(handles), 8)
    spaces = [*(height + _TITLE for height in heights), _LEGEND_LINE * -(-len(handles) // columns) + 0.15]
    spaces[0] += _HEADING
    with house_style():
        figure = Figure(figsize=(2 * _WIDTH + 0.3, sum(spaces) + 0.3), layout="constrained")
        figure.suptitle(title)
        rows = figure.subfigures(len(spaces), 1, squeeze=False, height_ratios=spaces)[:, 0]
        for row, panel in zip(rows, panels, strict=False):
            there, found = row.subplots(1, 2)
            _draw_truth(there, panel, classes)
            shown = int((panel.scores >= SURE).sum())
            _draw_found(found, panel, classes)
            objects = int((~panel.truth.crowd).sum())
            row.suptitle(f"{panel.name}: {objects} objects, {shown} found", fontsize=9, x=0.005, ha="left")
        for axes, heading in zip(rows[0].axes, ("labels", f"found, probability ≥ {SURE:g}"), strict=True):
            axes.set_title(heading, fontsize=9)
        rows[-1].legend(handles=handles, ncols=columns, loc="center", frameon=False, fontsize=8, handlelength=1.2)
    return figure


def _draw_truth(axes: Axes, panel: BoxPanel, classes: Sequence[str]) -> None:
    _show(axes, panel)
    for corners, label, crowd in zip(
        panel.truth.corners.tolist(), panel.truth.labels.tolist(), panel.truth.crowd.tolist(), strict=True
    ):
        _draw_box(axes, corners, _colour(label, classes), dashed=crowd)


def _draw_found(axes: Axes, panel: BoxPanel, classes: Sequence[str]) -> None:
    _show(axes, panel)
    # The surest last: it lies on top.
    for place in panel.scores.argsort().tolist():
        score = float(panel.scores[place])
        if score >= SURE:
            colour = _colour(int(panel.labels[place]), classes)
            left, top, right, bottom = panel.corners[place].tolist()
            _draw_box(axes, (left, top, right, bottom), colour)
            axes.text(
                max(0.0, left),
                max(0.0, top),
                f"{100 * score:.0f}",
                fontsize=6,
                color="white",
                va="top",
                clip_on=True,
                bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.8},
            )


def _show(axes: Axes, panel: BoxPanel) -> None:
    height, width = panel.image.shape[1:]
    axes.imshow(panel.image.permute(1, 2, 0).numpy(), interpolation="antialiased")
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    axes.set_axis_off()


def _draw_box(
    axes: Axes, corners: Sequence[float], colour: tuple[float, float, float], *, dashed: bool = False
) -> None:
    left, top, right, bottom = corners
    axes.add_patch(
        Rectangle(
            (left - 0.5, top - 0.5),  # a pixel's centre lies half a pixel from its corner
            right - left,
            bottom - top,
            fill=False,
            edgecolor=colour,
            linewidth=1.4,
            linestyle="--" if dashed else "-",
        )
    )


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
