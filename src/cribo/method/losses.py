"""Self-distillation: the cross-entropy over prototypes, centring, and the paper's losses (section 3.2.3).

The losses are means over groups of images, whose objects `MemoryBank.match` compares with each other; by default all
rows are one group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from cribo.base.bounds import above, at_least, below
from cribo.method.blocks import rows_per_block
from cribo.method.precision import at_least_float32, in_float32, tf32_under_autocast


@dataclass(frozen=True)
class SelfDistillation:
    """Prototypes, centre and temperatures of one level (image or object) at one step.

    Attributes:
        student_prototypes: (L, E) weight of the student's last layer, attached to the graph.
        teacher_prototypes: (L, E) weight of the teacher's last layer.
        centre: (L,) offset subtracted from the teacher's logits.
        student_temperature: tau_s, temperature of the student's softmax.
        teacher_temperature: tau_t, temperature of the teacher's softmax.

    Raises:
        ValueError: a temperature that is not positive.
    """

    student_prototypes: Float[Tensor, "l e"]
    teacher_prototypes: Float[Tensor, "l e"]
    centre: Float[Tensor, " l"]
    student_temperature: float
    teacher_temperature: float

    def __post_init__(self) -> None:
        above(0).check(student_temperature=self.student_temperature, teacher_temperature=self.teacher_temperature)

    def cross_entropy(
        self, student: Float[Tensor, "r e"], teacher: Float[Tensor, "r e"]
    ) -> tuple[Float[Tensor, " r"], Float[Tensor, "r l"]]:
        """H(p_t, p_s) of each row, and its gradient p_s - p_t with respect to the student's logits over tau_s.

        Source: paper equation 5 and the definition of H below equation 6.
        """
        p_teacher = ((teacher @ self.teacher_prototypes.T - self.centre) / self.teacher_temperature).softmax(dim=1)
        log_p_student = (student @ self.student_prototypes.T / self.student_temperature).log_softmax(dim=1)
        return -(p_teacher * log_p_student).sum(dim=1), log_p_student.exp() - p_teacher


@tf32_under_autocast
@in_float32
def cross_view_loss(
    student: Float[Tensor, "2 r e"],
    teacher: Float[Tensor, "2 r e"],
    level: SelfDistillation,
    *,
    groups: Sequence[slice] | None = None,
) -> Float[Tensor, ""]:
    """Cross-entropy between each view's teacher and the other view's student: L_cv^g on images, L_cv^o on objects.

    The mean of the two directions (the paper takes their sum); a group without rows counts as 0.

    Args:
        student: (2, R, E) the student's embeddings of both views, row-aligned.
        teacher: (2, R, E) the teacher's embeddings of the same rows.
        level: prototypes, centre and temperatures.
        groups: rows of each group, consecutive.

    Source: paper equations 6 and 10.

    Example:
        >>> prototypes = torch.randn(32, 8, requires_grad=True)
        >>> level = SelfDistillation(prototypes, prototypes.detach(), torch.zeros(32), 0.1, 0.04)
        >>> cross_view_loss(torch.randn(2, 5, 8), torch.randn(2, 5, 8), level).backward()
    """
    sizes = _sizes(groups, student.shape[1])
    weights = [1 / (2 * size * len(sizes)) for size in sizes for _ in range(size)]
    of_rows = torch.tensor(2 * weights, dtype=student.dtype).to(student.device, non_blocking=True)
    return weighted_cross_entropy(student.flatten(0, 1), teacher.flip(0).flatten(0, 1), of_rows, level)


@tf32_under_autocast
@in_float32
def cross_image_loss(
    student: Float[Tensor, "2 r e"],
    neighbours: Float[Tensor, "z e"],
    valid: Bool[Tensor, "2 r"],
    level: SelfDistillation,
    *,
    groups: Sequence[slice] | None = None,
) -> Float[Tensor, ""]:
    """Cross-entropy between the teacher's neighbour of view i and the student's object of the other view: L_ci^o.

    The mean of the two directions, each divided by its group's number of valid pairs. A direction without pairs adds 0.

    Args:
        student: (2, R, E) embeddings of the objects of both views.
        neighbours: (Z, E) the teacher's embeddings of the valid objects' neighbours, view 1 first.
        valid: (2, R) whether an object has a valid neighbour; Z of them are true.
        level: prototypes, centre and temperatures of the object level.
        groups: rows of each group, consecutive.

    Source: paper equation 8.

    Example:
        >>> prototypes = torch.randn(32, 8, requires_grad=True)
        >>> level = SelfDistillation(prototypes, prototypes.detach(), torch.zeros(32), 0.1, 0.04)
        >>> valid = torch.tensor([[True, False, True], [False, False, True]])
        >>> cross_image_loss(torch.randn(2, 3, 8), torch.randn(3, 8), valid, level).backward()
    """
    views, rows = torch.nonzero_static(valid, size=len(neighbours)).unbind(dim=1)  # does not wait for a GPU
    sizes = _sizes(groups, student.shape[1])
    of_rows = torch.tensor([number for number, size in enumerate(sizes) for _ in range(size)], dtype=torch.long)
    of_rows = of_rows.to(student.device, non_blocking=True)
    pairs = student.new_zeros(2, len(sizes)).index_add_(1, of_rows, valid.to(student.dtype))  # of each view and group
    weights = 0.5 / len(sizes) / pairs[views, of_rows[rows]]
    return weighted_cross_entropy(student[1 - views, rows], neighbours, weights, level)


def _sizes(groups: Sequence[slice] | None, rows: int) -> list[int]:
    """Return the number of rows of each group; of all rows without groups."""
    return [rows] if groups is None else [group.stop - group.start for group in groups]


def weighted_cross_entropy(
    student: Float[Tensor, "r e"], teacher: Float[Tensor, "r e"], weights: Float[Tensor, " r"], level: SelfDistillation
) -> Float[Tensor, ""]:
    """Weighted sum of H(p_t, p_s) over rows, computed in blocks so that only one block's logits are in memory.

    Args:
        student: (R, E) the student's embeddings, which receive the gradient.
        teacher: (R, E) the teacher's embeddings.
        weights: (R,) weight of each row.
        level: prototypes, centre and temperatures.

    Returns:
        A scalar; 0, still attached to the graph, if there are no rows.

    Source: paper equation 5 and the definition of H below equation 6.

    Example:
        >>> prototypes = torch.randn(32, 8, requires_grad=True)
        >>> level = SelfDistillation(prototypes, prototypes.detach(), torch.zeros(32), 0.1, 0.04)
        >>> weighted_cross_entropy(torch.randn(5, 8), torch.randn(5, 8), torch.full((5,), 1 / 5), level).backward()
    """
    loss = _InBlocks.apply(student, level.student_prototypes, teacher, weights, level)
    assert isinstance(loss, Tensor)
    return loss


class _InBlocks(torch.autograd.Function):
    """Loss and gradients of each block of rows in turn: 1.8 times as fast as `torch.utils.checkpoint`."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Float[Tensor, "r e"],
        prototypes: Float[Tensor, "l e"],
        teacher: Float[Tensor, "r e"],
        weights: Float[Tensor, " r"],
        level: SelfDistillation,
    ) -> Float[Tensor, ""]:
        loss, for_student, for_prototypes = student.new_zeros(()), [student[:0]], torch.zeros_like(prototypes)
        size = rows_per_block(len(prototypes), prototypes.device)
        for s, t, w in zip(student.split(size), teacher.split(size), weights.split(size), strict=True):
            entropies, difference = level.cross_entropy(s, t)
            loss += w @ entropies
            scale = w[:, None] / level.student_temperature
            for_student.append(scale * (difference @ prototypes))
            for_prototypes.addmm_(difference.T, scale * s)
        ctx.save_for_backward(torch.cat(for_student), for_prototypes)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Float[Tensor, ""]) -> tuple[Tensor | None, ...]:
        for_student, for_prototypes = ctx.saved_tensors
        return gradients[0] * for_student, gradients[0] * for_prototypes, None, None, None


