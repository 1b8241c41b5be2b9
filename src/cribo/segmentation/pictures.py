"""Pictures of segmentations: overlays of labels, and an overview with a legend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from cribo.data.segmentation import IGNORE_INDEX, Colour
from cribo.drawing import hide_ticks, house_style, paint_classes

_TINT = 0.55  # opacity of a class over the image
_BORDER = 0.35  # brightness of pixels at the border of classes
_ROW_HEIGHT, _LEGEND_LINE, _HEADING = 2.1, 0.22, 0.35  # inch
_COLUMNS = 6  # of the legend


@dataclass(frozen=True)
class SegmentedPanel:
    """One image with its labels and confidence.

    Attributes:
        name: name of the image.
        image: RGB image.
        labels: class of each pixel.
        confidence: confidence of each pixel, 0 to 1.
    """

    name: str
    image: UInt8[Tensor, "3 h w"]
    labels: UInt8[Tensor, "h w"]
    confidence: Float[Tensor, "h w"]


def overlay(
    image: UInt8[Tensor, "3 h w"], labels: UInt8[Tensor, "h w"], palette: Sequence[Colour]
) -> UInt8[np.ndarray, "h w 3"]:
    """Return an image tinted with the colours of the classes, with dark lines at their borders.

    Class 0 is the background if it is black in the palette; it is not tinted.
    """
    picture = image.permute(1, 2, 0).numpy().astype(np.float32)
    colours = paint_classes(labels, palette, IGNORE_INDEX)
    tint = np.full((*labels.shape, 1), _TINT, dtype=np.float32)
    if palette and tuple(palette[0]) == (0, 0, 0):
        tint[labels.numpy() == 0] = 0
    painted = (1 - tint) * picture + tint * colours
    painted[_borders(labels).numpy()] *= _BORDER
    return painted.round().clip(0, 255).astype(np.uint8)


def _borders(labels: UInt8[Tensor, "h w"]) -> Tensor:
    """Return a mask of the pixels whose right or lower neighbour has another class."""
    found = torch.zeros(labels.shape, dtype=torch.bool)
    found[:, :-1] |= labels[:, :-1] != labels[:, 1:]
    found[:-1] |= labels[:-1] != labels[1:]
    return found


def draw_overview(
    panels: Sequence[SegmentedPanel],
    classes: Sequence[str],
    palette: Sequence[Colour],
    expected: Mapping[int, float],
) -> Figure:
    """Draw images, labels and confidence in columns, with a legend of the classes that occur.

    Args:
        panels: images, one per row.
        classes: names of the classes.
        palette: colours of the classes.
        expected: IoU of each class on left-out examples, 0 to 1, for the legend.
    """
    present = sorted(set().union(*(set(panel.labels.unique().tolist()) for panel in panels)) - {IGNORE_INDEX})
    lines = -(-len(present) // _COLUMNS)

    def name(c: int) -> str:
        return f"{classes[c]} {expected[c]:.0%}" if c in expected else classes[c]

    height = _HEADING + _ROW_HEIGHT * len(panels) + _LEGEND_LINE * (lines + 1)
    with house_style():
        figure = Figure(figsize=(8.6, height), layout="constrained")
        axes = figure.subplots(len(panels), 3, squeeze=False)
        for row, panel in zip(axes, panels, strict=True):
            row[0].imshow(panel.image.permute(1, 2, 0).numpy())
            row[1].imshow(overlay(panel.image, panel.labels, palette), interpolation="nearest")
            row[2].imshow(panel.confidence.numpy(), cmap="magma", vmin=0, vmax=1)
            row[0].set_title(_shortened(panel.name), fontsize=8, loc="left")
        axes[0][1].set_title("labels", fontsize=9)
        axes[0][2].set_title("confidence", fontsize=9)
        hide_ticks(axes)
        figure.colorbar(axes[0][2].images[0], ax=list(axes[:, 2]), shrink=min(1.0, 1.6 / len(panels)), aspect=14)
        handles = [
            Patch(facecolor=tuple(part / 255 for part in palette[c]), edgecolor="0.3", label=name(c)) for c in present
        ]
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=min(_COLUMNS, len(handles)),
            frameon=False,
            title="classes with their IoU on left-out examples" if expected else None,
        )
    return figure


def _shortened(name: str, most: int = 44) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"
