"""View pairs: the transform of an image into a sample, and the photometric operations on the device."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.data.photometric import apply_photometric, sample_photometric
from cribo.data.reduction import largest_reduction, reduced_crops
from cribo.data.samples import Batch, LazyImage, Sample
from cribo.method import (
    Crops,
    ViewRecipe,
    cut_views,
    draw_initial_tokens,
    patch_coordinates,
    sample_crops,
)
from cribo.models import Backbone, normalise
from cribo.models.backbone import Features


def load_for_crops(
    image: LazyImage, draw: Callable[[int, int], Sequence[tuple[Crops, int]]]
) -> tuple[UInt8[Tensor, "3 h w"], list[Crops], int]:
    """Decode an image, reduced as far as the crops drawn for it allow.

    Args:
        image: image to decode.
        draw: function of the whole image's height and width that returns crops and the size in pixels of their views;
            called once.

    Returns:
        The pixels, the crops in pixels of the reduced image, and the factor of the reduction: 8, 4, 2 or 1.
    """
    drawn: list[tuple[Crops, int]] = []

    def reduction(height: int, width: int) -> int:
        drawn.extend(draw(height, width))
        return min(largest_reduction(crops, size) for crops, size in drawn)

    pixels, reduced = image.load_reduced(reduction)
    return pixels, [reduced_crops(crops, reduced) for crops, _ in drawn], reduced


class ViewPairs:
    """Transform of an image into two views and random numbers: the sample of CrIBo.

    A batch contains `views` (B, 2, 3, H, W) in 8 bits, `coordinates` (B, 2, N, 2), the patch centres (x, y) in pixels
    of the source image, `initial_tokens` (B, K), those of the 2N tokens that initialise the clusters,
    `drop_path_noise` (B, 2, sites), and `photometric` with parameters (B, 2).

    Args:
        recipe: distribution of the views.
        grid: (h, w) patches of a view.
        num_objects: K, number of initial tokens to draw; 0 for none.
        drop_path_sites: number of uniform random numbers to draw per view, for the student's stochastic depth.
    """

    def __init__(self, recipe: ViewRecipe, *, grid: tuple[int, int], num_objects: int, drop_path_sites: int) -> None:
        self.recipe = recipe
        self.grid = grid
        self.num_objects = num_objects
        self.drop_path_sites = drop_path_sites

    def __call__(self, image: LazyImage, generator: torch.Generator) -> Sample:
        """Decode the image, reduced as far as its two crops allow, cut the views, and draw the other random numbers."""

        def draw(height: int, width: int) -> list[tuple[Crops, int]]:
            return [(sample_crops(height, width, self.recipe, generator=generator), self.recipe.size)]

        pixels, (crops,), reduced = load_for_crops(image, draw)
        photometric = sample_photometric(self.recipe, generator=generator)
        return {
            "views": cut_views(pixels, crops, self.recipe.size),
            "coordinates": patch_coordinates(crops.boxes * reduced, crops.flips, self.grid),
            "photometric": photometric,
            **self.draw(generator),
        }

    def draw(self, generator: torch.Generator) -> Sample:
        """Draw the random numbers that do not depend on the pixels: `initial_tokens` and `drop_path_noise`."""
        tokens = 2 * self.grid[0] * self.grid[1]
        initial = torch.zeros(0, dtype=torch.long)
        if self.num_objects:
            initial = draw_initial_tokens(tokens, self.num_objects, generator=generator)
        return {
            "initial_tokens": initial,
            "drop_path_noise": torch.rand((2, self.drop_path_sites), generator=generator),
        }


def drop_path_noise(batch: Batch) -> Float[Tensor, "two_b sites"] | None:
    """Return the random numbers of the student's stochastic depth, one row per view; None if it is off."""
    noise = batch["drop_path_noise"].flatten(0, 1)
    return noise if noise.shape[1] else None


def split_views(features: Features) -> tuple[Float[Tensor, "2 b d"], Float[Tensor, "b 2 n d"]]:
    """Return the global tokens of view pairs, view after view, and their tokens, image after image."""
    return features.global_token.unflatten(0, (-1, 2)).transpose(0, 1), features.tokens.unflatten(0, (-1, 2))


def normalised_views(batch: Batch, recipe: ViewRecipe, backbone: Backbone) -> Float[Tensor, "2b 3 h w"]:
    """Apply the photometric operations to a batch's views and normalise them for a backbone; image after image."""
    views = apply_photometric(
        batch["views"].flatten(0, 1), batch["photometric"].flatten(), solarise_threshold=recipe.solarise_threshold
    )
    return normalise(views, mean=backbone.mean, std=backbone.std)
