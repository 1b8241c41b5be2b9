"""Common parts of the protocols' own pictures: pages of rows, images and boxes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from cribo.base.drawing import house_style, write_figure
from cribo.data.config import spread

_T = TypeVar("_T")


@house_style()
def write_pages(
    folder: Path,
    name: str,
    items: Sequence[_T],
    draw: Callable[[Sequence[_T]], Figure],
    *,
    number: int | None = None,
    rows: int = 6,
) -> list[Path]:
    """Draw items into `<name>.png`, `<name>-2.png`, ..., and return the paths of these files.

    Args:
        folder: output folder.
        name: name of the files.
        items: items to draw.
        draw: function that draws a page of items.
        number: maximum number of items to draw, evenly spaced; all if None.
        rows: maximum number of items per file.
    """
    chosen = items if number is None else [items[place] for place in spread(len(items), number)]
    return [
        write_figure(folder / f"{name}{f'-{page}' * (page > 1)}.png", draw(chosen[start : start + rows]))
        for page, start in enumerate(range(0, len(chosen), rows), start=1)
    ]


def show_image(axes: Axes, image: UInt8[Tensor, "3 h w"]) -> None:
    """Show an RGB image; further artists do not change the limits of the axes."""
    axes.imshow(image.permute(1, 2, 0).numpy())
    axes.autoscale(enable=False)


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
