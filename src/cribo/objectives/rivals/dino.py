"""DINO with multi-crop (Caron et al. 2021): image-level self-distillation, the basis of CrIBo and its baseline.

The teacher encodes two global crops, the student also several local ones; from each crop the student predicts the
teacher's output for every other global crop.
"""

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from cribo.base.bounds import at_least
from cribo.data.samples import Batch, SampleTransform
from cribo.method import Centre
from cribo.method.precision import in_float32
from cribo.objectives.base import Columns, Output, Setting, Step
from cribo.objectives.crops import CropSampler, augmented_crops, check_local_crops, crop_noise, multi_crop
from cribo.objectives.self_distillation import Distillation
from cribo.objectives.trunk import encode, encode_frozen


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
        local_crops: Annotated[int, at_least(1)] = 8,
        local_size: int = 96,
        local_area: tuple[float, float] = (0.05, 0.25),
    ) -> None:
        super().__init__(setting, levels={"image": setting.options.head.prototypes})
        backbone = self.student.backbone
        check_local_crops(local_size, local_area, backbone, views=setting.options.views.size)
        sets = multi_crop(setting.options.views, count=local_crops, size=local_size, area=local_area)
        self.crops = CropSampler(*sets, drop_path_sites=backbone.num_drop_path_sites)
        if setting.options.losses.centring == "sinkhorn":
            self.images_per_group = setting.options.objects.group_size

    def samples(self) -> SampleTransform:
        """Return the transform to global and local crops."""
        return self.crops

    def forward(self, batch: Batch, step: Step) -> Output:
        """Cross-entropy between teacher and student over all pairs of different crops."""
        crops = augmented_crops(batch, self.options.views, self.student.backbone)
        inputs = [encode_frozen(self.teacher.backbone, views, self.options.backbone) for views in crops]
        with torch.no_grad():
            embeddings = self.teacher.head(encode(self.teacher.backbone, inputs[0]).global_token)
        students = [
            self.student.head(encode(self.student.backbone, views, drop_path_noise=noise).global_token)
            for views, noise in zip(inputs, crop_noise(batch), strict=True)
        ]
        loss, entropy = self.image_loss(embeddings, torch.cat(students), step, images=len(batch))
        return Output({"dino": loss}, {"teacher_entropy": entropy})

    @in_float32
    def image_loss(
        self, embeddings: Float[Tensor, "g e"], students: Float[Tensor, "v e"], step: Step, *, images: int
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return the loss of a batch of images, and the teacher's mean entropy divided by its maximum.

        The teacher's embeddings are kept to update the centre.

        Args:
            embeddings: (2B, E) the teacher's, of the global crops, crop after crop.
            students: (VB, E) the student's, of all V crops, global ones first.
            step: sets the temperatures.
            images: B, number of images.
        """
        level, teacher = self.level("image", step), embeddings.unflatten(0, (2, images))
        self.embeddings["image"].append(teacher)
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
        return self.image_groups(images) if self.options.losses.centring == "sinkhorn" else [slice(0, images)]


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
