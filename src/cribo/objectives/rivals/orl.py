"""ORL (Xie et al. 2021): BYOL on images, on regions, and on similar regions of different images, in three stages.

Stage 1 trains BYOL on images. Stage 2 finds regions of each image, its nearest images, and pairs of similar regions,
with the network of stage 1. Stage 3 trains a new network on images, regions and pairs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from jaxtyping import UInt8
from torch import Tensor

from cribo.base.bounds import at_least
from cribo.base.errors import ConfigError, UnreadableImage
from cribo.data.samples import Batch, LazyImage, Sample
from cribo.method import Crops, ViewRecipe
from cribo.objectives.base import Columns, Output, Setting, Stages, Step
from cribo.objectives.crops import CropSampler, CropSet, augmented_crops, check_crop_size, load_for_crops
from cribo.objectives.rivals.byol import BYOL
from cribo.objectives.rivals.region_pairs import DrawnRegions, RegionPairs, RegionSearch, find_pairs, require_regions
from cribo.objectives.rivals.regions import jitter_box, require_selective_search
from cribo.objectives.trunk import encode_frozen
from cribo.objectives.views import noise_of_views


class RegionCrops(CropSampler):
    """Transform of an image into two views, and patches of two pairs of regions.

    A batch contains `global` (B, 2, C, S, S), the views, and `local` (B, 4, C, s, s), the patches: a region of the
    image and a jittered copy; another region, and a similar region of a neighbour.

    Args:
        recipe: distribution of the views, whose flips and colours apply to patches, too.
        pairs: regions of all images; without them, the only region is the whole image, its own neighbour.
        patch_size: s, side of a patch in pixels.
        drop_path_sites: number of uniform random numbers to draw per crop.
    """

    def __init__(self, recipe: ViewRecipe, pairs: RegionPairs | None, *, patch_size: int, drop_path_sites: int) -> None:
        patches = CropSet("local", replace(recipe, size=patch_size), 4)
        super().__init__(CropSet("global", recipe), patches, drop_path_sites=drop_path_sites)
        self.pairs = pairs

    def __call__(self, image: LazyImage, generator: torch.Generator) -> Sample:
        """Decode the image and a neighbour, cut views and patches, and draw the other random numbers.

        Raises:
            UnreadableImage: an image cannot be read, or could not be read when its regions were searched.
        """
        drawn = None
        if self.pairs is not None:
            drawn = self.pairs.draw(image.index, generator=generator)
            if drawn is None:
                raise UnreadableImage(image.name, "it could not be read when its regions were searched")
        views, patches = self.sets
        flips = torch.rand(patches.count, generator=generator) < patches.recipe.flip

        def draw(height: int, width: int) -> list[tuple[Crops, int]]:
            both = views.draw(height, width, generator)
            region, own = (drawn.region, drawn.own) if drawn else [torch.tensor([0, 0, height, width])] * 2
            jittered = jitter_box(region, height, width, generator=generator)
            return self.sized([both, Crops(torch.stack((region, jittered, own)), flips[:3])])

        pixels, crops, _ = load_for_crops(image, draw)
        cut = self.cut(pixels, crops)
        cut["local"] = torch.cat((cut["local"], self.neighbours_patch(image, drawn, flips[3:])))
        return {**cut, **self.photometric(generator), **self.draw(generator)}

    def neighbours_patch(self, image: LazyImage, drawn: DrawnRegions | None, flips: Tensor) -> UInt8[Tensor, "1 c s s"]:
        """Decode the drawn neighbour and cut its patch."""
        patches = self.sets[1]

        def draw(height: int, width: int) -> list[tuple[Crops, int]]:
            box = drawn.other if drawn else torch.tensor([0, 0, height, width])
            return [(Crops(box[None], flips), patches.recipe.size)]

        pixels, (patch,), _ = load_for_crops(image.other(drawn.neighbour) if drawn else image, draw)
        return patches.cut(pixels, patch)


class ORL(BYOL):
    """Object-level representation learning in three stages, which resume from the run folder.

    Reads what BYOL reads. Stage 1, `image_level`, trains BYOL with the run's configuration in a sub-folder of that
    name. Stage 2, `regions`, writes its result to `regions/pairs.safetensors`. Stage 3 is the run's own training, which
    starts from new weights, as in the released code. `--minutes` is the time of stage 3 alone; stage 1 gets as many
    epochs, unless `image_epochs` is set.

    Regions are found by selective search, in images that are reduced to at most 512 pixels per side for it: this takes
    about a second per image and process.

    Differs from the released code in this, in addition to what `BYOL` states: the order of regions, which is random in
    OpenCV, depends on the seed and the image; and stage 2 uses the network of the moving average.

    Args:
        setting: the run.
        batch_norm: whether projector and predictors have batch norms. If not, images are independent.
        image_epochs: epochs of stage 1; `optim.epochs` by default.
        neighbours: number of nearest images of each image.
        min_side: minimum height and width of a region in pixels of the image.
        max_regions: maximum number of regions per image.
        patch_size: side of a patch in pixels.

    Raises:
        ConfigError: a value out of range, too few images, or `backbone.cache_trunk`.
    """

    columns = Columns(
        labels={"image": "views", "region": "jittered regions", "pair": "regions of neighbours"},
        progress={"feature_std": "spread {:.2f}"},
    )
    levels: Sequence[str] = ("image", "region", "pair")

    @classmethod
    def check_packages(cls) -> None:
        """Check that OpenCV is installed with its contrib modules."""
        require_selective_search()

    def __init__(
        self,
        setting: Setting,
        *,
        batch_norm: bool = True,
        image_epochs: Annotated[int, at_least(1)] | None = None,
        neighbours: Annotated[int, at_least(1)] = 10,
        min_side: Annotated[int, at_least(1)] = 96,
        max_regions: Annotated[int, at_least(1)] = 100,
        patch_size: Annotated[int, at_least(1)] = 96,
    ) -> None:
        super().__init__(setting, batch_norm=batch_norm)
        if setting.num_images <= neighbours:
            raise ConfigError(
                f"objective.args.neighbours {neighbours} requires at least {neighbours + 1} images, but data.root has "
                f"{setting.num_images}: add images, or set it to less than {setting.num_images}"
            )
        if setting.options.backbone.cache_trunk is not None:
            raise ConfigError("backbone.cache_trunk supports view pairs only, ORL has patches, too: remove it")
        check_crop_size("patch_size", patch_size, self.student.backbone, views=setting.options.views.size)
        self.image_epochs = image_epochs
        self.neighbours = neighbours
        self.search = RegionSearch(setting.options.views.size, min_side, max_regions)
        self.patch_size = patch_size
        self.pairs: RegionPairs | None = None

    def prepare(self, stages: Stages) -> None:
        """Run stages 1 and 2, or load their results.

        Raises:
            ConfigError: no image has a region of the minimum size.
            FolderError: a stage's files were created with another network, other images or other settings.
        """
        require_regions(self.search, stages.source, seed=self.options.seed)
        first = stages.train("image_level", "byol", {"batch_norm": self.batch_norm}, epochs=self.image_epochs)
        assert isinstance(first, BYOL)
        self.pairs = find_pairs(first.teacher, self.search, stages, neighbours=self.neighbours, seed=self.options.seed)

    def samples(self) -> RegionCrops:
        """Return the transform to views and patches; before `prepare`, an image is its only region and neighbour."""
        return RegionCrops(
            self.options.views,
            self.pairs,
            patch_size=self.patch_size,
            drop_path_sites=self.student.backbone.num_drop_path_sites,
        )

    def forward(self, batch: Batch, step: Step) -> Output:
        """Compute the losses of views, of a region and its jittered copy, and of a pair of regions."""
        student, teacher = self.student.backbone, self.teacher.backbone
        crops = augmented_crops(batch, self.options.views, student)
        views = [view for each in crops for view in each.split(len(batch))]
        inputs = [encode_frozen(teacher, view, self.options.backbone) for view in views]
        noise = noise_of_views(batch)
        pairs = ((level, slice(2 * number, 2 * number + 2)) for number, level in enumerate(self.levels))
        return Output({level: self.pair_loss(level, inputs[pair], noise[pair]) for level, pair in pairs})
