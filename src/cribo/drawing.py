"""Drawing functions shared by all pictures: styles, coloured and numbered regions, and writing of figures."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
from cycler import cycler
from jaxtyping import Bool, Int, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from torch import Tensor

from cribo.colours import LINE_COLOURS, Colour, rgb
from cribo.files import write_whole

STRIPES = (215, 165)
"""The two greys of the stripes that mark unlabelled pixels."""

MARK: Colour = (85, 255, 255)
"""Colour of outlines over photographs, drawn with a dark edge. Few photographs and no heat map contain it."""

PAGE_WIDTH = 8.0
"""Width of the widest figures in inches: text of 9 points is still readable if a page shows them 800 pixels wide."""

LETTER, LEGEND_LINE = 0.075, 0.22
"""Width of a letter and height of a line of text of 9 points, in inches."""

DASHES = (0, (3.0, 2.0))
"""Style of dashed frames, in widths of the line."""

_EDGE: Colour = (20, 20, 20)
_DPI = 150
_HANDLE = 0.5  # width of an entry of a legend without its label, in inches
_FEW = 40  # points of a curve with markers
_TINT = 0.6  # opacity of a colour over a grey picture
_PLACED = 64  # longer side, in pixels, at which the places of numbers are found


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


def paint_regions(
    picture: UInt8[np.ndarray, "h w 3"], labels: Int[Tensor, "h w"], colours: Mapping[int, Colour]
) -> UInt8[np.ndarray, "h w 3"]:
    """Tint and outline the regions in `colours`; fade the other pixels to grey."""
    painted = _faded(picture)
    for region, colour in colours.items():
        inside = labels.numpy() == region
        painted[inside] = tint(picture[inside], np.array(colour))
        painted[inside & ~_eroded(inside, 1)] = colour
    return painted


def tint(picture: UInt8[np.ndarray, "*size 3"], colours: Int[np.ndarray, "#*size 3"]) -> UInt8[np.ndarray, "*size 3"]:
    """Return a picture in shades of one colour, or of a colour per pixel.

    It keeps half of its contrast: otherwise, a dark colour over bright pixels equals a bright colour over dark ones.
    """
    grey = 64 + 0.5 * picture.mean(axis=-1, keepdims=True)
    return np.rint((1 - _TINT) * grey + _TINT * colours).astype(np.uint8)


def outline_region(
    picture: UInt8[np.ndarray, "h w 3"], inside: Bool[np.ndarray, "h w"], colour: Colour = MARK
) -> UInt8[np.ndarray, "h w 3"]:
    """Outline a region, which keeps its own colours, with a dark edge; fade the other pixels to grey."""
    width = max(1, min(picture.shape[:2]) // 100)
    painted, outside = _faded(picture), ~inside
    painted[outside & ~_eroded(outside, 2 * width)] = _EDGE
    painted[outside & ~_eroded(outside, width)] = colour
    painted[inside] = picture[inside]
    return painted


def _faded(picture: UInt8[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "h w 3"]:
    grey = 0.4 * picture.mean(axis=2, keepdims=True) + 90
    return np.rint(grey).astype(np.uint8).repeat(3, axis=2)


def _eroded(inside: Bool[np.ndarray, "h w"], width: int) -> Bool[np.ndarray, "h w"]:
    """Remove the pixels of a region that are nearer than `width` to others; the edge of the picture is no border."""
    outside = torch.from_numpy(~inside)[None].float()
    return F.max_pool2d(outside, 2 * width + 1, stride=1, padding=width)[0].numpy() == 0


def number_regions(
    axes: Axes, labels: Int[Tensor, "h w"], numbers: Mapping[int, int], *, size: float = 8, smallest: float = 0.0
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


def region_places(labels: Int[Tensor, "h w"]) -> dict[int, tuple[float, float, float]]:
    """Return (x, y, radius), in pixels, of a place deep inside each region and its distance to others.

    Example:
        >>> region_places(torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0]]))
        {0: (3.0, 1.0, 1.0), 1: (1.0, 1.0, 2.0)}
    """
    step = max(1, -(-max(labels.shape) // _PLACED))
    first = step // 2
    small = labels[first::step, first::step]
    places = {}
    for region in small.unique().tolist():
        inside = F.pad((small == region).float(), (1, 1, 1, 1))[None]
        depth = torch.zeros_like(inside)
        while inside.any():
            depth += inside
            inside = 1 - F.max_pool2d(1 - inside, 3, stride=1, padding=1)
        radius = depth.max()
        deepest = (depth[0] == radius).nonzero().float() - 1  # without the padding
        row, column = deepest[(deepest - deepest.mean(dim=0)).square().sum(dim=1).argmin()].tolist()
        places[int(region)] = (first + step * column, first + step * row, step * float(radius))
    return places


def paint_classes(
    labels: UInt8[Tensor, "h w"], palette: Sequence[Colour], ignore_index: int
) -> UInt8[np.ndarray, "h w 3"]:
    """Colour each pixel by its class; draw stripes where the label is `ignore_index`."""
    colours = torch.zeros(256, 3, dtype=torch.uint8)
    colours[: len(palette)] = torch.tensor(list(palette), dtype=torch.uint8)
    painted = colours[labels.long()]
    unlabelled = labels == ignore_index
    painted[unlabelled] = stripes(labels.shape)[unlabelled]
    return painted.numpy()


def stripes(size: Sequence[int]) -> UInt8[Tensor, "h w 3"]:
    """Return diagonal grey stripes of size (height, width), which mark unlabelled pixels."""
    width = max(2, size[1] // 60)
    diagonal = (torch.arange(size[0])[:, None] + torch.arange(size[1])) // width % 2
    return torch.where(diagonal == 0, *STRIPES).to(torch.uint8)[..., None].expand(-1, -1, 3)


def short_name(name: str, letters: int) -> str:
    """Return a name for a title, with an ellipsis in its middle if it is longer than `letters`.

    Example:
        >>> short_name("night/camera-2/frame_000123.jpg", 20)
        'night/cam…000123.jpg'
    """
    if len(name) > letters:
        name = f"{name[: (letters - 1) // 2]}…{name[-(letters // 2) :]}"
    return name.replace("$", r"\$")  # matplotlib renders text between two $ as a formula


def curves_figure() -> tuple[Figure, Axes]:
    """Create a figure with one panel, for curves."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    return figure, figure.subplots()


def plot_curve(axes: Axes, points: Sequence[tuple[float, float]], *, label: str | None = None, **style: Any) -> None:
    """Plot points (x, y) as a line, with markers if they are few. The label of a single point states its value."""
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
