"""Confidence intervals of differences of scores: Student's t over seeds, and a paired bootstrap over images."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import root_scalar
from scipy.stats import t
from torch import Tensor

from cribo.base.files import open_arrays
from cribo.data.randomness import keyed_generator

COUNTS = "images.npz"
"""File name of the counts of each scored image, beside the result of an evaluation."""

RESAMPLES = 1000
LEAST_SEEDS = 3
"""Minimum number of seeds for an interval: one over images alone often leaves out 0 for equal methods."""

CONFIDENCE = 0.95
"""Probability that all intervals of a list of comparisons contain their true differences."""


@dataclass(frozen=True)
class Difference:
    """Difference of two scores in 0-1, with a confidence interval.

    Attributes:
        mean: the difference.
        low, high: bounds of the interval; None for fewer than three seeds.
    """

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def detectable(self) -> float | None:
        """Half the width of the interval: a smaller difference would not be told from 0."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


def confidence_of_each(comparisons: int) -> float:
    """Return the confidence level that each of several intervals needs for all to hold together (Bonferroni).

    Example:
        >>> confidence_of_each(5)
        0.99
    """
    return 1 - (1 - CONFIDENCE) / comparisons


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


def resampled(count: int) -> Float[Tensor, "r count"]:
    """Return how often each of `count` items is drawn in each of 1,000 resamples with replacement."""
    drawn = torch.randint(count, (RESAMPLES, count), generator=keyed_generator(count))
    return torch.zeros(RESAMPLES, count, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(drawn.shape, dtype=torch.float64)
    )


def miou_difference(
    before: Int[Tensor, "s d q 3 c"], after: Int[Tensor, "s d q 3 c"], *, comparisons: int = 1
) -> Difference:
    """Compare the mean IoUs of two methods over seeds and images. With fewer than three seeds, there is no interval.

    The deviations of a bootstrap over images, with all seeds, are added to those of Student's t over seeds.

    Args:
        before: `image_counts` of each seed, draw of the memory, and scored image.
        after: those of the other method, with the same seeds, draws and images.
        comparisons: number of comparisons among which this is one, for which the interval is corrected (Bonferroni).

    Example:
        >>> right, wrong = (image_counts(torch.tensor([[[[[a, 4 - a], [4 - a, a]]] * 10]] * 3)) for a in (4, 2))
        >>> found = miou_difference(wrong, right)
        >>> round(found.mean, 3), round(found.low, 3), round(found.high, 3)
        (0.667, 0.667, 0.667)
    """
    images = before.shape[2]
    every = torch.ones(1, images, dtype=torch.float64)
    of_seeds = (_miou(after, every) - _miou(before, every))[:, 0]
    mean = of_seeds.mean()
    if len(of_seeds) < LEAST_SEEDS:
        return Difference(float(mean))
    times = resampled(images)
    of_images = (_miou(after, times) - _miou(before, times)).mean(dim=0) - mean
    tail = (1 - confidence_of_each(comparisons)) / 2
    low, high = (_quantile(of_images.numpy(), _standard_error(of_seeds), len(of_seeds), p) for p in (tail, 1 - tail))
    return Difference(float(mean), float(mean) + low, float(mean) + high)


def seed_difference(before: Float[Tensor, " s"], after: Float[Tensor, " s"], *, comparisons: int = 1) -> Difference:
    """Compare two methods by a score for each seed. With fewer than three seeds, there is no interval.

    Args:
        before: score of each seed.
        after: those of the other method, with the same seeds.
        comparisons: as in `miou_difference`.

    Example:
        >>> found = seed_difference(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.2, 0.3, 0.4]))
        >>> round(found.mean, 3), round(found.low, 3)
        (0.1, 0.1)
    """
    differences = (after - before).double()
    mean = float(differences.mean())
    if len(differences) < LEAST_SEEDS:
        return Difference(mean)
    upper = (1 + confidence_of_each(comparisons)) / 2
    half = _standard_error(differences) * float(t.ppf(upper, len(differences) - 1))
    return Difference(mean, mean - half, mean + half)


def _miou(counts: Int[Tensor, "s d q 3 c"], weights: Float[Tensor, "r q"]) -> Float[Tensor, "s r"]:
    """Return the mean IoU of each seed over weighted images, mean over the draws."""
    of_seeds = [[counts_miou(torch.einsum("rq,qkc->rkc", weights, draw.double())) for draw in one] for one in counts]
    return torch.stack([torch.stack(draws).mean(dim=0) for draws in of_seeds])


def _standard_error(differences: Float[Tensor, " s"]) -> float:
    return float(differences.std()) / math.sqrt(len(differences))


def _quantile(of_images: Float[np.ndarray, " r"], standard_error: float, seeds: int, probability: float) -> float:
    """Return a quantile of the sum of the resampled deviations and of Student's t over seeds."""
    if not standard_error:
        return float(np.quantile(of_images, probability))
    of_seeds = standard_error * float(t.ppf(probability, seeds - 1))
    low, high = float(of_images.min()) + of_seeds, float(of_images.max()) + of_seeds

    def excess(deviation: float) -> float:
        return float(t.cdf((deviation - of_images) / standard_error, seeds - 1).mean()) - probability

    return low if low == high else float(root_scalar(excess, bracket=(low, high)).root)
