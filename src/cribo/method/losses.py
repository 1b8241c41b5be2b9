"""Self-distillation: the cross-entropy over prototypes, centring, and the paper's losses (section 3.2.3)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from cribo.errors import InputError
from cribo.method.blocks import rows_per_block
from cribo.method.precision import at_least_float32, in_float32


@dataclass(frozen=True)
class SelfDistillation:
    """Prototypes, centre and temperatures of one level (image or object) at one step.

    Attributes:
        student_prototypes: (L, E) weight of the student's last layer, attached to the graph.
        teacher_prototypes: (L, E) weight of the teacher's last layer.
        centre: (L,) offset subtracted from the teacher's logits; (G, L) if each group of images has its own.
        student_temperature: tau_s, temperature of the student's softmax.
        teacher_temperature: tau_t, temperature of the teacher's softmax.

    Raises:
        ValueError: a temperature that is not positive.
    """

    student_prototypes: Float[Tensor, "l e"]
    teacher_prototypes: Float[Tensor, "l e"]
    centre: Float[Tensor, "*groups l"]
    student_temperature: float
    teacher_temperature: float

    def __post_init__(self) -> None:
        for name in ("student_temperature", "teacher_temperature"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} must be > 0, got {getattr(self, name)}")


CrossEntropy = Callable[..., tuple[Tensor, Tensor]]
"""`cross_entropy`: (student, teacher, level, groups) -> entropies and their gradient."""


@in_float32
def cross_view_loss(
    student: Float[Tensor, "2 r e"],
    teacher: Float[Tensor, "2 r e"],
    level: SelfDistillation,
    group_rows: Sequence[int] | None = None,
    *,
    formula: CrossEntropy | None = None,
) -> Float[Tensor, ""]:
    """Cross-entropy between each view's teacher and the other view's student: L_cv^g on images, L_cv^o on objects.

    The mean of the two directions (the paper takes their sum), averaged over groups. A group without rows adds 0.

    Args:
        student: (2, R, E) the student's embeddings of both views, row-aligned.
        teacher: (2, R, E) the teacher's embeddings of the same rows.
        level: prototypes, centre and temperatures.
        group_rows: rows of each group of images, in order; one group by default.
        formula: `cross_entropy` by default; a compiled one, for example.

    Raises:
        ValueError: the groups' rows do not sum to R.

    Source: paper equations 6 and 10.

    Example:
        >>> prototypes = torch.randn(32, 8, requires_grad=True)
        >>> level = SelfDistillation(prototypes, prototypes.detach(), torch.zeros(32), 0.1, 0.04)
        >>> cross_view_loss(torch.randn(2, 5, 8), torch.randn(2, 5, 8), level).backward()
    """
    groups, num_groups = _groups(student, group_rows)
    groups = groups.repeat(2)
    weights = _mean_of_means(groups, num_groups).to(student.dtype)
    return weighted_cross_entropy(
        student.flatten(0, 1), teacher.flip(0).flatten(0, 1), weights, level, groups, formula=formula
    )


@in_float32
def cross_image_loss(
    student: Float[Tensor, "2 r e"],
    neighbours: Float[Tensor, "z e"],
    valid: Bool[Tensor, "2 r"],
    level: SelfDistillation,
    group_rows: Sequence[int] | None = None,
    *,
    formula: CrossEntropy | None = None,
) -> Float[Tensor, ""]:
    """Cross-entropy between the teacher's neighbour of view i and the student's object of the other view: L_ci^o.

    The mean of the two directions, each divided by its own number of valid pairs, averaged over groups. A direction
    without pairs adds 0.

    Args:
        student: (2, R, E) embeddings of the objects of both views.
        neighbours: (Z, E) the teacher's embeddings of the valid objects' neighbours, view 1 first.
        valid: (2, R) whether an object has a valid neighbour; Z of them are true.
        level: prototypes, centre and temperatures of the object level.
        group_rows: objects of each group of images, in order; one group by default.
        formula: `cross_entropy` by default; a compiled one, for example.

    Raises:
        ValueError: the groups' rows do not sum to R.

    Source: paper equation 8.

    Example:
        >>> prototypes = torch.randn(32, 8, requires_grad=True)
        >>> level = SelfDistillation(prototypes, prototypes.detach(), torch.zeros(32), 0.1, 0.04)
        >>> valid = torch.tensor([[True, False, True], [False, False, True]])
        >>> cross_image_loss(torch.randn(2, 3, 8), torch.randn(3, 8), valid, level).backward()
    """
    groups, num_groups = _groups(student, group_rows)
    views, rows = valid.nonzero(as_tuple=True)
    groups = groups[rows]
    weights = _mean_of_means(views * num_groups + groups, 2 * num_groups).to(student.dtype)
    return weighted_cross_entropy(student[1 - views, rows], neighbours, weights, level, groups, formula=formula)


def _groups(rows: Float[Tensor, "2 r *e"], group_rows: Sequence[int] | None) -> tuple[Int[Tensor, " r"], int]:
    """Return the group of each row, and the number of groups."""
    sizes = [rows.shape[1]] if group_rows is None else list(group_rows)
    if sum(sizes) != rows.shape[1]:
        raise InputError(f"group_rows must sum to the {rows.shape[1]} rows, got {sizes}")
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(rows.device), len(sizes)


def _mean_of_means(parts: Int[Tensor, " r"], num_parts: int) -> Float[Tensor, " r"]:
    """Return row weights whose weighted sum is the mean over parts of each part's mean; an empty part adds 0."""
    sizes = parts.new_zeros(num_parts).index_add_(0, parts, torch.ones_like(parts))
    return (num_parts * sizes[parts]).double().reciprocal()


