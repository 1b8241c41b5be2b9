"""Elements of matplotlib figures: styles, grids of pictures, frames, numbers of regions, curves and legends."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from jaxtyping import Int
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from cribo.base.colours import LINE_COLOURS, Colour, rgb
from cribo.base.files import write_whole
from cribo.base.painting import STRIPES, region_places
from cribo.base.wording import shortened

PAGE_WIDTH = 8.0
"""Width of the widest figures in inches: text of 9 points is still readable if a page shows them 800 pixels wide."""

LETTER, LEGEND_LINE = 0.075, 0.22
"""Width of a letter and height of a line of text of 9 points, in inches."""

DASHES = (0, (3.0, 2.0))
"""Style of dashed frames, in widths of the line."""

_STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=LINE_COLOURS),
}
_DPI = 150
_TITLE, _ROW_TITLE, _HEADING = 0.25, 0.3, 0.22  # heights in inches
_GAP = 0.083  # between panels in inches, twice the padding of matplotlib's constrained layout
_HANDLE = 0.5  # width of an entry of a legend without its label, in inches
_FEW = 40  # points of a curve with markers


@contextmanager
def house_style() -> Iterator[None]:
    """Set matplotlib's style for all figures, as a context manager or a decorator."""
    with mpl.rc_context({**_STYLE, "font.size": 9, "axes.titlesize": 10, "figure.titlesize": 11}):
        yield


@contextmanager
def paper_style() -> Iterator[None]:
    """Set matplotlib's style for figures in print: embedded fonts, and small text."""
    small: dict[Any, Any] = {"axes.linewidth": 0.6, "font.size": 8, "axes.titlesize": 8, "legend.fontsize": 7}
    with mpl.rc_context({**_STYLE, **small, "pdf.fonttype": 42, "ps.fonttype": 42}):  # TrueType, as publishers require
        yield


def write_figure(path: Path, figure: Figure, *, dpi: int = _DPI) -> Path:
    """Write a figure atomically, in the format of its suffix, and return its path."""
    kind = path.suffix.removeprefix(".")
    # Without the date, equal figures give identical files.
    metadata = {"CreationDate": None} if kind == "pdf" else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # names of images in other scripts
        write_whole(path, lambda part: figure.savefig(part, dpi=dpi, format=kind, metadata=metadata))
    return path


def panel_grid(
    sizes: Sequence[Sequence[float]],
    headings: Sequence[str],
    *,
    title: str = "",
    row_titles: bool = False,
    handles: Sequence[Artist] = (),
    text: float = 0.0,
    width: float = PAGE_WIDTH,
    tallest: float = 1.1,
) -> tuple[Figure, np.ndarray]:
    """Create a figure with rows of empty panels for pictures, without ticks and borders, and a legend below.

    Args:
        sizes: (height, width) of the pictures in each row, in any unit; at least one row.
        headings: title of each column, "" for none.
        title: title of the figure.
        row_titles: leave room for `title_row` above each row.
        handles: handles of the legend.
        text: height in inches of other text above or below the pictures of a row.
        width: width of the figure in inches.
        tallest: maximum height of a panel, as a multiple of its width.

    Returns:
        The figure and its panels, a (rows, columns) array of axes.
    """
    pictures = [(width / len(headings) - _GAP) * min(tallest, high / wide) for high, wide in sizes]
    rows = [height + _GAP + text + (_ROW_TITLE if row_titles else 0) for height in pictures]
    rows[0] += _HEADING if any(headings) else 0
    columns = legend_columns([str(handle.get_label()) for handle in handles])
    legend_height = LEGEND_LINE * -(-len(handles) // columns) + 0.15 * bool(handles)
    height = sum(rows) + legend_height + _TITLE * (title.count("\n") + 1 if title else 0)
    figure = Figure(figsize=(width, height))
    figure.set_layout_engine("constrained", wspace=0, hspace=0)
    if title:
        figure.suptitle(title, fontsize="medium")
    if row_titles:
        parts = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0]
        panels = np.stack([part.subplots(1, len(headings), squeeze=False)[0] for part in parts])
    else:
        panels = figure.subplots(len(rows), len(headings), squeeze=False, height_ratios=pictures)
    for axes in panels.flat:
        hide_ticks(axes)
    for axes, heading in zip(panels[0], headings, strict=True):
        axes.set_title(heading, fontsize="medium")
    if handles:
        figure.legend(
            handles=handles,
            ncols=columns,
            loc="outside lower center",
            frameon=False,
            fontsize="medium",
            handlelength=1.8,
        )
    return figure, panels


def title_row(row: np.ndarray, name: str, result: str) -> None:
    """Write a name, shortened if it is too long, and a result above a row of `panel_grid(row_titles=True)`."""
    letters = max(10, int(PAGE_WIDTH / LETTER) - len(result))
    row[0].figure.suptitle(f"{short_name(name, letters)}: {result}", fontsize="medium", x=0.005, ha="left")


def hide_ticks(axes: Axes) -> None:
    """Remove the ticks and borders of axes for a picture."""
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def frame(axes: Axes, colour: Colour, *, width: float = 2, dashed: bool = False) -> None:
    """Draw a coloured border around a picture."""
    axes.spines[:].set(visible=True, color=rgb(colour), linewidth=width, linestyle=DASHES if dashed else "-")


def line_handle(label: str, colour: Any, *, dashed: bool = False) -> Line2D:
    """Return a handle of a legend that is a line in a colour of matplotlib."""
    return Line2D([], [], color=colour, linewidth=2, linestyle=DASHES if dashed else "-", label=label)


def marker_handle(label: str, colour: Any, edge: str, marker: str = "o") -> Line2D:
    """Return a handle of a legend that is a marker in colours of matplotlib."""
    return Line2D([], [], color=colour, marker=marker, linestyle="none", markeredgecolor=edge, label=label)


def stripes_handle(label: str) -> Patch:
    """Return a handle of a legend for striped pixels."""
    face, edge = (str(grey / 255) for grey in STRIPES)
    return Patch(facecolor=face, edgecolor=edge, hatch="////", label=label)


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
