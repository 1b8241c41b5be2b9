"""Metrics of depth maps, as in the evaluations of BTS and DINOv2."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from cribo.base.console import Progress, no_progress
from cribo.base.errors import InputError
from cribo.data.labelled.depth import DepthImages
from cribo.evaluation.depth.prediction import Predictions
from cribo.features.extraction import EncodedView

MIN_DEPTH = 1e-3
"""Minimum of predicted depth in metres."""

_DELTA = 1.25


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
