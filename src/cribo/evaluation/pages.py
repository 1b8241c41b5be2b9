"""Common parts of the protocols' own pictures: pages of rows, images and boxes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Int, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from cribo.data import LabelledImages
from cribo.data.crops import resize_labels
from cribo.data.limits import spread
from cribo.drawing import write_figure
from cribo.evaluation.pictures import Panel, pages

ROWS_PER_PAGE = 6

_T = TypeVar("_T")


def write_pages(
    folder: Path, name: str, items: Sequence[_T], draw: Callable[[Sequence[_T]], Figure], *, number: int | None = None
) -> None:
    """Draw items, six per file: `<name>.png`, `<name>-2.png`, ...

    Args:
        folder: output folder.
        name: name of the files.
        items: items to draw.
        draw: function that draws a page of items.
        number: maximum number of items to draw, evenly spaced; all if None.
    """
    chosen = items if number is None else [items[place] for place in spread(len(items), number)]
    for page, part in pages(name, chosen, ROWS_PER_PAGE):
        write_figure(folder / f"{page}.png", draw(part))


def panel_of(
    images: LabelledImages,
    index: int,
    prediction: Int[Tensor, "rows columns"],
    labels: UInt8[Tensor, "h w"] | None = None,
) -> Panel:
    """Return the panel of an image, with a prediction for pixels or patches, which is not interpolated.

    Args:
        images: images with labels.
        index: index of the image.
        prediction: predicted classes.
        labels: labels to draw; those of the image if None.
    """
    labels = images.labels(index) if labels is None else labels
    shown = resize_labels(prediction.to(torch.uint8), (labels.shape[0], labels.shape[1]))
    return Panel(images.name(index), images.load(index), labels, shown, images.ignore_index)


def show_image(axes: Axes, image: UInt8[Tensor, "3 h w"]) -> None:
    """Show an RGB image without axes; further artists do not change its limits."""
    height, width = image.shape[1:]
    axes.imshow(image.permute(1, 2, 0).numpy(), interpolation="antialiased")
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    axes.set_axis_off()


def draw_box(
    axes: Axes, corners: Sequence[float], colour: Any, *, line_width: float = 1.5, dashed: bool = False
) -> None:
    """Draw a box over an image.

    Args:
        axes: axes of the image.
        corners: left, top, right and bottom in pixels.
        colour: colour of the line.
        line_width: width of the line in points.
        dashed: whether the line is dashed.
    """
    left, top, right, bottom = corners
    corner = left - 0.5, top - 0.5  # imshow places pixel centres at integers
    style = "--" if dashed else "-"
    axes.add_patch(
        Rectangle(
            corner, right - left, bottom - top, fill=False, edgecolor=colour, linewidth=line_width, linestyle=style
        )
    )
