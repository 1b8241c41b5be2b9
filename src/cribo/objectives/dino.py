"""DINO with multi-crop (Caron et al. 2021): image-level self-distillation, the basis of CrIBo and its baseline.

The teacher encodes two global crops, the student also several local ones; from each crop the student predicts the
teacher's output for every other global crop.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from cribo.arguments import ConfigError
from cribo.data.photometric import Photometric, apply_photometric, sample_photometric
from cribo.data.samples import Batch, LazyImage, Sample, SampleTransform
from cribo.method import Centre, Crops, ViewRecipe, cut_views, sample_crops
from cribo.models import normalise
from cribo.objectives.base import Columns, Output, Setting, Step
from cribo.objectives.distillation import Distillation
from cribo.objectives.trunk import encode, encode_frozen
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

        def draw(height: int, width: int) -> list[tuple[Crops, int]]:
            views = sample_crops(height, width, self.recipe, generator=generator)
            pairs = [sample_crops(height, width, self.local, generator=generator) for _ in self._pairs()]
            boxes, flips = (torch.cat([getattr(pair, part) for pair in pairs]) for part in ("boxes", "flips"))
            local = Crops(boxes[: self.local_crops], flips[: self.local_crops])
            return [(views, self.recipe.size), (local, self.local.size)]

        pixels, (views, local), _ = load_for_crops(image, draw)
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
        super().__init__(setting, levels={"image": setting.options.head.prototypes})
        backbone = self.student.backbone
        if local_crops < 1:
            raise ConfigError(f"objective.args.local_crops must be >= 1, got {local_crops}")
        if not 0 < local_area[0] <= local_area[1] <= 1:
            raise ConfigError(f"objective.args.local_area must be ordered (low, high) within 0 to 1, got {local_area}")
        if local_size < 1 or local_size % backbone.patch_size:
            raise ConfigError(
                f"objective.args.local_size must be a multiple of the patch size {backbone.patch_size}, got "
                f"{local_size}"
            )
        self.crops = MultiCrop(
            setting.options.views,
            local_crops=local_crops,
            local_size=local_size,
            local_area=(local_area[0], local_area[1]),
            drop_path_sites=backbone.num_drop_path_sites,
        )
        if setting.options.losses.centring == "sinkhorn":
            self.images_per_group = setting.options.objects.group_size
        self._embeddings: list[Float[Tensor, "2 b e"]] = []

    def samples(self) -> SampleTransform:
        """Return the transform to global and local crops."""
        return self.crops

    def forward(self, batch: Batch, step: Step) -> Output:
        """Cross-entropy between teacher and student over all pairs of different crops."""
        config = self.options.backbone
        inputs = [encode_frozen(self.teacher.backbone, views, config) for views in self._augmented(batch)]
        with torch.no_grad():
            embeddings = self.teacher.head(encode(self.teacher.backbone, inputs[0]).global_token)
        students = [
            self.student.head(encode(self.student.backbone, views, drop_path_noise=noise).global_token)
            for views, noise in zip(inputs, self._noise(batch), strict=True)
        ]
        loss, entropy = self.image_loss(embeddings, torch.cat(students), step, images=len(batch))
        return Output({"dino": loss}, {"teacher_entropy": entropy})

    def image_loss(
        self, embeddings: Float[Tensor, "g e"], students: Float[Tensor, "v e"], step: Step, *, images: int
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return the loss of the embeddings of a batch of images, crop after crop, and the teacher's mean entropy.

        The entropy is divided by its maximum. The embeddings are kept to update the centre.
        """
        level, teacher = self.level("image", step), embeddings.unflatten(0, (2, images))
        self._embeddings.append(teacher)
        with torch.no_grad():
            targets = []
            for group in self.groups(images):
                centre = self.centred(level, teacher[:, group]).centre
                logits = F.linear(teacher[:, group], level.teacher_prototypes) - centre
                targets.append((logits / level.teacher_temperature).softmax(dim=-1))
            target = torch.cat(targets, dim=1)  # (2, B, L)
            entropy = torch.special.entr(target).sum(dim=-1).mean() / math.log(target.shape[-1])
        logits = F.linear(students.unflatten(0, (-1, images)), level.student_prototypes)
        return dino_loss(target, logits / level.student_temperature), entropy

    def groups(self, images: int) -> list[slice]:
        """Return the groups of images that share a centre: the whole micro-batch with the moving average."""
        size = self.images_per_group if self.options.losses.centring == "sinkhorn" else images
        return [slice(start, start + size) for start in range(0, images, size)]

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Update the centre and the teacher."""
        embeddings, self._embeddings = self._embeddings, []
        self.update_centres(step, {"image": embeddings})
        self.move_teacher(step)

    def _noise(self, batch: Batch) -> list[Float[Tensor, "r sites"] | None]:
        """Return the random numbers of the student's stochastic depth for the global and the local crops."""
        if not self.crops.drop_path_sites:
            return [None, None]
        noise = batch["drop_path_noise"].transpose(0, 1)
        return [part.flatten(0, 1) for part in (noise[:2], noise[2:])]

    def _augmented(self, batch: Batch) -> Iterator[Float[Tensor, "r 3 h w"]]:
        """Yield the global and then the local crops, crop after crop, augmented and normalised for the networks."""
        backbone, first = self.student.backbone, 0
        for name in ("global", "local"):
            views, threshold = batch[name], self.crops.recipe.solarise_threshold
            number = views.shape[1]
            parameters = Photometric(*(values[:, first : first + number] for values in batch["photometric"]))
            first += number
            changed = apply_photometric(views.flatten(0, 1), parameters.flatten(), solarise_threshold=threshold)
            images = normalise(changed, mean=backbone.mean, std=backbone.std)
            yield images.unflatten(0, (-1, number)).transpose(0, 1).flatten(0, 1)


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
