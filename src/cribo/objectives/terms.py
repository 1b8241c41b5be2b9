"""Optional losses on features: the terms that CrIBo and view alignment share. None of them is in the paper."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cribo.method import Matches
from cribo.models import Backbone
from cribo.objectives.banks import RunBank
from cribo.objectives.base import Step
from cribo.objectives.config import AnchorKind, LossConfig
from cribo.objectives.headfree import cosine_distance, gram_loss, mean_or_zero, soft_neighbour_loss
from cribo.objectives.objects import RowPairs, mean_over_groups
from cribo.objectives.trunk import Inputs, encode

LABELS = {
    "object_neighbours": "soft neighbours of objects",
    "patch_neighbours": "soft neighbours of patches",
    "anchor": "distance from the starting weights",
}
"""Labels in plots of the terms that CrIBo can have, by name."""


@dataclass(frozen=True)
class StepFeatures:
    """Features of a micro-batch that the terms read.

    Attributes:
        inputs: inputs of both networks.
        tokens: (B, 2, N, D) the student's tokens.
        pairs: the teacher's features of `objects` and `points`, each with the student's (2, R, D).
        matches: matches of the objects in the bank; None if they were not searched.
    """

    inputs: Inputs
    tokens: Float[Tensor, "b 2 n d"]
    pairs: Mapping[str, tuple[RowPairs, Float[Tensor, "2 r d"]]]
    matches: Matches | None = None


class Term(nn.Module):
    """A loss on the features of a micro-batch.

    Attributes:
        reads: what must be found in the batch: `objects`, their `matches`, `points`; and the banks that must be filled:
            `object_bank`, `patch_bank`.
    """

    reads: Collection[str] = ()

    def forward(self, features: StepFeatures, step: Step) -> Float[Tensor, ""]:
        """Return the loss, the mean over groups of images or over the batch."""
        raise NotImplementedError


class PointDistance(Term):
    """Mean cosine distance between the student's and the teacher's features at the same points of both views."""

    reads = ("points",)

    def forward(self, features: StepFeatures, step: Step) -> Float[Tensor, ""]:
        """Return the mean over points."""
        points, student = features.pairs["points"]
        return mean_or_zero(cosine_distance(student.flip(0), points.teacher))


class ObjectDistance(Term):
    """Cosine distance between an object in the student's view and in the teacher's other view.

    Args:
        group_size: number of images per group.
    """

    reads = ("objects",)

    def __init__(self, group_size: int) -> None:
        super().__init__()
        self.group_size = group_size

    def forward(self, features: StepFeatures, step: Step) -> Float[Tensor, ""]:
        """Return the mean over groups."""
        objects, student = features.pairs["objects"]
        distance = cosine_distance(student.flip(0), objects.teacher)
        return mean_over_groups(objects.groups(self.group_size), lambda rows: mean_or_zero(distance[:, rows]))


class NeighbourDistance(Term):
    """Cosine distance between an object in the student's view and the match of the other view's object in the bank.

    Args:
        bank: bank of objects.
        group_size: number of images per group.
    """

    reads = ("objects", "object_bank", "matches")

    def __init__(self, bank: RunBank, group_size: int) -> None:
        super().__init__()
        self.bank, self.group_size = bank, group_size

    def forward(self, features: StepFeatures, step: Step) -> Float[Tensor, ""]:
        """Return the mean over groups."""
        (objects, student), matches = features.pairs["objects"], features.matches
        assert matches is not None
        bank = self.bank.allocate(objects.teacher)

        def of_group(rows: slice) -> Float[Tensor, ""]:
            means: list[Tensor] = []
            for view in (0, 1):
                valid, nearest = matches.valid[view, rows], matches.nearest[view, rows]
                neighbours = bank.objects(view, nearest[valid])
                means.append(mean_or_zero(cosine_distance(student[1 - view, rows][valid], neighbours)))
            return torch.stack(means).mean()

        return mean_over_groups(objects.groups(self.group_size), of_group)


class SoftNeighbours(Term):
    """Soft-neighbour loss of objects or points, averaged over groups of images.

    Args:
        rows: `objects` or `points`.
        bank: bank of these rows.
        losses: number of neighbours and temperatures.
        group_size: number of images per group.
        from_epoch: first epoch in which the bank is read; the loss is 0 before.
    """

    def __init__(self, rows: str, bank: RunBank, losses: LossConfig, *, group_size: int, from_epoch: int = 0) -> None:
        super().__init__()
        self.reads = (rows, "object_bank" if rows == "objects" else "patch_bank")
        self.rows, self.bank, self.losses = rows, bank, losses
        self.group_size, self.from_epoch = group_size, from_epoch

    def forward(self, features: StepFeatures, step: Step) -> Float[Tensor, ""]:
        """Return the mean over groups."""
        pairs, student = features.pairs[self.rows]
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


class Anchor(Term):
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
