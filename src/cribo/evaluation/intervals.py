"""Confidence intervals of differences in mean IoU, by a paired bootstrap over images and seeds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.stats import norm, t
from torch import Tensor

from cribo.base.files import open_arrays
from cribo.data.randomness import keyed_generator

COUNTS = "images.npz"
"""File name of the counts of each scored image, beside the result of an evaluation."""

RESAMPLES = 1000
LEAST_SEEDS = 3
"""Minimum number of seeds that are resampled; with fewer, an interval covers the images only."""

_UPPER = 0.975  # of a 95 % interval
_SEEDS = 0x73  # key of the draws of seeds, distinct from those of images


@dataclass(frozen=True)
class Difference:
    """Difference of two scores in 0-1, with a 95 % confidence interval.

    Attributes:
        mean: the difference.
        low, high: bounds of the interval; None if there is nothing to resample.
    """

    mean: float
    low: float | None = None
    high: float | None = None


def image_counts(confusion: Int[Tensor, "*images c p"]) -> Int[Tensor, "*images 3 c"]:
    """Return the correct, labelled and predicted pixels of each class.

    Args:
        confusion: as in `scores.iou`.

    Example:
        >>> image_counts(torch.tensor([[3, 1, 0], [0, 0, 2]])).tolist()
        [[3, 0], [4, 2], [3, 1]]
    """
    classes = confusion.shape[-2]
    square = confusion[..., :classes]
    return torch.stack([square.diagonal(dim1=-2, dim2=-1), confusion.sum(dim=-1), square.sum(dim=-2)], dim=-2)


def counts_miou(counts: Float[Tensor, "*n 3 c"]) -> Float[Tensor, "*n"]:
    """Return the mean IoU of the classes that occur in labels or predictions, from sums of `image_counts`."""
    right, labelled, predicted = counts.unbind(dim=-2)
    union = labelled + predicted - right
    return torch.where(union > 0, right / union, torch.nan).nanmean(dim=-1)


def write_counts(folder: Path, counts: Mapping[Any, Int[Tensor, "d q 3 c"]]) -> None:
    """Write the counts of each draw and image, by value of the varied setting."""
    arrays = {str(value): each.int().numpy() for value, each in counts.items()}
    np.savez_compressed(folder / COUNTS, **arrays)  # pyright: ignore[reportArgumentType]


def read_counts(folder: Path, value: Any) -> Int[Tensor, "d q 3 c"] | None:
    """Read the counts of a value of the varied setting from the folder of an evaluation; None if it has none."""
    if not (folder / COUNTS).is_file():
        return None
    with open_arrays(folder / COUNTS) as arrays:
        return torch.from_numpy(arrays[str(value)]) if str(value) in arrays else None


def resampled(count: int, *key: int) -> Float[Tensor, "r count"]:
    """Return how often each of `count` items is drawn in each of 1,000 resamples with replacement.

    Args:
        count: number of items.
        key: numbers that distinguish these draws from others of as many items.
    """
    drawn = torch.randint(count, (RESAMPLES, count), generator=keyed_generator(count, *key))
    return torch.zeros(RESAMPLES, count, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(drawn.shape, dtype=torch.float64)
    )


def miou_difference(before: Int[Tensor, "s d q 3 c"], after: Int[Tensor, "s d q 3 c"]) -> Difference:
    """Compare the mean IoUs of two methods by a paired bootstrap over images, and over seeds if there are three.

    Args:
        before: `image_counts` of each seed, draw of the memory, and scored image.
        after: those of the other method, with the same seeds, draws and images.

    Example:
        >>> right, wrong = (image_counts(torch.tensor([[[[[a, 4 - a], [4 - a, a]]] * 10]])) for a in (4, 2))
        >>> found = miou_difference(wrong, right)
        >>> round(found.mean, 3), round(found.low, 3), round(found.high, 3)
        (0.667, 0.667, 0.667)
    """
    images = before.shape[2]
    every, times = torch.ones(1, images, dtype=torch.float64), resampled(images)
    of_seeds, drawn = (_miou(after, weights) - _miou(before, weights) for weights in (every, times))
    mean = of_seeds.mean()
    return _difference(mean, drawn.mean(dim=0) - mean + _seed_deviations(of_seeds[:, 0]))


def seed_difference(before: Float[Tensor, " s"], after: Float[Tensor, " s"]) -> Difference:
    """Compare scores of two methods that are recorded per seed only; without an interval for fewer than three seeds.

    Example:
        >>> found = seed_difference(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.2, 0.3, 0.4]))
        >>> round(found.mean, 3), round(found.low, 3)
        (0.1, 0.1)
    """
    differences = (after - before).double()
    if len(differences) < LEAST_SEEDS:
        return Difference(float(differences.mean()))
    return _difference(differences.mean(), _seed_deviations(differences))


def _miou(counts: Int[Tensor, "s d q 3 c"], weights: Float[Tensor, "r q"]) -> Float[Tensor, "s r"]:
    """Return the mean IoU of each seed over weighted images, mean over the draws."""
    of_seeds = [[counts_miou(torch.einsum("rq,qkc->rkc", weights, draw.double())) for draw in one] for one in counts]
    return torch.stack([torch.stack(draws).mean(dim=0) for draws in of_seeds])


def _seed_deviations(differences: Float[Tensor, " s"]) -> Float[Tensor, " r"]:
    """Return deviations of the mean by a bootstrap over seeds, none for fewer than three."""
    seeds = len(differences)
    if seeds < LEAST_SEEDS:
        return differences.new_zeros(RESAMPLES)
    deviations = resampled(seeds, _SEEDS) @ (differences - differences.mean()) / seeds
    # Resamples of a few seeds vary too little; this gives them the width of Student's t.
    widened = math.sqrt(seeds / (seeds - 1)) * float(t.ppf(_UPPER, seeds - 1) / norm.ppf(_UPPER))
    return widened * deviations


def _difference(mean: Float[Tensor, ""], deviations: Float[Tensor, " r"]) -> Difference:
    low, high = (mean + deviations).quantile(deviations.new_tensor([1 - _UPPER, _UPPER])).tolist()
    return Difference(float(mean), low, high)
