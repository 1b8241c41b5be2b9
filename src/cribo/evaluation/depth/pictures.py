"""Pictures of depth maps and their predictions."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from cribo.base.drawing import panel_grid, stripes_handle, title_row
from cribo.base.painting import stripes
from cribo.data.labelled.depth import DepthImages
from cribo.evaluation.depth.prediction import Predictions
from cribo.evaluation.depth.scoring import DepthScore, upsample
from cribo.evaluation.pages import show_image
from cribo.evaluation.results import percent
from cribo.features.extraction import EncodedView

_SHADES = 6  # in the legend


def draw_depths(
    indices: Sequence[int],
    found: Mapping[str, Predictions],
    scores: Mapping[str, Sequence[DepthScore | None]],
    images: DepthImages,
) -> Figure:
    """Draw images, measured depth and the prediction of each method; pixels without measurement are striped.

    Args:
        indices: indices of the images, at least one.
        found: predicted depth of patches, by method.
        scores: scores of all images, by method.
        images: images with depth maps.
    """
    depths = [images.depth(index) for index in indices]
    farthest = max(float(depth.max()) for depth in depths)
    shade, colours = Normalize(0, farthest), mpl.colormaps["viridis_r"]
    ticks = (value for value in MaxNLocator(_SHADES).tick_values(0, farthest) if value <= farthest)
    figure, rows = panel_grid(
        [depth.shape for depth in depths],
        ("image", "depth", *found),
        row_titles=True,
        handles=[
            *(Patch(facecolor=colours(shade(value)), label=f"{value:g} m") for value in ticks),
            stripes_handle("no measurement"),
        ],
    )
    for axes, index, depth in zip(rows, indices, depths, strict=True):
        title_row(axes, images.name(index), ", ".join(_text(name, part[index]) for name, part in scores.items()))
        show_image(axes[0], images.load(index))
        whole = [upsample(part[EncodedView(index)], depth.shape, images.max_depth) for part in found.values()]
        for part, values in zip(axes[1:], (depth, *whole), strict=True):
            painted, measured = colours(shade(values.numpy()), bytes=True)[..., :3], values.numpy()[..., None] > 0
            part.imshow(np.where(measured, painted, stripes(depth.shape)))
    return figure


def _text(method: str, score: DepthScore | None) -> str:
    if score is None:
        return f"{method} not scored"
    return f"{method} δ1 {percent(score.delta1)} %, RMSE {score.rmse:.2f} m"
