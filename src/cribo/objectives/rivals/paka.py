"""PaKA (Yeo et al. 2025): the patches of an image must be as similar to each other as the teacher finds them.

The student encodes local crops, each of which lies almost inside a global crop. The teacher encodes the global crops
without photometric augmentation. Features of both are aligned to the overlap and embedded by a head, and the kernels
of their patches are compared by centred kernel alignment (Kornblith et al. 2019).
"""

from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from cribo.base.bounds import at_least
from cribo.base.errors import ConfigError
from cribo.data.samples import Batch, Sample
from cribo.method import Crops, sample_crops
from cribo.method.precision import in_float32
from cribo.models import Backbone, Features, normalise
from cribo.objectives.base import Columns, Output, Setting, Step
from cribo.objectives.config import HeadConfig
from cribo.objectives.crops import CropSampler, augmented, check_local_crops, concatenate_crops, multi_crop
from cribo.objectives.mlp import make_mlp, seeded_weights
from cribo.objectives.overlap import align_overlap, overlap_area, overlap_boxes
from cribo.objectives.self_distillation import StudentNetwork, StudentTeacher
from cribo.objectives.trunk import encode, encode_frozen

LEAST_CONTAINED = 0.9
"""Smallest share of a local crop that lies inside its global crop; m in the paper."""

_LOCAL_SIZE = 98
_CROP_ATTEMPTS = 50


def parent_of(number: int) -> int:
    """Return the global crop, 0 or 1, with which a local crop is compared."""
    return number % 2


class ContainedCrops(CropSampler):
    """Transform of an image into two global crops and local crops, of which at least 90 % lie inside a global one.

    Local crops are redrawn until they do. After fifty draws, a crop is moved into its global crop, and reduced to it if
    it is larger. The global crops are not augmented.

    A batch also contains `boxes` (B, V, V, 4), the overlaps of all pairs of crops as in `overlap_boxes`, global crops
    first, and `flips` (B, V). `photometric` and `drop_path_noise` are those of the local crops.
    """

    def draw_crops(self, height: int, width: int, generator: torch.Generator) -> list[Crops]:
        """Draw the global crops and the local ones."""
        views = self.sets[0].draw(height, width, generator)
        drawn = [self._draw_local(number, (height, width), generator, views) for number in range(self.sets[1].count)]
        return [views, concatenate_crops(drawn)]

    def places(self, crops: Crops, generator: torch.Generator) -> Sample:
        """Return the overlaps."""
        return {"boxes": overlap_boxes(crops), "flips": crops.flips}

    def photometric(self, generator: torch.Generator) -> Sample:
        """Draw the photometric parameters of the local crops."""
        return {"photometric": self.sets[1].photometric(generator)}

    def draw(self, generator: torch.Generator) -> Sample:
        """Draw the random numbers of the student's stochastic depth."""
        noise = torch.rand((self.sets[1].count, self.drop_path_sites), generator=generator)
        return {"drop_path_noise": noise}

    def _draw_local(self, number: int, size: tuple[int, int], generator: torch.Generator, views: Crops) -> Crops:
        own, recipe = parent_of(number), self.sets[1].recipe
        parent = Crops(views.boxes[own, None], views.flips[own, None])
        for _ in range(_CROP_ATTEMPTS):
            pair = sample_crops(*size, recipe, generator=generator)
            contained = overlap_area(concatenate_crops([pair, parent]))[:2, 2] / pair.boxes[:, 2:].prod(dim=1)
            for place, share in enumerate(contained.tolist()):
                if share >= LEAST_CONTAINED:
                    return Crops(pair.boxes[place, None], pair.flips[place, None])
        return _moved_into(parent, sample_crops(*size, recipe, generator=generator))


def _moved_into(parent: Crops, crops: Crops) -> Crops:
    """Return the first of some crops, moved into another crop, and reduced to it if it is larger."""
    sides = torch.minimum(crops.boxes[:1, 2:], parent.boxes[:, 2:])
    least, most = parent.boxes[:, :2], parent.boxes[:, :2] + parent.boxes[:, 2:] - sides
    return Crops(torch.cat((crops.boxes[:1, :2].clamp(least, most), sides), dim=1), crops.flips[:1])


class PaKANetwork(StudentNetwork):
    """Backbone and head of a student or teacher.

    Args:
        backbone: the backbone.
        config: sizes of the head, whose output is not normalised.
        seed: the only source of the head's random weights.
    """

    def __init__(self, backbone: Backbone, config: HeadConfig, *, seed: int) -> None:
        super().__init__(backbone)
        with seeded_weights(seed):
            self.head = make_mlp(backbone.embed_dim, config, batch_norm=False)


