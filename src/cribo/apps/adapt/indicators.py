"""Indicators of good dense features without labels; docs/adapting.md compares them with labelled results."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cribo.apps.adapt.encoding import encode
from cribo.data import ImageSource
from cribo.data.config import spread
from cribo.features.whitening import Moments
from cribo.method import ViewRecipe
from cribo.models import Backbone
from cribo.pretraining.agreement import INDICATOR_IMAGES, neighbour_agreement, readable, view_points


@dataclass(frozen=True)
class Indicators:
    """Indicators of feature quality on unlabelled images.

    Attributes:
        agreement: neighbour agreement across views (`neighbour_agreement`); higher is better.
        position: fraction of the features' variance explained by a quadratic function of the position in the image;
            lower is better.
        rank: effective rank, the exponential of the entropy of the covariance's eigenvalues (Roy and Vetterli 2007).
    """

    agreement: float
    position: float
    rank: float


def measure_indicators(
    backbone: Backbone,
    images: ImageSource,
    recipe: ViewRecipe,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Indicators:
    """Measure the indicators on up to 64 images, each without augmentation and in two views.

    Args:
        backbone: the backbone, on its device.
        images: unlabelled images, of which evenly spaced ones are used.
        recipe: recipe of the views.
        progress: called with the number of processed images and their total.

    Raises:
        ValueError: fewer than two images have overlapping views.
        DataError: no image can be read.
    """
    points = view_points(backbone, images, recipe, progress=progress)
    moments, features, places = Moments(backbone.embed_dim), [], []
    for _, pixels in readable(images, spread(len(images), INDICATOR_IMAGES)):
        whole = encode(backbone, pixels)
        features.append(whole.tokens[0].cpu())
        places.append(_place_terms(whole.grid))
        moments.update(features[-1])
    variances = torch.linalg.eigvalsh(moments.covariance).clamp(min=0)
    shares = variances / variances.sum()
    rank = float(torch.exp(-torch.xlogy(shares, shares).sum()))
    return Indicators(neighbour_agreement(points), _explained(torch.cat(features), torch.cat(places)), rank)


def _explained(features: Float[Tensor, "n d"], places: Float[Tensor, "n 6"]) -> float:
    """Compute the fraction of the features' variance explained by a least-squares fit to their positions."""
    centred = (features - features.mean(dim=0)).double()
    predicted = places.double() @ torch.linalg.lstsq(places.double(), centred).solution
    return float(predicted.square().sum() / centred.square().sum())


def _place_terms(grid: tuple[int, int]) -> Float[Tensor, "n 6"]:
    rows, columns = (torch.linspace(-1, 1, length) if length > 1 else torch.zeros(1) for length in grid)
    y, x = (each.flatten() for each in torch.meshgrid(rows, columns, indexing="ij"))
    return torch.stack([torch.ones_like(x), x, y, x * y, x**2, y**2], dim=1)
