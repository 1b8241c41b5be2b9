"""Confusion matrices and the metrics computed from them."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from cribo.base.errors import InputError


def count_confusion(
    labels: Int[Tensor, " n"], predicted: Int[Tensor, " n"], classes: int, columns: int | None = None
) -> Int[Tensor, "c p"]:
    """Count labels (rows) against predictions (columns).

    Args:
        labels: 0 to `classes` - 1.
        predicted: 0 to `columns` - 1.
        classes: number of rows.
        columns: number of columns, `classes` if None; columns after the first `classes` count predictions of no class.

    Example:
        >>> count_confusion(torch.tensor([0, 0, 1]), torch.tensor([0, 2, 1]), 2, 3).tolist()
        [[1, 0, 1], [0, 1, 0]]
    """
    columns = classes if columns is None else columns
    places = labels.long() * columns + predicted.long()
    return torch.bincount(places, minlength=classes * columns).view(classes, columns)


def iou(confusion: Int[Tensor, "c p"]) -> Float64[Tensor, " c"]:
    """Return the IoU of each class; NaN for a class absent from both labels and predictions.

    Args:
        confusion: counts with labels in rows and predictions in columns; columns after the first C count predictions
            of no class, which are always wrong.

    Raises:
        ValueError: fewer columns than rows.

    Example:
        >>> iou(torch.tensor([[3, 1, 0], [0, 0, 0], [0, 0, 2]])).tolist()
        [0.75, 0.0, 1.0]
    """
    classes, columns = confusion.shape
    if columns < classes:
        raise InputError(f"confusion must have a column for each of its {classes} rows, got {columns}")
    counts = confusion.long()
    hits = counts.diagonal()
    union = counts.sum(dim=1) + counts[:, :classes].sum(dim=0) - hits
    return torch.where(union > 0, hits.double() / union, torch.nan)


def pairwise_iou(confusion: Int[Tensor, "c p"]) -> Float64[Tensor, "c p"]:
    """Return the IoU of each label (row) with each prediction (column); 0 where both are empty.

    Example:
        >>> pairwise_iou(torch.tensor([[5, 4], [0, 3]]))[1].tolist()
        [0.0, 0.42857142857142855]
    """
    union = confusion.sum(dim=1, keepdim=True) + confusion.sum(dim=0) - confusion
    return confusion.double() / union.clamp(min=1)


def matched_iou(confusion: Int[Tensor, "c p"]) -> Float64[Tensor, " p"]:
    """Return the IoUs after Hungarian matching of predicted with true classes, which maximises their mean.

    Absent classes have an IoU of 0, and so have columns after the first C.

    Args:
        confusion: as in `iou`.

    Example:
        >>> matched_iou(torch.tensor([[0, 4, 0], [3, 1, 0], [0, 0, 0]])).tolist()
        [0.8, 0.75, 0.0]
    """
    from scipy.optimize import linear_sum_assignment

    classes, columns = confusion.shape
    overlap = pairwise_iou(torch.nn.functional.pad(confusion, (0, 0, 0, columns - classes)))
    true, predicted = linear_sum_assignment(overlap.numpy(), maximize=True)
    return overlap[true, predicted]


def mean_iou(confusion: Int[Tensor, "c p"]) -> float:
    """Return the mean IoU of the classes that occur."""
    return float(iou(confusion).nanmean())


def iou_row(ious: Float64[Tensor, "draws p"], classes: Sequence[str]) -> dict[str, Any]:
    """Return the IoU figures of a row of `EvaluationResult.results`, over all draws.

    Args:
        ious: IoU of each class in each draw, NaN where absent; columns after the first C only count in the means.
        classes: names of the C classes.

    Example:
        >>> iou_row(torch.tensor([[0.5, 1.0]]).double(), ["cat", "dog"])
        {'miou': 0.75, 'miou_std': None, 'per_class': {'cat': 0.5, 'dog': 1.0}, 'draws': [0.75]}
    """
    draws = ious.nanmean(dim=1).tolist()
    return {
        "miou": statistics.fmean(draws),
        "miou_std": statistics.stdev(draws) if len(draws) > 1 else None,
        "per_class": dict(zip(classes, ious.nanmean(dim=0).tolist(), strict=False)),
        "draws": draws,
    }


def accuracy(confusion: Int[Tensor, "c p"]) -> Float[Tensor, " c"]:
    """Return the fraction of correctly predicted labels of each class; NaN for a class without labels."""
    return confusion.diagonal().double() / confusion.sum(dim=1)


def calibration_error(confidence: Float[Tensor, " n"], right: Float[Tensor, " n"], bins: int = 10) -> float:
    """Return the expected calibration error (Guo et al. 2017) over bins of equal width.

    Args:
        confidence: confidence of each prediction, in 0-1.
        right: 1 for correct predictions, 0 for others.
        bins: number of bins.

    Example:
        >>> calibration_error(torch.tensor([0.9, 0.9]), torch.tensor([1.0, 0.0]))  # half are correct, not nine of ten
        0.4
    """
    place = (confidence * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.double).index_add_(0, place, confidence.double() - right.double())
    return round(float(gaps.abs().sum() / len(confidence)), 6)
