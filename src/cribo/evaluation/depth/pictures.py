"""Pictures of depth maps and their predictions."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
import torch
from jaxtyping import Float, UInt8
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from cribo.data.depth import DepthImages
from cribo.evaluation.depth.prediction import Predictions
from cribo.evaluation.depth.scoring import DepthScore, upsample
from cribo.evaluation.features import EncodedView
from cribo.evaluation.pages import show_image
from cribo.evaluation.pictures import draw_rows
from cribo.evaluation.results import percent
from cribo.painting import STRIPES, stripes

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
    depths = {index: images.depth(index) for index in indices}
    farthest = max(float(depth.max()) for depth in depths.values())
    shade = Normalize(0, farthest)
    colours = mpl.colormaps["viridis_r"]

    def draw(index: int, axes: Sequence[Axes]) -> tuple[str, str]:
        depth = depths[index]
        whole = [upsample(part[EncodedView(index)], depth.shape, images.max_depth) for part in found.values()]
        show_image(axes[0], images.load(index))
        for part, values in zip(axes[1:], (depth, *whole), strict=True):
            show_image(part, _paint(values, shade, colours))
        return images.name(index), ", ".join(_said(method, part[index]) for method, part in scores.items())

    ticks = (value for value in MaxNLocator(_SHADES).tick_values(0, farthest) if value <= farthest)
    face, edge = (str(grey / 255) for grey in STRIPES)
    return draw_rows(
        indices,
        draw,
        aspects=[depth.shape[0] / depth.shape[1] for depth in depths.values()],
        headings=("image", "depth", *found),
        handles=[
            *(Patch(facecolor=colours(shade(value)), label=f"{value:g} m") for value in ticks),
            Patch(facecolor=face, edgecolor=edge, hatch="////", label="no measurement"),
        ],
    )


def _paint(depth: Float[Tensor, "h w"], shade: Normalize, colours: Colormap) -> UInt8[Tensor, "3 h w"]:
    painted = colours(shade(depth.numpy()), bytes=True)[..., :3]
    measured = depth.numpy()[..., None] > 0
    return torch.from_numpy(np.where(measured, painted, stripes(depth.shape))).permute(2, 0, 1)


def _said(method: str, score: DepthScore | None) -> str:
    if score is None:
        return f"{method} not scored"
    return f"{method} δ1 {percent(score.delta1)} %, RMSE {score.rmse:.2f} m"
