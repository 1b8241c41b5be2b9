"""Indicators of good dense features without labels; docs/adapting.md compares them with labelled results."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from cribo.adaptation.encoding import encode, encode_pixels, readable
from cribo.data import ImageSource
from cribo.data.limits import spread
from cribo.data.photometric import apply_photometric, sample_photometric
from cribo.data.randomness import keyed_generator
from cribo.errors import InputError
from cribo.method import ViewRecipe, cut_views, patch_coordinates, sample_crops
from cribo.models import Backbone
from cribo.objectives.points import overlap_points, sample_tokens
from cribo.retrieval.whitening import Moments

INDICATOR_IMAGES = 64
_POINTS = 8
_NEIGHBOURS = 20


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


def view_points(
    backbone: Backbone,
    images: ImageSource,
    recipe: ViewRecipe,
    *,
    layers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Float[Tensor, "m 2 p c"]:
    """Compute features at 64 points shared by two views of an image, for up to 64 images.

    Args:
        backbone: the backbone, on its device.
        images: unlabelled images, of which evenly spaced ones are used; those without overlapping views are skipped.
        recipe: recipe of the views.
        layers: see `Backbone.encode`.
        progress: called with the number of processed images and their total.

    Raises:
        ValueError: fewer than two images have overlapping views.
        DataError: no image can be read.
    """
    indices = spread(len(images), INDICATOR_IMAGES)
    size = backbone.fixed_size or recipe.size // backbone.patch_size * backbone.patch_size
    grid = (size // backbone.patch_size, size // backbone.patch_size)
    points: list[Tensor] = []
    for done, (index, pixels) in enumerate(readable(images, indices), start=1):
        generator = keyed_generator(index)
        crops = sample_crops(pixels.shape[1], pixels.shape[2], recipe, generator=generator)
        photometric = sample_photometric(recipe, generator=generator)
        places, overlapping = overlap_points(patch_coordinates(crops.boxes, crops.flips, grid)[None], _POINTS)
        if overlapping.all():
            views = apply_photometric(
                cut_views(pixels, crops, size), photometric, solarise_threshold=recipe.solarise_threshold
            )
            tokens = encode_pixels(backbone, views, layers=layers).tokens.float().cpu()
            points.append(sample_tokens(tokens[None], grid, places)[0])
        progress(done, len(indices))
    if len(points) < 2:
        raise InputError(f"at least 2 images with overlapping views are required, got {len(points)}: use more images")
    return torch.stack(points)


def neighbour_agreement(points: Float[Tensor, "m 2 p d"]) -> float:
    """Compute the fraction of nearest neighbours shared by corresponding points of two views, from 0 to 1.

    The neighbours of each point are the 20 points of other images with the highest cosine similarity. Semantic features
    have the same neighbours in both views; features that depend on position, lighting or noise, or that hardly vary,
    do not.

    Example:
        >>> neighbour_agreement(torch.eye(3).view(3, 1, 1, 3).expand(3, 2, 1, 3))
        1.0
    """
    images, _, places, _ = points.shape
    first, second = (view.flatten(0, 1) for view in normalize(points, dim=-1).unbind(dim=1))
    image = torch.arange(images).repeat_interleave(places)
    own = image[:, None] == image
    count = min(_NEIGHBOURS, (images - 1) * places)
    near = [(view @ second.T).masked_fill(own, -2).topk(count).indices for view in (first, second)]
    return float((near[0][:, :, None] == near[1][:, None]).any(dim=2).float().mean())


def _explained(features: Float[Tensor, "n d"], places: Float[Tensor, "n 6"]) -> float:
    """Compute the fraction of the features' variance explained by a least-squares fit to their positions."""
    centred = (features - features.mean(dim=0)).double()
    predicted = places.double() @ torch.linalg.lstsq(places.double(), centred).solution
    return float(predicted.square().sum() / centred.square().sum())


def _place_terms(grid: tuple[int, int]) -> Float[Tensor, "n 6"]:
    rows, columns = (torch.linspace(-1, 1, length) if length > 1 else torch.zeros(1) for length in grid)
    y, x = (each.flatten() for each in torch.meshgrid(rows, columns, indexing="ij"))
    return torch.stack([torch.ones_like(x), x, y, x * y, x**2, y**2], dim=1)
