"""Multi-crop (Caron et al. 2020): global crops and smaller local ones of an image, as samples and on the device."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.base.errors import ConfigError
from cribo.data.photometric import Photometric, apply_photometric, sample_photometric
from cribo.data.samples import Batch, LazyImage, Sample
from cribo.method import Crops, ViewRecipe, cut_views, sample_crops
from cribo.models import Backbone, normalise
from cribo.objectives.views import load_for_crops

_BLUR_OF_LOCAL_CROPS = 0.5


class MultiCrop:
    """Transform of an image into two global crops and several local ones of a smaller size and area.

    A batch contains `global` (B, 2, 3, S, S) and `local` (B, V, 3, s, s) in 8 bits, `photometric` with parameters
    (B, 2 + V), global crops first, and `drop_path_noise` (B, 2 + V, sites).

    Args:
        recipe: distribution of the global crops.
        local_crops: V, number of local crops per image.
        local_size: s, side of a local crop in pixels.
        local_area: (low, high) share of the image that a local crop covers.
        drop_path_sites: number of uniform random numbers to draw per crop.
    """

    def __init__(
        self,
        recipe: ViewRecipe,
        *,
        local_crops: int,
        local_size: int,
        local_area: tuple[float, float],
        drop_path_sites: int,
    ) -> None:
        self.recipe = recipe
        blur = (_BLUR_OF_LOCAL_CROPS * max(recipe.blur),) * 2
        self.local = replace(recipe, size=local_size, area=local_area, blur=blur, solarise=(0.0, 0.0))
        self.local_crops = local_crops
        self.drop_path_sites = drop_path_sites

    def __call__(self, image: LazyImage, generator: torch.Generator) -> Sample:
        """Decode the image, cut the crops, and draw the other random numbers."""
        pixels, (views, local), _ = load_for_crops(image, partial(self.draw_crops, generator=generator))
        return self.cut_crops(pixels, views, local, generator)

    def draw_crops(self, height: int, width: int, generator: torch.Generator) -> list[tuple[Crops, int]]:
        """Draw the global crops and the local ones, each with the size of their views."""
        views = sample_crops(height, width, self.recipe, generator=generator)
        pairs = [sample_crops(height, width, self.local, generator=generator) for _ in self._pairs()]
        local = concatenate_crops(pairs, limit=self.local_crops)
        return [(views, self.recipe.size), (local, self.local.size)]

    def cut_crops(
        self, pixels: UInt8[Tensor, "3 h w"], views: Crops, local: Crops, generator: torch.Generator
    ) -> Sample:
        """Cut the crops from an image, and draw the random numbers that do not depend on them."""
        photometric = [sample_photometric(self.recipe, generator=generator)]
        photometric += [sample_photometric(self.local, generator=generator) for _ in self._pairs()]
        crops = 2 + self.local_crops
        return {
            "global": cut_views(pixels, views, self.recipe.size),
            "local": cut_views(pixels, local, self.local.size),
            "photometric": Photometric.cat(photometric).select(slice(0, crops)),
            "drop_path_noise": torch.rand((crops, self.drop_path_sites), generator=generator),
        }

    def _pairs(self) -> range:
        return range((self.local_crops + 1) // 2)


def concatenate_crops(parts: Sequence[Crops], *, limit: int | None = None) -> Crops:
    """Return the crops of several sets, or the first `limit` of them."""
    return Crops(torch.cat([part.boxes for part in parts])[:limit], torch.cat([part.flips for part in parts])[:limit])


def check_local_crops(size: int, area: tuple[float, float], backbone: Backbone, *, views: int) -> None:
    """Check the options of local crops.

    Args:
        size: side of a local crop in pixels.
        area: (low, high) share of the image that a local crop covers.
        backbone: the network that encodes them.
        views: side of a global crop in pixels.

    Raises:
        ConfigError: a value out of range, or a size that the network does not accept.
    """
    if not 0 < area[0] <= area[1] <= 1:
        raise ConfigError(f"objective.args.local_area must be ordered (low, high) within 0 to 1, got {area}")
    check_crop_size("local_size", size, backbone, views=views)


def check_crop_size(name: str, size: int, backbone: Backbone, *, views: int) -> None:
    """Check the size of crops that are smaller than the views.

    Args:
        name: name of the objective's argument.
        size: side of a crop in pixels.
        backbone: the network that encodes them.
        views: side of a view in pixels.

    Raises:
        ConfigError: the network does not accept the size.
    """
    if size < 1 or size % backbone.patch_size:
        raise ConfigError(
            f"objective.args.{name} must be a multiple of the patch size {backbone.patch_size}, got {size}"
        )
    if not backbone.takes_any_size and size != views:
        raise ConfigError(
            f"objective.args.{name} must be {views} for {backbone.name}, which accepts no other size, got {size}: "
            "use another network"
        )


def augmented_crops(batch: Batch, recipe: ViewRecipe, backbone: Backbone) -> list[Float[Tensor, "r 3 h w"]]:
    """Return the global and the local crops of a batch, crop after crop, augmented and normalised for a backbone."""
    crops, first = [], 0
    for views in (batch["global"], batch["local"]):
        number = views.shape[1]
        parameters = Photometric(*(values[:, first : first + number] for values in batch["photometric"]))
        first += number
        changed = apply_photometric(
            views.flatten(0, 1), parameters.flatten(), solarise_threshold=recipe.solarise_threshold
        )
        images = normalise(changed, mean=backbone.mean, std=backbone.std)
        crops.append(images.unflatten(0, (-1, number)).transpose(0, 1).flatten(0, 1))
    return crops


def crop_noise(batch: Batch) -> list[Float[Tensor, "r sites"] | None]:
    """Return the random numbers of the student's stochastic depth for the global and the local crops; None if off."""
    noise = batch["drop_path_noise"].transpose(0, 1)  # (V, B, sites)
    if not noise.shape[2]:
        return [None, None]
    return [part.flatten(0, 1) for part in (noise[:2], noise[2:])]
