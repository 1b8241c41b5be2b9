"""Losses on features beside an objective's own, shared by CrIBo and view alignment. None of them is in the paper."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cribo.models import Backbone
from cribo.objectives.banks import RunBank
from cribo.objectives.base import Step
from cribo.objectives.config import AnchorKind, LossConfig
from cribo.objectives.headfree import cosine_distance, gram_loss, mean_or_zero, soft_neighbour_loss
from cribo.objectives.objects import RowPairs, mean_over_groups
from cribo.objectives.trunk import Inputs, encode


@dataclass(frozen=True)
class StepFeatures:
    """Features of a micro-batch that the losses read.

    Attributes:
        inputs: inputs of both networks.
        tokens: (B, 2, N, D) the student's tokens.
        pairs: the teacher's features of objects and points, by name, each with the student's (2, R, D).
    """

    inputs: Inputs
    tokens: Float[Tensor, "b 2 n d"]
    pairs: Mapping[str, tuple[RowPairs, Float[Tensor, "2 r d"]]]


Extra = Callable[[StepFeatures, Step], Float[Tensor, ""]]
"""A loss on the features of a micro-batch."""

LABELS = {
    "object_neighbours": "soft neighbours of objects",
    "patch_neighbours": "soft neighbours of patches",
    "anchor": "distance from the starting weights",
}
"""Labels of the losses in plots, by name."""


class SoftNeighbours:
    """Soft-neighbour loss of objects or points, averaged over groups of images.

    Args:
        kind: name of the rows in `StepFeatures.pairs`.
        bank: bank of these rows.
        losses: number of neighbours and temperatures.
        group_size: number of images per group.
        from_epoch: first epoch in which the bank is read; the loss is 0 before.
    """

    def __init__(self, kind: str, bank: RunBank, losses: LossConfig, *, group_size: int, from_epoch: int = 0) -> None:
        self.kind, self.bank, self.losses = kind, bank, losses
        self.group_size, self.from_epoch = group_size, from_epoch

    def __call__(self, features: StepFeatures, step: Step) -> Float[Tensor, ""]:
        """Return the loss, averaged over groups."""
        pairs, student = features.pairs[self.kind]
        bank = self.bank.allocate(pairs.teacher)
        if step.epoch < self.from_epoch:
            return 0 * student.sum()
        student_temperature, teacher_temperature = self.losses.neighbour_temperature
        return mean_over_groups(
            pairs.groups(self.group_size),
            lambda rows: soft_neighbour_loss(
                student[:, rows],
                pairs.teacher[:, rows],
                pairs.images[rows],
                bank,
                neighbours=self.losses.neighbours,
                student_temperature=student_temperature,
                teacher_temperature=teacher_temperature,
            ),
        )


def point_distance(features: StepFeatures, step: Step) -> Float[Tensor, ""]:
    """Mean cosine distance between the student's and the teacher's features at the same points of both views."""
    points, student = features.pairs["points"]
    return mean_or_zero(cosine_distance(student.flip(0), points.teacher))


class Anchor(nn.Module):
    """Distance of patch features from those of a frozen copy of a backbone.

    Args:
        start: the backbone with its starting weights.
        kind: `gram` compares the similarities between the patches of a view, `cosine` compares the patches.
    """

    def __init__(self, start: Backbone, kind: AnchorKind) -> None:
        super().__init__()
        self.start = copy.deepcopy(start).requires_grad_(False)
        self.kind = kind
        self.train()

    def train(self, mode: bool = True) -> "Anchor":
        """Stay in evaluation mode: batch norms use the statistics of the starting weights."""
        return super().train(False)

    def forward(self, features: StepFeatures, step: Step) -> Float[Tensor, ""]:
        """Return the mean distance of the student's tokens."""
        with torch.no_grad():
            start = encode(self.start, features.inputs).tokens
        tokens = features.tokens.flatten(0, 1)
        return gram_loss(tokens, start) if self.kind == "gram" else cosine_distance(tokens, start).mean()


def make_extras(
    weights: Mapping[str, float],
    losses: LossConfig,
    *,
    object_bank: RunBank,
    patch_bank: RunBank,
    anchor: Anchor | None,
    group_size: int,
    from_epoch: int = 0,
) -> dict[str, Extra]:
    """Return the losses with a weight, by name; names of other losses are ignored.

    Args:
        weights: weight of each loss; 0 for none.
        losses: options of soft neighbours.
        object_bank: bank for the soft neighbours of objects.
        patch_bank: bank for the soft neighbours of patches.
        anchor: distance from the starting weights; None if it is off.
        group_size: number of images per group.
        from_epoch: first epoch in which soft neighbours are used.
    """
    extras: dict[str, Extra | None] = {
        "points": point_distance,
        "object_neighbours": SoftNeighbours(
            "objects", object_bank, losses, group_size=group_size, from_epoch=from_epoch
        ),
        "patch_neighbours": SoftNeighbours("points", patch_bank, losses, group_size=group_size, from_epoch=from_epoch),
        "anchor": anchor,
    }
    return {name: extra for name, extra in extras.items() if extra is not None and weights.get(name)}
