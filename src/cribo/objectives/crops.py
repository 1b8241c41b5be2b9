"""The sampler of crops that objectives configure, and its crops on the device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.base.errors import ConfigError
from cribo.data.photometric import Photometric, apply_photometric, sample_photometric
from cribo.data.reduction import largest_reduction, reduced_crops
from cribo.data.samples import Batch, LazyImage, Sample
from cribo.method import Crops, ViewRecipe, cut_views, sample_crops
from cribo.models import Backbone, normalise

_BLUR_OF_LOCAL_CROPS = 0.5


def load_for_crops(
    image: LazyImage, draw: Callable[[int, int], Sequence[tuple[Crops, int]]]
) -> tuple[UInt8[Tensor, "c h w"], list[Crops], int]:
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


def concatenate_crops(parts: Sequence[Crops], *, limit: int | None = None) -> Crops:
    """Return the crops of several sets, or the first `limit` of them."""
    return Crops(torch.cat([part.boxes for part in parts])[:limit], torch.cat([part.flips for part in parts])[:limit])


@dataclass(frozen=True)
class CropSet:
    """Crops of an image that have the same size and distribution.

    Attributes:
        name: name of their views in a sample.
        recipe: distribution of the crops and of their photometric operations, each drawn in pairs.
        count: V, number of crops.
    """

    name: str
    recipe: ViewRecipe
    count: int = 2

    @property
    def pairs(self) -> range:
        """Numbers of the pairs to draw."""
        return range((self.count + 1) // 2)

    def draw(self, height: int, width: int, generator: torch.Generator) -> Crops:
        """Draw the crops of an image of this size."""
        pairs = [sample_crops(height, width, self.recipe, generator=generator) for _ in self.pairs]
        return concatenate_crops(pairs, limit=self.count)

    def cut(self, pixels: UInt8[Tensor, "c h w"], crops: Crops) -> UInt8[Tensor, "v c s s"]:
        """Cut views from an image."""
        return cut_views(pixels, crops, self.recipe.size, interpolation=self.recipe.interpolation)

    def photometric(self, generator: torch.Generator) -> Photometric:
        """Draw photometric parameters (V,)."""
        pairs = [sample_photometric(self.recipe, generator=generator) for _ in self.pairs]
        return Photometric.cat(pairs).select(slice(self.count))


class CropSampler:
    """Transform of an image into sets of crops, and random numbers.

    Draws first the crops (`draw_crops`), then `places`, `photometric` and `draw`. A batch contains the views of each
    set by its name, (B, V, C, s, s) in 8 bits; `photometric` with parameters (B, V) of all sets together; and
    `drop_path_noise` (B, V, sites), uniform in [0, 1), for the student's stochastic depth.

    Args:
        sets: sets of crops.
        drop_path_sites: number of uniform random numbers to draw per crop.
        numbers: functions that draw further numbers, by name; called with `generator`.
    """

    def __init__(
        self, *sets: CropSet, drop_path_sites: int, numbers: Mapping[str, Callable[..., Tensor]] | None = None
    ) -> None:
        self.sets = sets
        self.drop_path_sites = drop_path_sites
        self.numbers = numbers or {}

    def __call__(self, image: LazyImage, generator: torch.Generator) -> Sample:
        """Decode the image, reduced as far as the crops allow, cut the views, and draw the other random numbers."""

        def draw(height: int, width: int) -> list[tuple[Crops, int]]:
            return self.sized(self.draw_crops(height, width, generator))

        pixels, crops, reduced = load_for_crops(image, draw)
        together = concatenate_crops(crops)
        return {
            **self.cut(pixels, crops),
            **self.places(Crops(together.boxes * reduced, together.flips), generator),
            **self.photometric(generator),
            **self.draw(generator),
        }

    def draw_crops(self, height: int, width: int, generator: torch.Generator) -> list[Crops]:
        """Draw the crops of each set in an image of this size."""
        return [crops.draw(height, width, generator) for crops in self.sets]

    def places(self, crops: Crops, generator: torch.Generator) -> Sample:
        """Return what depends on the crops of all sets, in pixels of the whole image: nothing by default."""
        return {}

    def photometric(self, generator: torch.Generator) -> Sample:
        """Draw the photometric parameters of all crops."""
        return {"photometric": Photometric.cat([crops.photometric(generator) for crops in self.sets])}

    def draw(self, generator: torch.Generator) -> Sample:
        """Draw the numbers that depend neither on pixels nor on crops."""
        crops = sum(each.count for each in self.sets)
        noise = torch.rand((crops, self.drop_path_sites), generator=generator)
        further = {name: function(generator=generator) for name, function in self.numbers.items()}
        return {"drop_path_noise": noise, **further}

    def sized(self, crops: Sequence[Crops]) -> list[tuple[Crops, int]]:
        """Return the crops of each set with the size of their views, for `load_for_crops`."""
        return [(part, each.recipe.size) for each, part in zip(self.sets, crops, strict=True)]

    def cut(self, pixels: UInt8[Tensor, "c h w"], crops: Sequence[Crops]) -> dict[str, Any]:
        """Cut the views of each set from an image."""
        return {each.name: each.cut(pixels, part) for each, part in zip(self.sets, crops, strict=True)}


def multi_crop(
    recipe: ViewRecipe, *, count: int, size: int, area: tuple[float, float], **changes: Any
) -> list[CropSet]:
    """Return two `global` crops and `local` ones of a smaller size and area (Caron et al. 2020).

    Args:
        recipe: distribution of the global crops.
        count: number of local crops per image.
        size: side of a local crop in pixels.
        area: (low, high) share of the image that a local crop covers.
        changes: further differences of the local crops; by default, they are blurred half as often and not solarised.
    """
    blur = (_BLUR_OF_LOCAL_CROPS * max(recipe.blur),) * 2
    own = {"blur": blur, "solarise": (0.0, 0.0), **changes}
    low, high = area
    return [CropSet("global", recipe), CropSet("local", replace(recipe, size=size, area=(low, high), **own), count)]


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


def augmented(
    batch: Batch, name: str, recipe: ViewRecipe, backbone: Backbone | None = None, *, first: int = 0
) -> Float[Tensor, "b v 3 h w"]:
    """Return a set of crops of a batch, augmented, and normalised for a backbone if there is one.

    Args:
        batch: samples of a `CropSampler`.
        name: name of the set.
        recipe: sets the threshold of the solarisation.
        backbone: network that encodes the crops.
        first: number of crops in the sets before.
    """
    views = batch[name]
    parameters = Photometric(*(values[:, first : first + views.shape[1]] for values in batch["photometric"]))
    changed = apply_photometric(views.flatten(0, 1), parameters.flatten(), solarise_threshold=recipe.solarise_threshold)
    if backbone is not None:
        changed = normalise(changed, mean=backbone.mean, std=backbone.std)
    return changed.unflatten(0, views.shape[:2])


def augmented_crops(batch: Batch, recipe: ViewRecipe, backbone: Backbone) -> list[Float[Tensor, "r c h w"]]:
    """Return the global and the local crops of a batch, crop after crop, augmented and normalised for a backbone."""
    views, local = (
        augmented(batch, name, recipe, backbone, first=first) for name, first in (("global", 0), ("local", 2))
    )
    return [crops.transpose(0, 1).flatten(0, 1) for crops in (views, local)]


def crop_noise(batch: Batch) -> list[Float[Tensor, "r sites"] | None]:
    """Return the random numbers of the student's stochastic depth for the global and the local crops; None if off."""
    noise = batch["drop_path_noise"].transpose(0, 1)  # (V, B, sites)
    if not noise.shape[2]:
        return [None, None]
    return [part.flatten(0, 1) for part in (noise[:2], noise[2:])]