def mean_over_groups(
    values: Float[Tensor, "2 r"], group_rows: Sequence[int] | None = None, valid: Bool[Tensor, "2 r"] | None = None
) -> Float[Tensor, ""]:
    """Average the valid rows of each view and group, then over views and groups; an empty group adds 0.

    Args:
        values: (2, R) of both views, group after group.
        group_rows: rows of each group of images, in order; one group by default.
        valid: (2, R) whether a row counts; all rows by default.

    Raises:
        ValueError: the groups' rows do not sum to R.

    Example:
        >>> mean_over_groups(torch.tensor([[1.0, 3.0, 5.0], [1.0, 3.0, 5.0]]), [2, 1])
        tensor(3.5000)
    """
    groups, num_groups = _groups(values, group_rows)
    parts = torch.stack((groups, groups + num_groups))
    counted = torch.ones_like(parts) if valid is None else valid.long()
    sizes = parts.new_zeros(2 * num_groups).index_add_(0, parts.flatten(), counted.flatten())
    weights = counted / (2 * num_groups * sizes[parts].clamp_min(1))
    return (weights.to(values.dtype) * values).sum()


def cross_entropy(
    student: Float[Tensor, "r e"],
    teacher: Float[Tensor, "r e"],
    level: SelfDistillation,
    groups: Int[Tensor, " r"] | None = None,
) -> tuple[Float[Tensor, " r"], Float[Tensor, "r l"]]:
    """H(p_t, p_s) of each row, and its gradient p_s - p_t with respect to the student's logits over tau_s.

    Source: paper equation 5 and the definition of H below equation 6.
    """
    centre = level.centre if groups is None or level.centre.ndim == 1 else level.centre[groups]
    logits = student / level.student_temperature @ level.student_prototypes.T
    p_teacher = torch.addmm(
        -centre / level.teacher_temperature, teacher / level.teacher_temperature, level.teacher_prototypes.T
    ).softmax(dim=1)
    log_normaliser = logits.logsumexp(dim=1)
    entropies = log_normaliser - torch.linalg.vecdot(p_teacher, logits)
    p_student = logits.sub_(log_normaliser[:, None]).exp_()
    return entropies, p_student.sub_(p_teacher)


def weighted_cross_entropy(
    student: Float[Tensor, "r e"],
    teacher: Float[Tensor, "r e"],
    weights: Float[Tensor, " r"],
    level: SelfDistillation,
    groups: Int[Tensor, " r"] | None = None,
    *,
    formula: CrossEntropy | None = None,
) -> Float[Tensor, ""]:
    """Weighted sum of H(p_t, p_s) over rows, computed in blocks so that only one block's logits are in memory.

    Args:
        student: (R, E) the student's embeddings, which receive the gradient.
        teacher: (R, E) the teacher's embeddings.
        weights: (R,) weight of each row.
        level: prototypes, centre and temperatures.
        groups: (R,) group of each row, if groups have different centres.
        formula: `cross_entropy` by default; a compiled one, for example.

    Returns:
        A scalar; 0, still attached to the graph, if there are no rows.

    Source: paper equation 5 and the definition of H below equation 6.

    Example:
        >>> prototypes = torch.randn(32, 8, requires_grad=True)
        >>> level = SelfDistillation(prototypes, prototypes.detach(), torch.zeros(32), 0.1, 0.04)
        >>> weighted_cross_entropy(torch.randn(5, 8), torch.randn(5, 8), torch.full((5,), 1 / 5), level).backward()
    """
    formula = cross_entropy if formula is None else formula
    loss = _InBlocks.apply(student, level.student_prototypes, teacher, weights, level, groups, formula)
    assert isinstance(loss, Tensor)
    return loss