class PaKA(StudentTeacher):
    """Patch-level kernel alignment, for pretrained networks with patch tokens or a feature map.

    Reads `views` (the global crops, and all but size and area of the local ones), `backbone`, `head` (its MLP) and
    `optim`.

    The head, its place after the alignment, the overlap of 90 % and the teacher without augmentation are the paper's;
    number, size and area of the local crops are NeCo's, and which of the global crops each is compared with is ours
    (docs/objectives.md).

    Args:
        setting: the run.
        local_crops: number of local crops per image, which are compared with the first and the second global crop in
            turn.
        local_size: side of a local crop in pixels. [98, or the next lower multiple of the patch size]
        local_area: (low, high) share of the image that a local crop covers.

    Raises:
        ConfigError: a value out of range.
    """

    columns = Columns(labels={"paka": "1 - kernel alignment"})
    # optim.lr is the rate of the head, which starts from random weights.
    lr_factors = {"backbone.": 0.1}

    student: PaKANetwork
    teacher: PaKANetwork

    def __init__(
        self,
        setting: Setting,
        *,
        local_crops: Annotated[int, at_least(1)] = 4,
        local_size: int | None = None,
        local_area: tuple[float, float] = (0.05, 0.25),
    ) -> None:
        super().__init__(setting)
        options = setting.options
        self.student = PaKANetwork(setting.build_backbone(), options.head, seed=options.seed)
        self.teacher = self.student.make_teacher()
        backbone, recipe = self.student.backbone, options.views
        if local_size is None:
            local_size = max(2, _LOCAL_SIZE // backbone.patch_size) * backbone.patch_size
        check_local_crops(local_size, local_area, backbone, views=recipe.size)
        self.grid = local_size // backbone.patch_size
        if self.grid < 2:
            raise ConfigError(
                f"objective.args.local_size must be at least {2 * backbone.patch_size} for two patches per side, "
                f"got {local_size}"
            )
        # Local crops differ in size and area only.
        sets = multi_crop(
            recipe, count=local_crops, size=local_size, area=local_area, blur=recipe.blur, solarise=recipe.solarise
        )
        self.crops = ContainedCrops(*sets, drop_path_sites=backbone.num_drop_path_sites)

    def samples(self) -> ContainedCrops:
        """Return the transform to local crops inside global ones."""
        return self.crops

    def forward(self, batch: Batch, step: Step) -> Output:
        """1 - kernel alignment of student and teacher, the mean over images and local crops."""
        options, images = self.options, len(batch)
        with torch.no_grad():
            views = encode_frozen(self.teacher.backbone, self._global_views(batch), options.backbone)
            teachers = _maps(encode(self.teacher.backbone, views), images)
        local = augmented(batch, "local", options.views, self.student.backbone)
        inputs = encode_frozen(self.teacher.backbone, local.transpose(0, 1).flatten(0, 1), options.backbone)
        noise = batch["drop_path_noise"].transpose(0, 1).flatten(0, 1)  # (V * B, sites)
        features = encode(self.student.backbone, inputs, drop_path_noise=noise if noise.shape[1] else None)
        students = _maps(features, images)
        seen, wanted = self._aligned(students, teachers, batch["boxes"], batch["flips"])
        with torch.no_grad():
            target = self.teacher.head(wanted)
        return Output({"paka": 1 - kernel_alignment(self.student.head(seen), target).mean()})

    def _global_views(self, batch: Batch) -> Float[Tensor, "r c h w"]:
        """Return the global crops, crop after crop, without photometric augmentation."""
        backbone = self.teacher.backbone
        views = batch["global"].transpose(0, 1).flatten(0, 1)
        return normalise(views.float() / 255, mean=backbone.mean, std=backbone.std)

    def _aligned(
        self,
        students: Float[Tensor, "v b d s s"],
        teachers: Float[Tensor, "2 b d h w"],
        boxes: Float[Tensor, "b c c 4"],
        flips: Tensor,
    ) -> tuple[Float[Tensor, "v b n d"], Float[Tensor, "v b n d"]]:
        """Align the maps of each local crop and of its global crop to their overlap."""
        seen, wanted = [], []
        for number, own in enumerate(students):
            crop, parent = number + 2, parent_of(number)
            seen.append(align_overlap(own, boxes[:, crop, parent], flips[:, crop], self.grid))
            wanted.append(align_overlap(teachers[parent], boxes[:, parent, crop], flips[:, parent], self.grid))
        return torch.stack(seen), torch.stack(wanted)


@in_float32
def kernel_alignment(student: Float[Tensor, "*b n d"], teacher: Float[Tensor, "*b n e"]) -> Float[Tensor, "*b"]:
    """Centred kernel alignment of two sets of features of the same n patches: <HKH, HLH> / (|HKH| |HLH|).

    K and L are the linear kernels of the features, the scalar products of all pairs of patches, H = I - 11^T / n
    centres them, and <,> is Frobenius' scalar product. The alignment is 1 for features that differ by a rotation, a
    scale or a constant vector, and 0 if all patches of an image have the same features.

    Source: Kornblith et al. 2019, equation 3; Yeo et al. 2025.

    Example:
        >>> patches, rotation = torch.randn(9, 4), torch.linalg.qr(torch.randn(4, 4)).Q
        >>> round(float(kernel_alignment(3 * patches @ rotation + 1, patches)), 4)
        1.0
    """
    kernels = []
    for features in (student, teacher):
        centred = features - features.mean(dim=-2, keepdim=True)
        kernels.append((centred @ centred.mT).flatten(-2))
    return F.cosine_similarity(*kernels, dim=-1)


def _maps(features: Features, images: int) -> Float[Tensor, "v b d h w"]:
    """Return the patch features as maps of V crops."""
    return features.tokens.unflatten(0, (-1, images)).transpose(2, 3).unflatten(3, features.grid)
