"""Depth prediction for patches by nearest neighbours and by ridge regression."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from cribo.base.console import Progress, no_progress
from cribo.base.errors import InputError
from cribo.data.labelled.depth import DepthImages
from cribo.evaluation.depth.settings import DepthSettings
from cribo.features.cache import Machine
from cribo.features.extraction import EncodedView, PatchFeatures, SelectedKeys, in_chunks
from cribo.features.grid import patch_of_pixel
from cribo.features.voting import vote_weights
from cribo.features.whitening import Moments

PatchDepths = Mapping[EncodedView, Float[Tensor, " n"]]
"""Depth of each patch of images in metres; NaN without measurement."""

Predictions = Mapping[EncodedView, Float[Tensor, "rows columns"]]
"""Predicted depth of each patch of images in metres."""


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