class _InBlocks(torch.autograd.Function):
    """Compute loss and gradients block by block in one pass, since both need the same probabilities.

    For the prototypes, the smaller of two tensors is saved for the backward pass: their gradient (L, E) or the gradient
    with respect to the logits (R, L).
    """

    @staticmethod
    def forward(
        ctx: Any,
        student: Float[Tensor, "r e"],
        prototypes: Float[Tensor, "l e"],
        teacher: Float[Tensor, "r e"],
        weights: Float[Tensor, " r"],
        level: SelfDistillation,
        groups: Int[Tensor, " r"] | None,
        formula: CrossEntropy,
    ) -> Float[Tensor, ""]:
        loss, for_student = student.new_zeros(()), torch.empty_like(student)
        scaled = weights[:, None] / level.student_temperature * student
        few_rows = len(student) < prototypes.shape[1]
        for_prototypes = None if few_rows else torch.zeros_like(prototypes)
        differences = [prototypes.new_empty((0, len(prototypes)))]
        size = rows_per_block(len(prototypes), prototypes.device)
        for start in range(0, len(student), size):
            block = slice(start, start + size)
            own = None if groups is None else groups[block]
            entropies, difference = formula(student[block], teacher[block], level, own)
            loss += weights[block] @ entropies
            for_student[block] = weights[block, None] / level.student_temperature * (difference @ prototypes)
            if for_prototypes is None:
                differences.append(difference)
            else:
                for_prototypes.addmm_(difference.T, scaled[block])
        ctx.save_for_backward(for_student, for_prototypes, torch.cat(differences), scaled)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Float[Tensor, ""]) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        for_student, for_prototypes, differences, scaled = ctx.saved_tensors
        if for_prototypes is not None:
            for_prototypes = gradient * for_prototypes
        else:
            with torch.autocast(gradient.device.type, enabled=False):
                for_prototypes = differences.T @ (gradient * scaled)
        return gradient * for_student, for_prototypes, None, None, None, None, None


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
        if not 0 <= momentum < 1:
            raise InputError(f"momentum of the centre must be in [0, 1), got {momentum}")
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


@torch.no_grad()
@in_float32
def sinkhorn_centre(
    embeddings: Float[Tensor, "r e"], prototypes: Float[Tensor, "l e"], *, temperature: float, iterations: int = 3
) -> Float[Tensor, " l"]:
    """Return the centre that balances the rows' probabilities over the prototypes.

    An alternative to the moving average for small batches and short runs; not in the paper. The probabilities
    softmax((logits - centre) / temperature) equal those of `iterations` rounds of Sinkhorn-Knopp with uniform marginals
    (SwAV, Caron et al. 2020): scaling the columns of exp(logits / temperature) is the same as shifting the logits.

    Args:
        embeddings: (R, E) teacher embeddings of one group.
        prototypes: (L, E) weight of the teacher's last layer.
        temperature: tau_t, temperature of the teacher's softmax.
        iterations: number of rounds.

    Returns:
        (L,) the centre; zeros if there are no rows.

    Raises:
        ValueError: temperature or iterations out of range.

    Example:
        >>> centre = sinkhorn_centre(torch.randn(64, 8), torch.randn(32, 8), temperature=0.1)
        >>> centre.shape
        torch.Size([32])
    """
    if temperature <= 0:
        raise InputError(f"temperature must be > 0, got {temperature}")
    if iterations < 1:
        raise InputError(f"iterations must be >= 1, got {iterations}")
    num_prototypes = len(prototypes)
    shift = prototypes.new_zeros(num_prototypes)  # log of the column scaling
    if not len(embeddings):
        return shift
    for _ in range(iterations):
        mass = torch.zeros_like(shift)
        for block in (embeddings / temperature).split(rows_per_block(num_prototypes, prototypes.device)):
            mass += torch.addmm(shift, block, prototypes.T).softmax(dim=1).sum(dim=0)
        shift = shift - (mass * (num_prototypes / len(embeddings))).clamp_min(1e-30).log()
    return -temperature * shift