class Centre(nn.Module):
    """Exponential moving average of the mean teacher logits of one level, subtracted before the softmax.

    The mean of the logits is the prototypes times the mean embedding, so the logits are never formed.

    Args:
        num_prototypes: L, number of prototypes.
        momentum: momentum of the moving average.

    Raises:
        ValueError: momentum outside [0, 1).

    Example:
        >>> centre, embeddings = Centre(32), torch.randn(5, 8)
        >>> centre.update(embeddings.sum(dim=0), torch.tensor(5), torch.randn(32, 8))
        >>> centre.value.shape
        torch.Size([32])
    """

    value: Tensor

    def __init__(self, num_prototypes: int, *, momentum: float = 0.9) -> None:
        super().__init__()
        (at_least(0) & below(1)).check(momentum=momentum)
        self.momentum = momentum
        self.register_buffer("value", torch.zeros(num_prototypes))

    @torch.no_grad()
    def update(self, total: Float[Tensor, " e"], count: Tensor, prototypes: Float[Tensor, "l e"]) -> None:
        """Update the moving average with the mean logits of a batch; no-op for an empty batch.

        Args:
            total: (E,) sum of the batch's teacher embeddings, over all micro-batches and ranks.
            count: scalar, number of these embeddings.
            prototypes: (L, E) weight of the teacher's last layer.
        """
        with torch.autocast(self.value.device.type, enabled=False):
            mean_logits = at_least_float32(prototypes) @ (at_least_float32(total) / count.clamp_min(1))
        self.value.lerp_(mean_logits, (count > 0).to(mean_logits.dtype) * (1 - self.momentum))
