"""Drawing functions shared by all pictures: styles, colours of regions and classes, and writing of figures."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from cycler import cycler
from jaxtyping import Int, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from cribo.data.segmentation import Colour
from cribo.files import write_whole

STRIPES = (215, 165)
"""The two greys of the stripes that mark unlabelled pixels."""

_DPI = 120


def house_style() -> AbstractContextManager[None]:
    """Return a context manager that sets matplotlib's style for all figures."""
    return mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})


def paper_style() -> AbstractContextManager[None]:
    """Return a context manager for figures in print: embedded fonts, small text, and colour-blind safe colours."""
    return mpl.rc_context(
        {
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.linewidth": 0.6,
            "axes.prop_cycle": cycler(color=COLOUR_BLIND_SAFE),
            "font.size": 8,
            "axes.titlesize": 8,
            "legend.fontsize": 7,
            "pdf.fonttype": 42,  # TrueType, as publishers require
            "ps.fonttype": 42,
        }
    )


# Okabe and Ito's palette, without yellow, which is too light for lines.
COLOUR_BLIND_SAFE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def write_figure(path: Path, figure: Figure, *, dpi: int = _DPI) -> Path:
    """Write a figure atomically, in the format of its suffix, and return its path."""
    kind = path.suffix.removeprefix(".")
    # Without the date, equal figures give identical files.
    metadata = {"CreationDate": None} if kind == "pdf" else None
    write_whole(path, lambda part: figure.savefig(part, dpi=dpi, format=kind, metadata=metadata))
    return path


def frame(axes: Axes, colour: tuple[float, float, float], *, width: float = 2) -> None:
    """Draw a coloured border around a picture."""
    for spine in axes.spines.values():
        spine.set(visible=True, color=colour, linewidth=width)


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
    picture: np.ndarray, labels: Int[Tensor, "h w"], colours: dict[int, tuple[float, float, float]], *, tint: float
) -> np.ndarray:
    """Tint and outline the clusters in `colours`; fade the other pixels to grey."""
    numbers = labels.numpy()
    grey = picture.mean(axis=2, keepdims=True).repeat(3, axis=2)
    painted = 0.4 * grey + 0.35
    for cluster, colour in colours.items():
        inside = numbers == cluster
        painted[inside] = (1 - tint) * picture[inside] + tint * np.asarray(colour)
        padded = np.pad(inside, 1)
        deep = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
        painted[inside & ~deep] = colour
    return np.clip(painted, 0, 1)


def region_colour(number: int, of: int) -> tuple[float, float, float]:
    """Return the RGB colour (0-1) of region `number` of `of` regions, with evenly spaced hues."""
    red, green, blue, _ = mpl.colormaps["gist_rainbow"](number / max(of, 1))
    return red, green, blue


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


def curves_figure() -> tuple[Figure, Axes]:
    """Create a figure with one panel, for curves."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    return figure, figure.subplots()


def from_zero(axes: Axes) -> None:
    """Start the vertical axis at 0."""
    axes.set_ylim(0, max(1.0, 1.05 * axes.dataLim.y1))


def legend(axes: Axes) -> None:
    """Add a legend without a frame if any artist has a label."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
