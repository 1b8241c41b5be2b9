"""DINO with multi-crop (Caron et al. 2021): image-level self-distillation, the basis of CrIBo and its baseline.

The teacher encodes two global crops, the student also several local ones; from each crop the student predicts the
teacher's output for every other global crop.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.arguments import ConfigError
from cribo.data.photometric import Photometric, apply_photometric, sample_photometric
from cribo.data.samples import Batch, LazyImage, Sample
from cribo.method import Centre, Crops, ViewRecipe, cut_views, sample_crops
from cribo.models import Backbone, normalise
from cribo.models.backbone import Features
from cribo.objectives.base import Columns, Output, Setting, Step
from cribo.objectives.distillation import Distillation
from cribo.objectives.trunk import Inputs, encode, encode_frozen
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


def check_local_crops(number: int, size: int, area: tuple[float, float], patch_size: int) -> None:
    """Check the options of local crops.

    Raises:
        ConfigError: a value out of range, or a size that is not a multiple of the patch size.
    """
    if number < 1:
        raise ConfigError(f"objective.args.local_crops must be >= 1, got {number}")
    if not 0 < area[0] <= area[1] <= 1:
        raise ConfigError(f"objective.args.local_area must be ordered (low, high) within 0 to 1, got {area}")
    if size < 1 or size % patch_size:
        raise ConfigError(f"objective.args.local_size must be a multiple of the patch size {patch_size}, got {size}")


def augmented_crops(batch: Batch, recipe: ViewRecipe, backbone: Backbone) -> Iterator[Float[Tensor, "v b 3 h w"]]:
    """Yield the global and then the local crops of a batch, augmented and normalised for a backbone."""
    first = 0
    for name in ("global", "local"):
        views = batch[name]
        number = views.shape[1]
        parameters = Photometric(*(values[:, first : first + number] for values in batch["photometric"]))
        first += number
        changed = apply_photometric(
            views.flatten(0, 1), parameters.flatten(), solarise_threshold=recipe.solarise_threshold
        )
        images = normalise(changed, mean=backbone.mean, std=backbone.std)
        yield images.unflatten(0, (-1, number)).transpose(0, 1)


def encode_crops(student: Backbone, inputs: Sequence[Inputs], batch: Batch) -> Iterator[Features]:
    """Yield the student's features of the global and then the local crops, with stochastic depth; crop after crop."""
    noise = batch["drop_path_noise"].transpose(0, 1)  # (V, B, sites)
    first = 0
    for name, own_inputs in zip(("global", "local"), inputs, strict=True):
        number = batch[name].shape[1]
        own = noise[first : first + number].flatten(0, 1) if noise.shape[2] else None
        first += number
        yield encode(student, own_inputs, drop_path_noise=own)


class DINO(Distillation):
    """Self-distillation with multi-crop.

    Reads `views` (the global crops), `backbone`, `head`, `losses` (temperatures, centring) and `optim`.

    Args:
        setting: the run.
        local_crops: number of local crops per image.
        local_size: side of a local crop in pixels.
        local_area: (low, high) share of the image that a local crop covers.

    Raises:
        ConfigError: a value out of range.
    """

    columns = Columns(labels={"dino": "DINO"}, progress={"teacher_entropy": "entropy {:.2f}"})

    image_centre: Centre

    def __init__(
        self,
        setting: Setting,
        *,
        local_crops: int = 8,
        local_size: int = 96,
        local_area: tuple[float, float] = (0.05, 0.25),
    ) -> None:
        super().__init__(setting, levels=("image",))
        backbone = self.student.backbone
        check_local_crops(local_crops, local_size, local_area, backbone.patch_size)
        self.crops = MultiCrop(
            setting.options.views,
            local_crops=local_crops,
            local_size=local_size,
            local_area=(local_area[0], local_area[1]),
            drop_path_sites=backbone.num_drop_path_sites,
        )
        self._embeddings: list[Float[Tensor, "r e"]] = []

    def samples(self) -> MultiCrop:
        """Return the transform to global and local crops."""
        return self.crops

    def forward(self, batch: Batch, step: Step) -> Output:
        """Cross-entropy between teacher and student over all pairs of different crops."""
        backbone, config = self.student.backbone, self.options.backbone
        parts = augmented_crops(batch, self.crops.recipe, backbone)
        inputs = [encode_frozen(self.teacher.backbone, views.flatten(0, 1), config) for views in parts]
        level = self.level("image", step)
        with torch.no_grad():
            embeddings = self.teacher.head(encode(self.teacher.backbone, inputs[0]).global_token)
            self._embeddings.append(embeddings)
            centre = self.centred(level, embeddings).centre
            logits = F.linear(embeddings, level.teacher_prototypes) - centre
            targets = (logits / level.teacher_temperature).softmax(dim=-1).unflatten(0, (2, -1))  # (2, B, L)
        students = [self.student.head(features.global_token) for features in encode_crops(backbone, inputs, batch)]
        logits = F.linear(torch.cat(students), level.student_prototypes).unflatten(0, (-1, len(batch)))
        loss = dino_loss(targets, logits / level.student_temperature)
        entropy = torch.special.entr(targets).sum(dim=-1).mean() / torch.log(targets.new_tensor(targets.shape[-1]))
        return Output({"dino": loss}, {"teacher_entropy": entropy})

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Update the centre and the teacher."""
        embeddings, self._embeddings = self._embeddings, []
        self.update_centres(step, {"image": embeddings})
        self.move_teacher(step)


def dino_loss(targets: Float[Tensor, "2 b l"], logits: Float[Tensor, "v b l"]) -> Float[Tensor, ""]:
    """Mean of H(p_t, p_s) over images and over pairs of a global crop and another crop.

    Args:
        targets: (2, B, L) the teacher's probabilities for the global crops.
        logits: (V, B, L) the student's logits divided by its temperature; the first two crops are the global ones.

    Source: DINO, equation 3.
    """
    entropies = -torch.einsum("gbl,vbl->gv", targets, logits.log_softmax(dim=-1)) / logits.shape[1]
    others = ~torch.eye(*entropies.shape, dtype=torch.bool, device=entropies.device)
    return entropies[others].mean()
