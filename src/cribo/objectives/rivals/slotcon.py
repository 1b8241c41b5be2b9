"""SlotCon (Wen et al. 2022): semantic grouping of patches by learned prototypes, and contrast of the groups.

Every patch is assigned softly to prototypes that all images share. Student and teacher must give patches in the overlap
of the views the same assignment (grouping), and the mean feature of each group, a slot, must be closest to the same
slot of the other view among the slots of all images.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from cribo.base.bounds import between
from cribo.base.errors import ConfigError
from cribo.data.samples import Batch, Sample
from cribo.method import Centre, Crops, ViewRecipe, sample_crops
from cribo.method.blocks import in_blocks, rows_per_block
from cribo.method.config import UnitInterval
from cribo.method.precision import in_float32
from cribo.models import Backbone
from cribo.objectives.base import Columns, Output, Setting, Step, sum_over_ranks
from cribo.objectives.config import HeadConfig, Temperature
from cribo.objectives.crops import CropSampler, CropSet
from cribo.objectives.mlp import make_mlp, seeded_weights
from cribo.objectives.overlap import align, overlap_area, overlap_boxes
from cribo.objectives.self_distillation import StudentNetwork, StudentTeacher
from cribo.objectives.trunk import Inputs, encode, inputs_of, split_inputs
from cribo.objectives.views import noise_of_views

_REDRAWS = 10
_LEAST_OVERLAP = 0.01  # of the second crop's area
_LEAST_ATTENTION = 1e-6


class OverlappingPairs(CropSampler):
    """Transform of an image into two `views` that overlap.

    A batch also contains `overlap` (B, 2, 4), the box (x1, y1, x2, y2) of the overlap in fractions of each view (empty
    if x2 <= x1 or y2 <= y1), and `flips` (B, 2), whether a view is mirrored.
    """

    def draw_crops(self, height: int, width: int, generator: torch.Generator) -> list[Crops]:
        """Draw the crops of both views."""
        return [overlapping_crops(height, width, self.sets[0].recipe, generator=generator)]

    def places(self, crops: Crops, generator: torch.Generator) -> Sample:
        """Return the overlap."""
        return {"overlap": overlap_boxes(crops)[[0, 1], [1, 0]], "flips": crops.flips}


def overlapping_crops(height: int, width: int, recipe: ViewRecipe, *, generator: torch.Generator) -> Crops:
    """Draw the crops of both views of an image, the second again until it overlaps the first.

    It is drawn again up to ten times, until the overlap is at least 1 % of its area. The last one may not overlap.

    Source: the released code.
    """
    crops = sample_crops(height, width, recipe, generator=generator)
    for _ in range(_REDRAWS):
        if overlap_area(crops)[0, 1] >= _LEAST_OVERLAP * crops.boxes[1, 2:].prod():
            break
        again = sample_crops(height, width, recipe, generator=generator)
        crops = Crops(torch.stack((crops.boxes[0], again.boxes[1])), torch.stack((crops.flips[0], again.flips[1])))
    return crops


@dataclass(frozen=True)
class Slots:
    """Soft assignment of patches to prototypes, for any number of views.

    Attributes:
        features: (..., N, E) projected patches.
        scores: (..., N, K) cosine similarity of each patch and prototype.
        slots: (..., K, E) mean of the features, weighted by their attention to each prototype.
        present: (..., K) whether a prototype has the greatest score of any patch.
    """

    features: Float[Tensor, "*v n e"]
    scores: Float[Tensor, "*v n k"]
    slots: Float[Tensor, "*v k e"]
    present: Bool[Tensor, "*v k"]


@in_float32
def find_slots(features: Float[Tensor, "*v n e"], prototypes: Float[Tensor, "k e"], *, temperature: float) -> Slots:
    """Assign patches to prototypes.

    Args:
        features: (..., N, E) projected patches of some views, any scale.
        prototypes: (K, E), any scale.
        temperature: of the softmax over prototypes.

    Source: SlotCon; the smallest attention, 1e-6, as in the released code.

    Example:
        >>> found = find_slots(torch.randn(2, 5, 49, 8), torch.randn(16, 8), temperature=0.07)
        >>> found.slots.shape, found.present.shape
        (torch.Size([2, 5, 16, 8]), torch.Size([2, 5, 16]))
    """
    scores = F.normalize(features, dim=-1) @ F.normalize(prototypes, dim=-1).T
    attention = (scores / temperature).softmax(dim=-1) + _LEAST_ATTENTION
    slots = attention.mT @ features / attention.sum(dim=-2)[..., None]
    nearest = scores.argmax(dim=-1)
    return Slots(features, scores, slots, torch.zeros_like(slots[..., 0], dtype=torch.bool).scatter(-1, nearest, True))


def align_scores(
    scores: Float[Tensor, "v n k"], overlap: Float[Tensor, "v 4"], flips: Bool[Tensor, " v"], side: int
) -> Float[Tensor, "v n k"]:
    """Resample the scores of views to a regular grid over their overlap, unmirrored: the same places in both views.

    Args:
        scores: (V, N, K) scores of the patches, N = side * side in row-major order.
        overlap: (V, 4) box (x1, y1, x2, y2) in fractions of each view, mirrored if the view is.
        flips: (V,) whether the view is mirrored.
        side: number of patches along each side of a view.

    Source: SlotCon, with RoIAlign as in the released code.
    """
    maps = align(scores.mT.unflatten(2, (side, side)), overlap * side, side)
    return torch.where(flips[:, None, None, None], maps.flip(-1), maps).flatten(2).mT


@in_float32
def grouping_loss(
    student: Float[Tensor, "*v n k"],
    teacher: Float[Tensor, "*v n k"],
    centre: Float[Tensor, " k"],
    *,
    student_temperature: float,
    teacher_temperature: float,
) -> Float[Tensor, "*v"]:
    """Mean over places of H(p_t, p_s), the cross-entropy of both networks' assignments, for each view.

    Args:
        student: (..., N, K) the student's aligned scores of one view.
        teacher: (..., N, K) the teacher's aligned scores of the other view.
        centre: (K,) offset subtracted from the teacher's scores.
        student_temperature: of the student's softmax.
        teacher_temperature: of the teacher's softmax.

    Source: SlotCon; scores are cosines, as in the released code.
    """
    targets = ((teacher - centre) / teacher_temperature).softmax(dim=-1)
    return -(targets * (student / student_temperature).log_softmax(dim=-1)).sum(dim=-1).mean(dim=-1)


@in_float32
def slot_loss(
    predicted: Float[Tensor, "r e"], targets: Float[Tensor, "r e"], keys: Float[Tensor, "z e"], *, temperature: float
) -> Float[Tensor, " r"]:
    """InfoNCE of each predicted slot with the same slot of the other view, among the slots of all images.

    The logits are computed in blocks of rows, and again in the backward pass.

    Args:
        predicted: (R, E) the student's slots after the predictor, any scale.
        targets: (R, E) the teacher's slot of the same image and prototype in the other view, any scale.
        keys: (Z, E) the teacher's slots of all images, which include the targets.
        temperature: of the softmax over keys.

    Returns:
        (R,) cross-entropies times twice the temperature.

    Source: SlotCon; the factor, as in the released code.
    """
    predicted, targets, keys = (F.normalize(rows, dim=-1) for rows in (predicted, targets, keys))

    def of_block(predicted: Tensor, targets: Tensor) -> Float[Tensor, " block"]:
        positive = (predicted * targets).sum(dim=1)
        return 2 * temperature * ((predicted @ keys.T / temperature).logsumexp(dim=1) - positive / temperature)

    size = rows_per_block(len(keys), keys.device)
    return torch.cat(in_blocks(of_block, predicted, targets, size=size))


class SlotNetwork(StudentNetwork):
    """Backbone, projector, prototypes, and the student's predictor.

    Args:
        backbone: network whose patches are grouped.
        config: sizes of the projector and the predictor, and the number of prototypes.
        batch_norm: whether projector and predictor have batch norms.
        predictor_layers: number of the predictor's layers.
        seed: the only source of the random weights.
    """

    student_only = "predictor"

    def __init__(
        self, backbone: Backbone, config: HeadConfig, *, batch_norm: bool, predictor_layers: int, seed: int
    ) -> None:
        super().__init__(backbone)
        with seeded_weights(seed):
            self.projector = make_mlp(backbone.embed_dim, config, batch_norm=batch_norm)
            self.prototypes = nn.Embedding(config.prototypes, config.bottleneck_dim)  # from N(0, 1)
            predictor = replace(config, layers=predictor_layers)
            self.predictor: nn.Module = make_mlp(config.bottleneck_dim, predictor, batch_norm=batch_norm)

    @property
    def last_layers(self) -> list[nn.Parameter]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the prototypes."""
        return list(self.prototypes.parameters())

    def project(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b n e"]:
        """Project the patches of a view. Batch norms use the statistics of all of them."""
        return self.projector(tokens.flatten(0, 1)).unflatten(0, tokens.shape[:2])


class SlotCon(StudentTeacher):
    """Contrastive learning of slots that prototypes find.

    Reads `views`, `backbone`, `head` (MLPs of projector and predictor; number of prototypes), `losses` (temperatures
    and centre of the grouping loss) and `optim`, whose last layers are the prototypes.

    Differs from the released code in this: the teacher is updated after the optimiser step rather than before its next
    forward pass, so its momentum is that of one step earlier; and images whose views do not overlap are left out of the
    grouping loss. The slot loss compares the slots of the whole batch on all ranks, and both losses are means over
    all ranks. Batch norms use the statistics of a view, as there. They are synchronised on GPUs; on CPUs, their
    statistics are those of a process, and a process with fewer than two rows for the predictor contributes no slots.

    Args:
        setting: the run.
        batch_norm: whether projector and predictor have batch norms, as for convolutional networks; without for vision
            transformers.
        predictor_layers: number of the predictor's layers; by default, as many as the projector has.
        attention_temperature: temperature of the assignment that pools the slots.
        slot_temperature: temperature of the slot loss.
        grouping_weight: weight of the grouping loss; that of the slot loss is 1 - grouping_weight.

    Raises:
        ConfigError: a value out of range, a feature map of a single position, or unsupported centring.
    """

    columns = Columns(
        labels={
            "grouping": "grouping of patches",
            "slot": "contrast of slots",
            "slots_per_image": "slots present in both views, per image",
        },
        progress={"slots_per_image": "{:.1f} slots per image"},
    )
    whole_batch = True

    student: SlotNetwork
    teacher: SlotNetwork

    def __init__(
        self,
        setting: Setting,
        *,
        batch_norm: bool = True,
        predictor_layers: Annotated[int, between(1, 16)] | None = None,
        attention_temperature: Temperature = 0.07,
        slot_temperature: Temperature = 0.2,
        grouping_weight: UnitInterval = 0.5,
    ) -> None:
        super().__init__(setting)
        options = setting.options
        if options.losses.centring != "mean":
            raise ConfigError(
                f"SlotCon centres the teacher's scores by a moving average, got losses.centring "
                f"{options.losses.centring}: set losses.centring mean"
            )
        backbone = setting.build_backbone()
        self.side = options.views.size // backbone.patch_size
        if self.side < 2:
            raise ConfigError(
                f"SlotCon requires a feature map of at least 2x2 positions, but {options.backbone.name} has one "
                f"position per {backbone.patch_size} pixels: set views.size to at least {2 * backbone.patch_size}, got "
                f"{options.views.size}"
            )
        self.weights = {"grouping": grouping_weight, "slot": 1 - grouping_weight}
        self.attention_temperature, self.slot_temperature = attention_temperature, slot_temperature
        layers = predictor_layers or options.head.layers
        self.student = SlotNetwork(
            backbone, options.head, batch_norm=batch_norm, predictor_layers=layers, seed=options.seed
        )
        self.teacher = self.student.make_teacher()
        self.centre = Centre(options.head.prototypes, momentum=options.losses.centre_momentum)
        self._features: Float[Tensor, "2 b n e"]  # of the teacher in this step, which has no micro-batches

    def samples(self) -> OverlappingPairs:
        """Return the transform to two overlapping views."""
        sites = self.student.backbone.num_drop_path_sites
        return OverlappingPairs(CropSet("views", self.options.views), drop_path_sites=sites)

    def schedules(self, step: Step) -> dict[str, float]:
        """Return the teacher's momentum and temperature."""
        return {**super().schedules(step), "teacher_temperature": self.teacher_temperature(step)}

    def forward(self, batch: Batch, step: Step) -> Output:
        """Compute both losses, each the sum of both directions. Synchronises with the device to select slots."""
        views = split_inputs(inputs_of(batch, self.teacher.backbone, self.options))
        with torch.no_grad():
            teacher = self._slots(self.teacher, views, (None, None))
        self._features = teacher.features
        student = self._slots(self.student, views, noise_of_views(batch))
        common = student.present & teacher.present.flip(0)  # (2, B, K), by the student's view
        losses = {
            "grouping": self._grouping(student, teacher, batch, step),
            "slot": self._contrast(student, teacher, common, step),
        }
        return Output(losses, {"slots_per_image": (common.sum(), 2 * len(batch))})

    def _slots(self, network: SlotNetwork, views: Sequence[Inputs], noise: Sequence[Tensor | None]) -> Slots:
        """Return the slots of both views, (2, B, ...)."""
        tokens = (
            encode(network.backbone, view, drop_path_noise=of_view).tokens
            for view, of_view in zip(views, noise, strict=True)
        )
        features = torch.stack([network.project(of_view) for of_view in tokens])
        return find_slots(features, network.prototypes.weight, temperature=self.attention_temperature)

    def _grouping(self, student: Slots, teacher: Slots, batch: Batch, step: Step) -> Float[Tensor, ""]:
        """Return the sum of both directions' means over the images of all ranks whose views overlap."""
        overlap, flips = batch["overlap"].transpose(0, 1), batch["flips"].T  # (2, B, ...)
        aligned = (
            align_scores(found.scores.flatten(0, 1), overlap.flatten(0, 1), flips.flatten(), self.side)
            for found in (student, teacher)
        )
        own, other = (scores.unflatten(0, (2, -1)) for scores in aligned)
        losses = grouping_loss(
            own,
            other.flip(0),
            self.centre.value,
            student_temperature=self.options.losses.student_temperature,
            teacher_temperature=self.teacher_temperature(step),
        )
        overlapping = (overlap[0, :, 2:] > overlap[0, :, :2]).all(dim=1)
        counts = step.gather(overlapping.sum())
        return losses.where(overlapping, 0).sum() * len(counts) / counts.sum().clamp_min(1)

    def _contrast(self, student: Slots, teacher: Slots, common: Bool[Tensor, "2 b k"], step: Step) -> Float[Tensor, ""]:
        """Return the sum of both directions' means over the slots of all ranks that are present in both views."""
        rows = common.sum(dim=(1, 2))
        rows = rows.where(rows >= self._fewest_rows, 0)
        numbers = torch.stack((rows, teacher.present.flip(0).sum(dim=(1, 2)))).T
        total = student.slots[:0].sum()  # 0, with a graph
        for view, every in enumerate(step.gather(numbers).transpose(0, 1).tolist()):
            counts, lengths = zip(*every, strict=True)  # by rank: rows, keys
            other = 1 - view
            keys = gather_rows(teacher.slots[other][teacher.present[other]], lengths, step)
            own = student.slots[view][common[view]]
            if len(own) < self._fewest_rows or not sum(counts):
                continue
            targets = teacher.slots[other][common[view]]
            losses = slot_loss(self.student.predictor(own), targets, keys, temperature=self.slot_temperature)
            # Gradients are averaged over ranks.
            total = total + losses.sum() * len(counts) / sum(counts)
        return total

    @property
    def _fewest_rows(self) -> int:
        """Smallest number of rows for the predictor: batch norms that are not synchronised need two."""
        return 2 if any(isinstance(layer, nn.BatchNorm1d) for layer in self.student.predictor.modules()) else 0

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Update the teacher, and the centre with the mean scores of the whole batch before alignment."""
        directions = F.normalize(self._features.flatten(0, -2), dim=-1)
        prototypes = F.normalize(self.teacher.prototypes.weight, dim=-1)
        self.centre.update(*sum_over_ranks(directions, step), prototypes)
        self.move_teacher(step)


def gather_rows(rows: Float[Tensor, "r e"], lengths: Sequence[int], step: Step) -> Float[Tensor, "z e"]:
    """Return the rows of all ranks, rank after rank.

    Args:
        rows: (R, E) rows of this rank.
        lengths: number of rows of each rank.
        step: the current step.
    """
    gathered = step.gather(F.pad(rows, (0, 0, 0, max(lengths) - len(rows))))
    return torch.cat([part[:length] for part, length in zip(gathered, lengths, strict=True)])
