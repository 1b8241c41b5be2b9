"""iBOT (Zhou et al. 2022): masked self-distillation, DINO on [CLS] and on masked patches with one head.

The teacher encodes the global crops, the student the same crops with blocks of patches masked, and several local ones.
From the masked crops, the student predicts the teacher's output for each masked patch.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from cribo.base.bounds import above, at_least, at_most
from cribo.base.errors import ConfigError
from cribo.data.samples import Batch
from cribo.method import Centre, SelfDistillation, weighted_cross_entropy
from cribo.method.precision import in_float32
from cribo.models.masking import Mask
from cribo.objectives.base import Columns, Output, Setting, Step
from cribo.objectives.crops import augmented_crops, crop_noise
from cribo.objectives.objects import mean_over_groups
from cribo.objectives.rivals.dino import DINO
from cribo.objectives.trunk import encode, encode_frozen, shared_blocks

_ATTEMPTS = 10
_ASPECT = (0.3, 1 / 0.3)


def draw_block_mask(grid: tuple[int, int], ratio: float, *, generator: torch.Generator) -> Bool[Tensor, "h w"]:
    """Mask rectangles of patches until a share of the patches is masked, or ten rectangles in a row do not fit.

    A rectangle has at least (min(h, w) // 3)^2 patches if as many remain, and is smaller than the grid on both sides.

    Args:
        grid: (h, w) patches of a view.
        ratio: share of the patches to mask.
        generator: source of the random numbers.

    Source: BEiT (Bao et al. 2022), algorithm 1, with the sizes of iBOT's released code.

    Example:
        >>> mask = draw_block_mask((14, 14), 0.3, generator=torch.Generator().manual_seed(0))
        >>> mask.shape, bool(0 < mask.float().mean() <= 0.3)
        (torch.Size([14, 14]), True)
    """
    height, width = grid
    mask = torch.zeros(grid, dtype=torch.bool)
    least, remaining = (min(grid) // 3) ** 2, ratio * height * width
    low, high = (math.log(aspect) for aspect in _ASPECT)
    while remaining > 0:
        for size, shape, top, left in torch.rand((_ATTEMPTS, 4), dtype=torch.float64, generator=generator).tolist():
            area = least + size * (remaining - least)
            aspect = math.exp(low + shape * (high - low))
            rows, columns = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if rows >= height or columns >= width:
                continue
            row, column = int(top * (height - rows + 1)), int(left * (width - columns + 1))
            block = mask[row : row + rows, column : column + columns]
            added = int((~block).sum())
            if 0 < added <= remaining:
                block.fill_(True)
                remaining -= added
                break
        else:
            break
    return mask


@dataclass(frozen=True)
class BlockMasks:
    """Block masks (2, N) of the global crops of an image: whether a patch is masked.

    Attributes:
        grid: (h, w) patches of a global crop.
        probability: share of the global crops that are masked.
        ratio: (low, high) share of the patches to mask in these.
    """

    grid: tuple[int, int]
    probability: float
    ratio: tuple[float, float]

    def __call__(self, *, generator: torch.Generator) -> Bool[Tensor, "2 n"]:
        """Draw the masks of both crops."""
        return torch.stack([self.draw(generator) for _ in range(2)])

    def draw(self, generator: torch.Generator) -> Bool[Tensor, " n"]:
        """Draw the mask of one crop."""
        masked, share = torch.rand(2, dtype=torch.float64, generator=generator).tolist()
        ratio = self.ratio[0] + share * (self.ratio[1] - self.ratio[0]) if masked < self.probability else 0.0
        return draw_block_mask(self.grid, ratio, generator=generator).flatten()


class IBOT(DINO):
    """Self-distillation of [CLS] and of masked patches, with one head and one last layer for both.

    Reads what DINO reads. The patches' temperatures are those of [CLS]; their centre is separate. If the first blocks
    are frozen (`backbone.train_blocks`), so is the mask token.

    The released code's arguments give the student two last layers and the teacher one by default; here, as in its
    recipes, all share one.

    Args:
        setting: the run.
        local_crops: number of local crops per image.
        local_size: side of a local crop in pixels.
        local_area: (low, high) share of the image that a local crop covers.
        mask_probability: share of the global crops that are masked.
        mask_ratio: (low, high) share of the patches to mask in these.

    Raises:
        ConfigError: the network is no vision transformer with a [CLS] token, or a value out of range.
    """

    columns = Columns(
        labels={"cls": "iBOT, [CLS]", "mim": "iBOT, masked patches"}, progress={"teacher_entropy": "entropy {:.2f}"}
    )

    def __init__(
        self,
        setting: Setting,
        *,
        local_crops: Annotated[int, at_least(1)] = 10,
        local_size: int = 96,
        local_area: tuple[float, float] = (0.05, 0.25),
        mask_probability: Annotated[float, above(0) & at_most(1)] = 0.5,
        mask_ratio: tuple[float, float] = (0.1, 0.5),
    ) -> None:
        super().__init__(setting, local_crops=local_crops, local_size=local_size, local_area=local_area)
        options = setting.options
        backbone = self.student.backbone
        if not backbone.has_class_token:
            raise ConfigError(
                f"iBOT requires a vision transformer whose global token is [CLS], not {options.backbone.name}: set "
                "backbone.args {global_pool: token} if the network has [CLS], or use vit_small_patch16_224"
            )
        if not 0 < mask_ratio[0] <= mask_ratio[1] < 1:
            raise ConfigError(f"objective.args.mask_ratio must be ordered (low, high) within 0 to 1, got {mask_ratio}")
        side = options.views.size // backbone.patch_size
        self.crops.numbers = {"masks": BlockMasks((side, side), mask_probability, mask_ratio)}
        self.patch_centre = Centre(options.head.prototypes, momentum=options.losses.centre_momentum)
        trained = not shared_blocks(backbone, options.backbone)
        # The teacher never reads its token, but the moving average pairs the parameters of both networks.
        for network, requires_grad in ((self.student, trained), (self.teacher, False)):
            width = backbone.model.cls_token.shape[-1]  # not `embed_dim`, which a readout changes
            token = nn.Parameter(backbone.model.cls_token.new_zeros(width), requires_grad=requires_grad)
            network.register_parameter("mask_token", token)
        backbone.accept_masks()
        self.embeddings["patch"] = []

    def forward(self, batch: Batch, step: Step) -> Output:
        """Compute the loss of [CLS] over all pairs of different crops, and the loss of the masked patches."""
        student, teacher, config = self.student, self.teacher, self.options.backbone
        global_crops, local_crops = augmented_crops(batch, self.options.views, student.backbone)
        global_noise, local_noise = crop_noise(batch)
        masks: Bool[Tensor, "2 b n"] = batch["masks"].transpose(0, 1)
        mask = Mask(masks.flatten(0, 1), student.get_parameter("mask_token"))
        unmasked = encode_frozen(teacher.backbone, global_crops, config)
        masked = encode_frozen(student.backbone, global_crops, config, mask=mask)
        local = encode_frozen(student.backbone, local_crops, config)
        with torch.no_grad():
            targets = encode(teacher.backbone, unmasked)
            embeddings, patches = teacher.head(targets.global_token), teacher.head(targets.tokens).unflatten(0, (2, -1))
        self.embeddings["patch"].append(patches)
        features = encode(student.backbone, masked, drop_path_noise=global_noise, mask=mask)
        tokens = features.global_token, encode(student.backbone, local, drop_path_noise=local_noise).global_token
        loss, entropy = self.image_loss(embeddings, student.head(torch.cat(tokens)), step, images=len(batch))
        predicted = student.head(features.tokens[mask.patches])  # only these rows reach the last layer
        level, images = self.level("patch", step), masks.nonzero()[:, 1]

        def mim(group: slice) -> Float[Tensor, ""]:
            rows = predicted[(images >= group.start) & (images < group.stop)]
            own = self.centred(level, patches[:, group])
            return masked_patch_loss(rows, patches[:, group][masks[:, group]], masks[:, group], own)

        losses = {"cls": loss, "mim": mean_over_groups(self.groups(len(batch)), mim)}
        return Output(losses, {"teacher_entropy": entropy})

    def level(self, name: str, step: Step) -> SelfDistillation:
        """Return prototypes, centre and temperatures of `image` or `patch`: only the centres differ."""
        return replace(super().level("image", step), centre=self.centre(name).value)


@in_float32
def masked_patch_loss(
    student: Float[Tensor, "r e"], teacher: Float[Tensor, "r e"], masks: Bool[Tensor, "2 b n"], level: SelfDistillation
) -> Float[Tensor, ""]:
    """Cross-entropy of the masked patches, averaged within each view and then over views; 0 for a view without masks.

    Args:
        student: (R, E) the student's embeddings of the masked patches, in the order of `masks`.
        teacher: (R, E) the teacher's embeddings of the same patches.
        masks: (2, B, N) the R masked patches of both views of B images.
        level: prototypes, centre and temperatures.

    Source: iBOT, equation 2, with the means of the released code.
    """
    shares = 1 / masks.sum(dim=2, keepdim=True).clamp_min(1) / masks.shape[:2].numel()
    return weighted_cross_entropy(student, teacher, shares.expand(masks.shape)[masks].to(student), level)
