"""View pairs: the transform of an image into two views, and the views on the device."""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from cribo.data.samples import Batch, Sample
from cribo.method import Crops, ViewRecipe, draw_initial_tokens, patch_coordinates
from cribo.models import Backbone
from cribo.models.backbone import Features
from cribo.objectives.crops import CropSampler, CropSet, augmented


class ViewPairs(CropSampler):
    """Transform of an image into two views and random numbers: the sample of CrIBo.

    A batch contains `views` (B, 2, C, H, W) in 8 bits, `coordinates` (B, 2, N, 2), the patch centres (x, y) in pixels
    of the source image, `initial_tokens` (B, K), those of the 2N tokens that initialise the clusters,
    `drop_path_noise` (B, 2, sites), and `photometric` with parameters (B, 2).

    Args:
        recipe: distribution of the views.
        grid: (h, w) patches of a view.
        num_objects: K, number of initial tokens to draw; 0 for none.
        drop_path_sites: number of uniform random numbers to draw per view, for the student's stochastic depth.
        numbers: functions that draw further numbers, by name; called with `generator`.
    """

    def __init__(
        self,
        recipe: ViewRecipe,
        *,
        grid: tuple[int, int],
        num_objects: int,
        drop_path_sites: int,
        numbers: Mapping[str, Callable[..., Tensor]] | None = None,
    ) -> None:
        super().__init__(CropSet("views", recipe), drop_path_sites=drop_path_sites, numbers=numbers)
        self.grid = grid
        self.num_objects = num_objects

    def places(self, crops: Crops, generator: torch.Generator) -> Sample:
        """Return the coordinates of the patches."""
        return {"coordinates": patch_coordinates(crops.boxes, crops.flips, self.grid)}

    def draw(self, generator: torch.Generator) -> Sample:
        """Draw the random numbers that do not depend on the pixels: `initial_tokens` and `drop_path_noise`."""
        tokens = 2 * self.grid[0] * self.grid[1]
        initial = torch.zeros(0, dtype=torch.long)
        if self.num_objects:
            initial = draw_initial_tokens(tokens, self.num_objects, generator=generator)
        return {"initial_tokens": initial, **super().draw(generator)}


def view_pairs(
    recipe: ViewRecipe,
    backbone: Backbone,
    *,
    num_objects: int = 0,
    numbers: Mapping[str, Callable[..., Tensor]] | None = None,
) -> ViewPairs:
    """Return the transform to view pairs for a student with this backbone; other arguments as in `ViewPairs`."""
    side = recipe.size // backbone.patch_size
    sites = backbone.num_drop_path_sites
    return ViewPairs(recipe, grid=(side, side), num_objects=num_objects, drop_path_sites=sites, numbers=numbers)


def drop_path_noise(batch: Batch) -> Float[Tensor, "two_b sites"] | None:
    """Return the random numbers of the student's stochastic depth, one row per view; None if it is off."""
    noise = batch["drop_path_noise"].flatten(0, 1)
    return noise if noise.shape[1] else None


def noise_of_views(batch: Batch) -> Sequence[Float[Tensor, "b sites"] | None]:
    """Return the random numbers of the student's stochastic depth for each view of an image; None if it is off."""
    noise = batch["drop_path_noise"]
    return noise.unbind(dim=1) if noise.shape[2] else [None] * noise.shape[1]


def split_views(features: Features) -> tuple[Float[Tensor, "2 b d"], Float[Tensor, "b 2 n d"]]:
    """Return the global tokens of view pairs, view after view, and their tokens, image after image."""
    return features.global_token.unflatten(0, (-1, 2)).transpose(0, 1), features.tokens.unflatten(0, (-1, 2))


def normalised_views(batch: Batch, recipe: ViewRecipe, backbone: Backbone) -> Float[Tensor, "2b c h w"]:
    """Apply the photometric operations to a batch's views and normalise them for a backbone; image after image."""
    return augmented(batch, "views", recipe, backbone).flatten(0, 1)
