"""Elements of matplotlib figures: styles, frames, numbers of regions, curves and legends."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from cribo.colours import LINE_COLOURS, Colour, rgb
from cribo.files import write_whole
from cribo.painting import region_places
from cribo.wording import shortened

PAGE_WIDTH = 8.0
"""Width of the widest figures in inches: text of 9 points is still readable if a page shows them 800 pixels wide."""

LETTER, LEGEND_LINE = 0.075, 0.22
"""Width of a letter and height of a line of text of 9 points, in inches."""

DASHES = (0, (3.0, 2.0))
"""Style of dashed frames, in widths of the line."""

_DPI = 150
_HANDLE = 0.5  # width of an entry of a legend without its label, in inches
_FEW = 40  # points of a curve with markers


def house_style() -> AbstractContextManager[None]:
    """Return a context manager that sets matplotlib's style for all figures."""
    return mpl.rc_context(
        {
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": cycler(color=LINE_COLOURS),
            "font.size": 9,
            "axes.titlesize": 10,
            "figure.titlesize": 11,
        }
    )


def paper_style() -> AbstractContextManager[None]:
    """Return a context manager for figures in print: embedded fonts, and small text."""
    return mpl.rc_context(
        {
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": cycler(color=LINE_COLOURS),
            "axes.linewidth": 0.6,
            "font.size": 8,
            "axes.titlesize": 8,
            "legend.fontsize": 7,
            "pdf.fonttype": 42,  # TrueType, as publishers require
            "ps.fonttype": 42,
        }
    )


def write_figure(path: Path, figure: Figure, *, dpi: int = _DPI) -> Path:
    """Write a figure atomically, in the format of its suffix, and return its path."""
    kind = path.suffix.removeprefix(".")
    # Without the date, equal figures give identical files.
    metadata = {"CreationDate": None} if kind == "pdf" else None
    write_whole(path, lambda part: figure.savefig(part, dpi=dpi, format=kind, metadata=metadata))
    return path


def frame(axes: Axes, colour: Colour, *, width: float = 2, dashed: bool = False) -> None:
    """Draw a coloured border around a picture."""
    for spine in axes.spines.values():
        spine.set(visible=True, color=rgb(colour), linewidth=width, linestyle=DASHES if dashed else "-")


def hide_ticks(panels: np.ndarray) -> None:
    """Remove the ticks of all panels, the borders narrower than 1 point, and the axes of panels without a picture."""
    for axes in panels.flat:
        axes.set_xticks([])
        axes.set_yticks([])
        if not axes.images:
            axes.set_axis_off()
        elif not any(spine.get_linewidth() >= 1 for spine in axes.spines.values()):
            for spine in axes.spines.values():
                spine.set_visible(False)


def number_regions(
    axes: Axes, labels: Int[np.ndarray, "h w"], numbers: Mapping[int, int], *, size: float = 8, smallest: float = 0.0
) -> None:
    """Write a number into each region of a picture in axes, so that it is identified without its colour.

    Args:
        axes: axes of the picture.
        labels: region of each pixel.
        numbers: number of each region; others have none.
        size: size of the text in points.
        smallest: smaller regions are left without a number: radius of a circle inside, as a share of the width.
    """
    for region, (x, y, radius) in region_places(labels).items():
        if region in numbers and radius >= smallest * labels.shape[1]:
            text = axes.text(x, y, str(numbers[region]), color="white", fontsize=size, ha="center", va="center")
            text.set(path_effects=[withStroke(linewidth=size / 4, foreground="black")], fontweight="bold")


def short_name(name: str, letters: int) -> str:
    """Return a name for a title, shortened if it is longer than `letters`."""
    return shortened(name, letters).replace("$", r"\$")  # matplotlib renders text between two $ as a formula


def curves_figure() -> tuple[Figure, Axes]:
    """Create a figure with one panel, for curves."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    return figure, figure.subplots()


def plot_curve(axes: Axes, points: Sequence[tuple[float, float]], *, label: str | None = None, **style: Any) -> None:
    """Plot points (x, y) as a line, with markers if there are few of them.

    The value of a single point is added to its label.
    """
    marker = "o" if len(points) < _FEW else None
    (line,) = axes.plot(*zip(*points, strict=True), marker=marker, markersize=4, label=label, **style)
    if len(points) == 1:
        line.set(markersize=7, label=f"{label or 'one value'}: {points[0][1]:.3g}")
        axes.set_xlim(points[0][0] - 1, points[0][0] + 1)


def legend_columns(labels: Sequence[str]) -> int:
    """Return the number of columns of a legend that is as wide as a page."""
    longest = max(map(len, labels), default=0)
    return max(1, min(len(labels), int(PAGE_WIDTH / (_HANDLE + LETTER * longest))))


def from_zero(axes: Axes) -> None:
    """Start the vertical axis at 0."""
    axes.set_ylim(0, max(1.0, 1.05 * axes.dataLim.y1))


def legend(axes: Axes) -> None:
    """Add a legend without a frame if any artist has a label."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
