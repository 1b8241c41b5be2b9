"""Depth prediction from frozen features, by nearest patches and by a linear probe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from matplotlib.colors import Normalize
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from cribo.base.console import Phases, Progress, no_progress
from cribo.base.drawing import stripes_handle
from cribo.base.errors import InputError
from cribo.base.painting import stripes
from cribo.data.labelled.depth import DepthImages
from cribo.evaluation.config import require_whole_patches, square
from cribo.evaluation.depth.config import DepthSettings
from cribo.evaluation.pictures import Page, Picture, Row, write_pages
from cribo.evaluation.protocol import Outcome, PatchProtocol
from cribo.evaluation.results import percent
from cribo.evaluation.run import Run
from cribo.features.cache import Machine
from cribo.features.extraction import EncodedView, PatchFeatures, SelectedKeys, in_chunks
from cribo.features.grid import patch_of_pixel
from cribo.features.voting import vote_weights
from cribo.features.whitening import Moments

_SHADES = 6  # in the legend
PatchDepths = Mapping[EncodedView, Float[Tensor, " n"]]
"""Depth of each patch of images in metres; NaN without measurement."""

Predictions = Mapping[EncodedView, Float[Tensor, "rows columns"]]
"""Predicted depth of each patch of images in metres."""

MIN_DEPTH = 1e-3
"""Minimum of predicted depth in metres."""

_DELTA = 1.25


@dataclass(frozen=True, kw_only=True)
class Depth(DepthSettings, PatchProtocol):
    """Depth prediction from frozen features, by nearest patches and by a linear probe."""

    def prepare(self, run: Run) -> Self:
        """Set the image size."""
        backbone = run.backbone
        only = {} if backbone.takes_any_size else {"size": square(backbone.image_size, backbone.patch_size)}
        settings = self.decided(only)
        if settings.size is not None:
            require_whole_patches(settings.size, backbone.patch_size)
        return settings

    def measure(self, run: Run) -> Outcome:
        """Predict the depth of val by each method, and score it."""
        train, val = run.data.train, run.data.val
        encode = partial(
            run.patches, size=self.size, interpolation=self.interpolation, precision=self.precision, unit=False
        )
        train_features, val_features = encode(train), encode(val)
        with Phases(run.console) as progress:
            found = predict(
                train_features, train, val_features, self, machine=run.machine(run.encoder.identity), progress=progress
            )
            scores = score_images(found, val, progress=progress)
        page = partial(depth_page, found=found, scores=scores, images=val)
        return Outcome(
            rows=[row(method, scores[method]) for method in self.methods],
            classes=(),
            data={"train_patches": train_features.patches, "val_patches": val_features.patches},
            write=lambda _, folder: write_pages(folder, "depth", range(len(val)), page, number=run.num_pictures),
        )


def patch_depths(depth: Float[Tensor, "h w"], grid: tuple[int, int]) -> Float[Tensor, " n"]:
    """Return the mean measured depth of each patch, row by row; NaN for patches without measurement.

    Args:
        depth: depth of the pixels in metres; 0 for no measurement.
        grid: number of rows and columns of patches; a pixel belongs to the patch that contains its centre.

    Example:
        >>> patch_depths(torch.tensor([[1.0, 3.0, 0.0, 4.0, 0.0, 0.0]]), (1, 3)).tolist()
        [2.0, 4.0, nan]
    """
    rows, columns = (torch.from_numpy(patch_of_pixel(*sides)) for sides in zip(depth.shape, grid, strict=True))
    patch = (rows[:, None] * grid[1] + columns).flatten()
    flat = depth.flatten()
    patch, measured = patch[flat > 0], flat[flat > 0].double()
    sums = torch.zeros(grid[0] * grid[1], dtype=torch.float64).index_add_(0, patch, measured)
    return (sums / patch.bincount(minlength=len(sums))).float()


def predict(
    train_features: PatchFeatures,
    images: DepthImages,
    val_features: PatchFeatures,
    settings: DepthSettings,
    *,
    machine: Machine,
    progress: Progress = no_progress,
) -> dict[str, Predictions]:
    """Predict the depth of patches with each method.

    Args:
        train_features: features of the training images.
        images: training images with depth maps.
        val_features: features of the images to predict.
        settings: settings of the protocol after `prepare`.
        machine: resources of the search.
        progress: progress callback.

    Raises:
        InputError: too few patches have a measurement, or features are not finite.
        UnreadableImage, DataError: a depth map is unusable.
    """
    depths: dict[EncodedView, Tensor] = {}
    for number, view in enumerate(train_features.counts, start=1):
        depths[view] = patch_depths(images.depth(view.image), train_features.grid(view))
        progress("depth of the patches", number, len(train_features.counts))
    methods = {
        "neighbours": lambda: predict_by_neighbours(
            train_features, depths, val_features, settings, machine=machine, progress=progress
        ),
        "linear": lambda: predict_linearly(train_features, depths, val_features, settings.ridge),
    }
    return {method: methods[method]() for method in settings.methods}


class UnitKeys(SelectedKeys):
    """Selected patches with features of unit length, as keys of a cosine search."""

    def _selected(self, view: EncodedView) -> Float[Tensor, "m d"]:
        return _unit(super()._selected(view))


def predict_by_neighbours(
    train_features: PatchFeatures,
    depths: PatchDepths,
    val_features: PatchFeatures,
    settings: DepthSettings,
    *,
    machine: Machine,
    progress: Progress = no_progress,
) -> Predictions:
    """Predict the depth of each patch as the weighted mean depth of the nearest patches with a measurement.

    Args:
        train_features: features of the searched patches.
        depths: depth of these patches.
        val_features: features of the images to predict.
        settings: settings of the protocol.
        machine: resources of the search.
        progress: progress callback.

    Raises:
        InputError: fewer patches with a measurement than neighbours.
    """
    keys = UnitKeys(train_features, {view: (~depth.isnan()).nonzero()[:, 0] for view, depth in depths.items()})
    if len(keys) < settings.neighbours:
        raise InputError(
            f"neighbours must be at most the number of patches with a measurement, {len(keys)}, got "
            f"{settings.neighbours}: use fewer neighbours, or more or larger images"
        )
    values = torch.cat([depth[~depth.isnan()] for depth in depths.values()])
    # Features and neighbours are copied once.
    patch_bytes = 2 * (4 * keys.dim + 16 * settings.neighbours)
    chunks = list(in_chunks({view: val_features.patches_of(view) * patch_bytes for view in val_features.counts}))
    predicted: dict[EncodedView, Tensor] = {}
    for number, views in enumerate(chunks):
        queries = _unit(torch.cat([val_features.features(view) for view in views]))

        def report(compared: int, number: int = number) -> None:
            progress("search [%]", 100 * (number * len(keys) + compared) // (len(chunks) * len(keys)), 100)

        found = machine.search(queries, keys, settings.neighbours, progress=report)
        weights = vote_weights(found.similarity, settings.vote, settings.temperature)
        means = (weights * values[found.rows]).sum(dim=1) / weights.sum(dim=1)
        for view, part in zip(views, means.split(list(map(val_features.patches_of, views))), strict=True):
            predicted[view] = part.view(val_features.grid(view))
    return predicted


def predict_linearly(
    train_features: PatchFeatures, depths: PatchDepths, val_features: PatchFeatures, ridge: float
) -> Predictions:
    """Predict the depth of each patch by ridge regression on standardised features, in closed form in float64.

    Minimises the mean of (depth - prediction)² over the patches with a measurement, plus `ridge` times the sum of the
    squared weights of standardised channels.

    Args:
        train_features: features of the patches.
        depths: depth of these patches.
        val_features: features of the images to predict.
        ridge: L2 penalty, > 0.

    Raises:
        InputError: no patch has a measurement, or features are not finite.
    """
    moments = Moments(train_features.dim + 1)
    for view, depth in depths.items():
        measured = ~depth.isnan()
        moments.update(
            torch.cat((train_features.features(view)[measured].double(), depth[measured, None].double()), dim=1)
        )
    if not moments.count:
        raise InputError("no patch of the training images has a depth: all pixels are 0 or above data.max_depth")
    mean, covariance = moments.mean, moments.covariance
    if not covariance.isfinite().all():
        raise InputError("the features of the backbone are not finite: depth cannot be fitted")
    deviation = covariance.diagonal()[:-1].clamp_min(0).sqrt()
    scale = torch.where(deviation > 1e-8, deviation, 1.0)  # constant channels stay 0
    standardised = covariance[:-1, :-1] / (scale[:, None] * scale) + ridge * torch.eye(
        train_features.dim, dtype=torch.float64
    )
    weight = torch.linalg.solve(standardised, covariance[:-1, -1] / scale) / scale
    bias = float(mean[-1] - mean[:-1] @ weight)
    return {
        view: (val_features.features(view).double() @ weight + bias).float().view(val_features.grid(view))
        for view in val_features.counts
    }


def _unit(features: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    return F.normalize(features.float(), dim=1).to(features.dtype)


class DepthScore(NamedTuple):
    """Metrics of one image.

    Attributes:
        delta1: fraction of pixels whose predicted and true depth differ by a factor below 1.25.
        rmse: root mean squared error in metres.
        abs_rel: mean absolute error relative to the true depth.
    """

    delta1: float
    rmse: float
    abs_rel: float


def upsample(prediction: Float[Tensor, "rows columns"], size: Sequence[int], max_depth: float) -> Float[Tensor, "h w"]:
    """Return the depth of pixels, upsampled bilinearly from patches and clamped to 0.001 m to `max_depth`."""
    whole = F.interpolate(prediction[None, None], size=tuple(size), mode="bilinear")[0, 0]
    return whole.clamp(MIN_DEPTH, max_depth)


def score_depth(
    prediction: Float[Tensor, "h w"], depth: Float[Tensor, "h w"], window: tuple[slice, slice] | None = None
) -> DepthScore | None:
    """Compare a predicted with a true depth map, both in metres; return None if no pixel can be scored.

    Args:
        prediction: predicted depth, > 0.
        depth: true depth; 0 for no measurement.
        window: rows and columns to score; None for all.

    Example:
        >>> score_depth(torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 3.0]])).delta1
        0.5
    """
    scored = torch.zeros_like(depth, dtype=torch.bool)
    scored[window or ...] = True
    scored &= depth > MIN_DEPTH
    if not scored.any():
        return None
    found, true = prediction[scored].double(), depth[scored].double()
    ratio = torch.maximum(found / true, true / found)
    error = found - true
    return DepthScore(
        float((ratio < _DELTA).double().mean()),
        float(error.square().mean().sqrt()),
        float((error.abs() / true).mean()),
    )


def score_images(
    found: Mapping[str, Predictions], images: DepthImages, *, progress: Progress = no_progress
) -> dict[str, list[DepthScore | None]]:
    """Score the predictions of all images, by method."""
    scores: dict[str, list[DepthScore | None]] = {method: [] for method in found}
    for index in range(len(images)):
        depth = images.depth(index)
        for method, predictions in found.items():
            prediction = upsample(predictions[EncodedView(index)], depth.shape, images.max_depth)
            scores[method].append(score_depth(prediction, depth, images.window))
        progress("scores", index + 1, len(images))
    return scores


def row(method: str, scores: Sequence[DepthScore | None]) -> dict[str, Any]:
    """Return the row of a result, averaged over the images with scored pixels.

    Raises:
        InputError: no image has scored pixels.
    """
    measured = [score for score in scores if score is not None]
    if not measured:
        raise InputError("no pixel of the validation images can be scored: they have no depth")
    means = torch.tensor(measured, dtype=torch.float64).mean(dim=0).tolist()
    return {"method": method, **dict(zip(DepthScore._fields, means, strict=True)), "images": len(measured)}


def depth_page(
    indices: Sequence[int],
    found: Mapping[str, Predictions],
    scores: Mapping[str, Sequence[DepthScore | None]],
    images: DepthImages,
) -> Page:
    """Return a page of images, measured depth and the prediction of each method; unmeasured pixels are striped.

    Args:
        indices: indices of the images, at least one.
        found: predicted depth of patches, by method.
        scores: scores of all images, by method.
        images: images with depth maps.
    """
    depths = [images.depth(index) for index in indices]
    farthest = max(float(depth.max()) for depth in depths)
    shade, colours = Normalize(0, farthest), mpl.colormaps["viridis_r"]

    def painted(depth: Float[Tensor, "h w"]) -> Picture:
        values = depth.numpy()
        shades = colours(shade(values), bytes=True)[..., :3]
        return Picture(np.where(values[..., None] > 0, shades, stripes(depth.shape)))

    rows = [
        Row(
            images.name(index),
            ", ".join(_verdict(method, part[index]) for method, part in scores.items()),
            [
                Picture(images.load(index)),
                painted(depth),
                *(
                    painted(upsample(part[EncodedView(index)], depth.shape, images.max_depth))
                    for part in found.values()
                ),
            ],
        )
        for index, depth in zip(indices, depths, strict=True)
    ]
    ticks = (value for value in MaxNLocator(_SHADES).tick_values(0, farthest) if value <= farthest)
    handles = [
        *(Patch(facecolor=colours(shade(value)), label=f"{value:g} m") for value in ticks),
        stripes_handle("no measurement"),
    ]
    return Page(("image", "depth", *found), rows, handles)


def _verdict(method: str, score: DepthScore | None) -> str:
    if score is None:
        return f"{method} not scored"
    return f"{method} δ1 {percent(score.delta1)} %, RMSE {score.rmse:.2f} m"
