"""Pictures of segmentations: overlays of labels, and an overview with a legend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int32, Integer, UInt8
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from cribo.base.colours import BLACK, Colour, rgb
from cribo.base.drawing import house_style, number_regions, panel_grid, short_name
from cribo.base.painting import as_picture, paint_classes, tint
from cribo.data.labelled.segmentation import IGNORE_INDEX

_BORDER = 0.35  # brightness of pixels at the border of classes

CONFIDENCE = "magma"
"""Colours of confidence, in matplotlib: from black (0) to nearly white (1)."""


@dataclass(frozen=True)
class SegmentedPanel:
    """One image with its labels and confidence.

    Attributes:
        name: name of the image.
        image: RGB image.
        labels: class of each pixel.
        confidence: confidence of each pixel, 0 to 1.
        instances: number of the instance of each pixel, 0 for none; None if no class is split.
    """

    name: str
    image: UInt8[Tensor, "c h w"]
    labels: UInt8[Tensor, "h w"]
    confidence: Float[Tensor, "h w"]
    instances: Int32[Tensor, "h w"] | None = None


def overlay(
    image: UInt8[Tensor, "c h w"],
    labels: UInt8[Tensor, "h w"],
    palette: Sequence[Colour],
    instances: Int32[Tensor, "h w"] | None = None,
) -> UInt8[np.ndarray, "h w 3"]:
    """Return an image in shades of the colours of the classes, with dark lines at their borders.

    Instances have white outlines.

    Class 0 is the background if it is black in the palette; there, the image is unchanged.
    """
    picture = as_picture(image.numpy())
    painted = tint(picture, paint_classes(labels.numpy(), palette, IGNORE_INDEX))
    if palette and tuple(palette[0]) == BLACK:
        background = labels.numpy() == 0
        painted[background] = picture[background]
    borders = _borders(labels).numpy()
    painted[borders] = np.rint(_BORDER * painted[borders]).astype(np.uint8)
    if instances is not None:
        painted[_borders(instances).numpy()] = 255
    return painted


def _borders(labels: Integer[Tensor, "h w"]) -> Bool[Tensor, "h w"]:
    """Return a mask of the pixels whose right or lower neighbour has another class or instance."""
    found = torch.zeros(labels.shape, dtype=torch.bool)
    found[:, :-1] |= labels[:, :-1] != labels[:, 1:]
    found[:-1] |= labels[:-1] != labels[1:]
    return found


@house_style()
def draw_overview(
    panels: Sequence[SegmentedPanel],
    classes: Sequence[str],
    palette: Sequence[Colour],
    expected: Mapping[int, float],
    uncalibrated: str = "",
) -> Figure:
    """Draw images, labels and confidence in columns, with a legend of the classes that occur.

    Regions have the number of their class, its value in the label maps.

    Args:
        panels: images, one per row.
        classes: names of the classes.
        palette: colours of the classes.
        expected: IoU of each class on left-out examples, 0 to 1, for the legend.
        uncalibrated: the reason why the confidence is not calibrated; "" if it is.
    """
    present = sorted(set().union(*(set(panel.labels.unique().tolist()) for panel in panels)) - {IGNORE_INDEX})
    names = [f"{c} {classes[c]}{f' {expected[c]:.0%}' if c in expected else ''}" for c in present]
    confidence = "not calibrated" if uncalibrated else "confidence"
    reason = f"The confidence is not calibrated and may be far too high: {uncalibrated}"
    figure, rows = panel_grid(
        [panel.labels.shape for panel in panels],
        ("", "labels", confidence),
        title=reason if uncalibrated else "",
        handles=[
            Patch(facecolor=rgb(palette[c]), edgecolor="0.3", label=name)
            for c, name in zip(present, names, strict=True)
        ],
        text=0.1,
    )
    for row, panel in zip(rows, panels, strict=True):
        row[0].imshow(as_picture(panel.image.numpy()))
        row[0].set_title(short_name(panel.name, 36), fontsize="medium", loc="left")
        row[1].imshow(overlay(panel.image, panel.labels, palette, panel.instances), interpolation="nearest")
        number_regions(row[1], panel.labels.numpy(), dict(zip(present, present, strict=True)), smallest=0.03)
        row[2].imshow(panel.confidence.numpy(), cmap=CONFIDENCE, vmin=0, vmax=1)
    scale = figure.colorbar(rows[0, 2].images[0], ax=list(rows[:, 2]), shrink=min(1.0, 1.6 / len(panels)), aspect=14)
    scale.set_label("confidence, not calibrated" if uncalibrated else "confidence: probability of the label")
    if expected:
        figure.legends[0].set_title("classes with their IoU on left-out examples")
    return figure
