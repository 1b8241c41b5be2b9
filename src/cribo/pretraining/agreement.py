"""Neighbour agreement across views: a sign of good dense features that needs no labels."""

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from cribo.base.errors import DataError, InputError, UnreadableImage
from cribo.data import ImageSource
from cribo.data.config import spread
from cribo.data.photometric import apply_photometric, sample_photometric
from cribo.data.randomness import keyed_generator
from cribo.method import ViewRecipe, cut_views, patch_coordinates, sample_crops
from cribo.models import Backbone, Features, evaluation_mode, normalise
from cribo.objectives.points import overlap_points, sample_tokens

INDICATOR_IMAGES = 64
_POINTS = 8
_NEIGHBOURS = 20

log = logging.getLogger("cribo")


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
            cut = cut_views(pixels, crops, size, interpolation=recipe.interpolation)
            views = apply_photometric(cut, photometric, solarise_threshold=recipe.solarise_threshold)
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


@torch.inference_mode()
def encode_pixels(backbone: Backbone, images: Float[Tensor, "b c h w"], *, layers: int = 1) -> Features:
    """Encode images with values in [0, 1], in evaluation mode and on the backbone's device."""
    pixels = images.to(next(backbone.parameters()).device)
    with evaluation_mode(backbone):
        return backbone.encode(normalise(pixels, mean=backbone.mean, std=backbone.std), layers)


def readable(images: ImageSource, indices: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield index and pixels of each readable image; log the others.

    Raises:
        DataError: no image can be read.
    """
    first: UnreadableImage | None = None
    found = 0
    for index in indices:
        try:
            pixels = images.load(index)
        except UnreadableImage as error:
            first = first or error
            log.warning("skipping %s", error)
            continue
        found += 1
        yield index, pixels
    if not found:
        raise DataError(f"none of {len(indices)} images can be read: {first}")
