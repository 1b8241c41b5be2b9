"""Self-distillation: centring, the prototype loss, and the paper's three losses (section 3.2.3)."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.autograd.function import once_differentiable

from cribo.method.kernels import Accelerated
from cribo.method.precision import at_least_float32
from cribo.method.products import by_onednn, product, rows_within
from cribo.method.transfer import send

BLOCK_LOGITS = {"cpu": 2**22, "cuda": 2**24}
"""Logits held at once by default: 16 MiB in float32, near a processor's caches; 64 MiB, enough to fill a GPU."""


@dataclass(frozen=True)
class SelfDistillation:
    """What turns the embeddings of one level (image or object) into a loss at one step.

    Attributes:
        student_prototypes: (L, E) weight of the student's last layer, with its gradient.
        teacher_prototypes: (L, E) weight of the teacher's.
        centre: (L,) what is subtracted from the teacher's logits; (C, L) where it differs between groups of rows.
        student_temperature: tau_s.
        teacher_temperature: tau_t.
    """

    student_prototypes: Float[Tensor, "l e"]
    teacher_prototypes: Float[Tensor, "l e"]
    centre: Float[Tensor, "*groups l"]
    student_temperature: float
    teacher_temperature: float

    def __post_init__(self) -> None:
        for name in ("student_temperature", "teacher_temperature"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Targets:
    """What one loss compares: teacher embeddings, and the student's row that is to predict each.

    Attributes:
        embeddings: (T, E) of the teacher. One that several rows predict is given once for each.
        rows: (T,) on the host: the student's row. Rows may be missing, and repeated.
        weights: (T,) what each pair counts in the sum that the loss is.
        groups: (T,) on the host: which row of the level's centres is subtracted, where there are several.
    """

    embeddings: Float[Tensor, "t e"]
    rows: Int[Tensor, " t"]
    weights: Float[Tensor, " t"]
    groups: Int[Tensor, " t"] | None = None

    def __post_init__(self) -> None:
        lengths = [len(part) for part in (self.embeddings, self.rows, self.weights)]
        if len(set(lengths)) > 1:
            raise ValueError(f"targets need as many rows and weights as embeddings, got {lengths}")


def prototype_losses(
    student: Float[Tensor, "r e"],
    targets: Sequence[Targets],
    distillation: SelfDistillation,
    *,
    block_logits: int | None = None,
) -> Float[Tensor, " losses"]:
    """Weighted sums of cross-entropies H(p_teacher, p_student), any number of them of the same student rows.

    Teacher probabilities are softmax((logits - centre) / tau_t), the student's log-softmax(logits / tau_s).
    A row's logits and its two gradient products are taken once, for all targets that it has; a row without any costs
    nothing. Rows are visited in blocks and the gradient is taken on the way, so that no more than `block_logits` logits
    of a kind are alive, forward and backward, however many rows there are. Equal to the plain formula.

    The gradient is that of the sum of the losses: `losses.sum().backward()`. One that is to count more gets larger
    weights in its `Targets`; multiplying the results by different factors is refused at backward.

    Args:
        student: (R, E) embeddings that the gradient flows to.
        targets: one for each loss.
        distillation: the level's prototypes, centre and temperatures.
        block_logits: memory bound, in numbers; by default what suits the device (`BLOCK_LOGITS`). 16 rows, or a single
            row and its targets, always fit.

    Returns:
        (losses,) float32; 0, still attached to the graph, where there are no rows.

    Raises:
        ValueError: a row that the student does not have.
        RuntimeError: at backward, gradients that differ between the losses.

    Source: paper equations of p and H; METHOD section 4.

    Example:
        >>> prototypes = torch.randn(32, 8, requires_grad=True)
        >>> level = SelfDistillation(prototypes, prototypes.detach(), torch.zeros(32), 0.1, 0.04)
        >>> views = Targets(torch.randn(5, 8), torch.arange(5), torch.full((5,), 1 / 5))
        >>> neighbours = Targets(torch.randn(2, 8), torch.tensor([0, 3]), torch.full((2,), 1 / 2))
        >>> losses = prototype_losses(torch.randn(5, 8), [views, neighbours], level)
        >>> losses.sum().backward()
        >>> losses.shape
        torch.Size([2])
    """
    pairs = _Pairs.of(targets, len(student), distillation.centre)
    losses = _PrototypeLosses.apply(
        at_least_float32(student) / distillation.student_temperature,
        at_least_float32(distillation.student_prototypes),
        pairs.scaled(1 / distillation.teacher_temperature),
        at_least_float32(distillation.teacher_prototypes.detach()),
        _block_rows(block_logits, distillation.student_prototypes),
    )
    assert isinstance(losses, Tensor)
    return losses


def prototype_loss(
    student: Float[Tensor, "r e"],
    teacher: Float[Tensor, "r e"],
    distillation: SelfDistillation,
    *,
    block_logits: int | None = None,
) -> Float[Tensor, ""]:
    """Mean cross-entropy H(p_teacher, p_student) over rows of embeddings: `prototype_losses` of one loss.

    Args:
        student: (R, E) embeddings that the gradient flows to.
        teacher: (R, E) embeddings that they are to predict.
        distillation: the level's prototypes, centre and temperatures.
        block_logits: memory bound, in numbers.

    Returns:
        a float32 scalar; 0, still attached to the graph, when there are no rows.

    Raises:
        ValueError: the rows do not pair up.

    Source: paper equations of p and H; METHOD section 4.

    Example:
        >>> prototypes = torch.randn(32, 8, requires_grad=True)
        >>> level = SelfDistillation(prototypes, prototypes.detach(), torch.zeros(32), 0.1, 0.04)
        >>> prototype_loss(torch.randn(5, 8), torch.randn(5, 8), level).backward()
    """
    if student.shape != teacher.shape:
        raise ValueError(f"student and teacher rows differ: {tuple(student.shape)} and {tuple(teacher.shape)}")
    rows = len(student)
    targets = Targets(teacher, torch.arange(rows), torch.full((rows,), 1 / max(rows, 1)))
    return prototype_losses(student, [targets], distillation, block_logits=block_logits)[0]


def cross_view_targets(teacher: Float[Tensor, "2 r e"], group_rows: Sequence[int] | None = None) -> Targets:
    """Each view's teacher against the other view's student, for `prototype_losses` of (2R, E) student rows.

    The mean over groups of the group's own mean over both directions (the paper writes their sum).

    Args:
        teacher: (2, R, E) embeddings of both views, row-aligned.
        group_rows: rows of each group, in order; one group without. A group without rows adds 0.

    Source: paper equations of L_cv^o and L_cv^g.
    """
    num_rows = teacher.shape[1]
    counts, groups = _group_of_rows(num_rows, group_rows)
    weights = (1 / (2 * len(counts) * counts))[groups]
    return Targets(teacher.flip(0).flatten(0, 1), torch.arange(2 * num_rows), weights.repeat(2), groups.repeat(2))


def _group_of_rows(num_rows: int, group_rows: Sequence[int] | None) -> tuple[Int[Tensor, " g"], Int[Tensor, " r"]]:
    """Rows of each group, and the group of each row."""
    counts = torch.tensor([num_rows] if group_rows is None else group_rows)
    if counts.sum() != num_rows:
        raise ValueError(f"group_rows must add up to the {num_rows} rows, got {int(counts.sum())}")
    return counts, torch.arange(len(counts)).repeat_interleave(counts)


def cross_image_targets(
    neighbours: tuple[Float[Tensor, "z1 e"], Float[Tensor, "z2 e"]],
    valid: Bool[Tensor, "2 r"],
    group_rows: Sequence[int] | None = None,
) -> Targets:
    """The teacher on the neighbour of view i against the student's object of the other view, for (2R, E) student rows.

    The mean over groups of the mean of the group's two directions, each the mean over its own valid pairs; a direction
    without any adds 0.

    Args:
        neighbours: for each view, the teacher's embeddings of the neighbours of its valid objects, in order.
        valid: (2, R) on the host: which objects of each view have a valid neighbour.
        group_rows: rows of each group, in order; one group without.

    Source: paper equation of L_ci^o.
    """
    num_rows = valid.shape[1]
    counts, group_of = _group_of_rows(num_rows, group_rows)
    chosen = [view.nonzero().flatten() for view in valid]
    groups = [group_of[rows] for rows in chosen]
    weights = [(1 / (2 * len(counts) * part.bincount(minlength=len(counts))))[part] for part in groups]
    return Targets(
        torch.cat(neighbours), torch.cat((chosen[0] + num_rows, chosen[1])), torch.cat(weights), torch.cat(groups)
    )


def cross_view_loss(
    student: Float[Tensor, "2 r e"], teacher: Float[Tensor, "2 r e"], distillation: SelfDistillation
) -> Float[Tensor, ""]:
    """Each view's teacher against the other view's student: L_cv^g on images, L_cv^o on objects.

    The mean of the two directions (the paper writes their sum).

    Args:
        student: (2, R, E) embeddings of both views, row-aligned.
        teacher: (2, R, E) likewise.
        distillation: the level's prototypes, centre and temperatures.

    Source: paper equations of L_cv^o and L_cv^g.
    """
    return prototype_losses(student.flatten(0, 1), [cross_view_targets(teacher)], distillation)[0]


def cross_image_loss(
    student: Float[Tensor, "2 r e"],
    neighbours: tuple[Float[Tensor, "z1 e"], Float[Tensor, "z2 e"]],
    valid: Bool[Tensor, "2 r"],
    distillation: SelfDistillation,
) -> Float[Tensor, ""]:
    """The teacher on the neighbour of view i against the student's object of the other view: L_ci^o.

    Each direction is the mean over its own valid pairs, and the loss the mean of the two directions.

    Args:
        student: (2, R, E) embeddings of the objects of both views.
        neighbours: for each view, the teacher's embeddings of the neighbours of its valid objects, in order.
        valid: (2, R) which objects of each view have a valid neighbour; read from the device if it is there.
        distillation: the object level's prototypes, centre and temperatures.

    Source: paper equation of L_ci^o.
    """
    targets = cross_image_targets(neighbours, valid.cpu())
    return prototype_losses(student.flatten(0, 1), [targets], distillation)[0]


def _block_rows(block_logits: int | None, prototypes: Float[Tensor, "l e"]) -> int:
    if block_logits is None:
        block_logits = BLOCK_LOGITS.get(prototypes.device.type, BLOCK_LOGITS["cuda"])
    return rows_within(block_logits, len(prototypes))


class Centre(nn.Module):
    """Exponential moving average of the mean teacher logits of one level, subtracted before the softmax.

    The mean of the logits is the prototypes times the mean embedding, so the logits are never formed.

    Args:
        num_prototypes: L.
        momentum: of the moving average.

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
            raise ValueError(f"momentum of the centre must be in [0, 1), got {momentum}")
        self.momentum = momentum
        self.register_buffer("value", torch.zeros(num_prototypes))

    @torch.no_grad()
    def update(self, total: Float[Tensor, " e"], count: Tensor, prototypes: Float[Tensor, "l e"]) -> None:
        """Move towards the mean logits of a batch; stay where there are no rows.

        Sums may come from several micro-batches or devices, so sums are what it takes.

        Args:
            total: (E,) sum of the batch's teacher embeddings.
            count: scalar, how many there are.
            prototypes: (L, E) weight of the teacher's last layer.
        """
        with torch.autocast(self.value.device.type, enabled=False):
            mean_logits = at_least_float32(prototypes) @ (at_least_float32(total) / count.clamp_min(1))
        self.value.lerp_(mean_logits, (count > 0).to(mean_logits.dtype) * (1 - self.momentum))


@torch.no_grad()
def sinkhorn_centre(
    embeddings: Float[Tensor, "r e"],
    prototypes: Float[Tensor, "l e"],
    *,
    temperature: float,
    iterations: int = 3,
    block_logits: int | None = None,
) -> Float[Tensor, " l"]:
    """The centre with which the rows' probabilities spread evenly over the prototypes.

    An option beside the moving average, for small batches and short runs: the teacher's probabilities
    softmax((logits - centre) / temperature) are then those of `iterations` rounds of Sinkhorn-Knopp with
    uniform marginals (Caron et al. 2020). Scaling the columns of exp(logits / temperature) is the same as
    shifting the logits, so the centre is all that has to be found.

    Args:
        embeddings: (R, E) teacher embeddings of one group.
        prototypes: (L, E) weight of the teacher's last layer.
        temperature: tau_t.
        iterations: rounds.
        block_logits: memory bound, in numbers.

    Returns:
        (L,) float32; zeros when there are no rows.

    Raises:
        ValueError: temperature or iterations out of range.

    Example:
        >>> centre = sinkhorn_centre(torch.randn(64, 8), torch.randn(32, 8), temperature=0.1)
        >>> centre.shape
        torch.Size([32])
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    if iterations < 1:
        raise ValueError(f"iterations must be >= 1, got {iterations}")
    with torch.autocast(embeddings.device.type, enabled=False):
        embeddings, prototypes = at_least_float32(embeddings), at_least_float32(prototypes)
        rows, num_prototypes = embeddings.shape[0], prototypes.shape[0]
        shift = prototypes.new_zeros(num_prototypes)  # log of the columns' scaling
        if rows == 0:
            return shift
        for _ in range(iterations):
            mass = torch.zeros_like(shift)
            for part in (embeddings / temperature).split(_block_rows(block_logits, prototypes)):
                logits = product(part, prototypes).add_(shift)
                mass += torch.softmax(logits, -1, out=logits).sum(dim=0)
            shift = shift - (mass * (num_prototypes / rows)).clamp_min(1e-30).log()
        return -temperature * shift


_GATHERED = 8  # rows
_ADDED = 2**21  # numbers


@torch.no_grad()
def differences_plain(
    logits: Float[Tensor, "b l"],
    targets: Float[Tensor, "t l"],
    rows: Int[Tensor, " t"],
    weights: Float[Tensor, " t"],
    centres: Float[Tensor, "c l"],
    groups: Int[Tensor, " t"] | None,
) -> Float[Tensor, " t"]:
    """Cross-entropies of a block, and their gradient with respect to the student's logits, in place of them.

    Args:
        logits: (B, L) of the student, over its temperature. Holds the gradient afterwards.
        targets: (T, L) of the teacher, over its temperature. Used up.
        rows: (T,) which of the student's rows each target belongs to.
        weights: (T,) of each.
        centres: (C, L) over the teacher's temperature.
        groups: (T,) which centre each target subtracts; None where there is one for all.

    Returns:
        (T,) weight times cross-entropy of each pair.
    """
    targets.sub_(centres if groups is None else centres[groups])
    torch.softmax(targets, -1, out=targets)
    # A few rows at a time: what is gathered stays in the processor's caches.
    parts = zip(rows.split(_GATHERED), targets.split(_GATHERED), strict=True)
    expected = torch.cat([torch.linalg.vecdot(logits[of], target) for of, target in parts])
    # The largest probability is 1 / sum(exp(logits - peak)): a cheaper way to the normaliser than logsumexp.
    peak = logits.amax(dim=-1)
    torch.softmax(logits, -1, out=logits)
    log_normaliser = peak - logits.amax(dim=-1).log()
    logits.mul_(weights.new_zeros(len(logits), 1).index_add_(0, rows, weights[:, None]))
    logits.index_add_(0, rows, targets.mul_(weights[:, None]), alpha=-1)
    return weights * (log_normaliser[rows] - expected)


def _fused() -> Callable[..., Tensor]:
    from cribo.method.kernels.losses import differences

    return differences


@torch.no_grad()
def _try(fused: Callable[..., Tensor], device: torch.device) -> None:
    """Raise an error where the fused version disagrees with the plain one."""
    generator = torch.Generator().manual_seed(0)
    logits, targets, centres = (10 * torch.randn(rows, 5000, generator=generator).to(device) for rows in (3, 4, 2))
    rows, groups = torch.tensor([0, 0, 1, 2], device=device), torch.tensor([0, 1, 1, 0], device=device)
    weights = torch.tensor([0.5, 2.0, 1.0, 0.0], device=device)
    for given in ((centres[:1], None), (centres, groups)):
        results = []
        for version in (fused, differences_plain):
            gradient = logits.clone()
            results.append((version(gradient, targets.clone(), rows, weights, *given), gradient))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


differences = Accelerated("prototype loss", plain=differences_plain, fused=_fused, trial=_try)


def add_product(total: Float[Tensor, "l e"], a: Float[Tensor, "b l"], b: Float[Tensor, "b e"]) -> None:
    """Add a.T @ b in place.

    oneDNN multiplies rows that lie in memory one after the other: a is transposed first, and the product added in parts
    that stay in the processor's caches.
    """
    if not by_onednn(total, a, b):
        total.addmm_(a.T, b)
        return
    transposed, columns = a.T.contiguous(), b.T.contiguous()
    part = max(1, _ADDED // total.shape[1])
    for own, rows in zip(total.split(part), transposed.split(part), strict=True):
        own.add_(product(rows, columns))


@dataclass(frozen=True)
class _Pairs:
    """Pairs of a student's row and a teacher's embedding, of all losses, in the order of the student's rows.

    Attributes:
        teacher: (T, E) float32.
        centres: (C, L) float32.
        groups: (T,) which of the centres; None where there is only one.
        weights: (T,) float32.
        losses: (T,) which loss each counts in.
        num_losses: how many there are.
        rows: (U,) the student's rows that occur.
        places: (T,) which of them each pair has.
        offsets: U + 1 numbers, on the host: pairs before each of them, and all.
    """

    teacher: Float[Tensor, "t e"]
    centres: Float[Tensor, "c l"]
    groups: Int[Tensor, " t"] | None
    weights: Float[Tensor, " t"]
    losses: Int[Tensor, " t"]
    num_losses: int
    rows: Int[Tensor, " u"]
    places: Int[Tensor, " t"]
    offsets: list[int]

    @classmethod
    def of(cls, targets: Sequence[Targets], num_rows: int, centre: Float[Tensor, "*c l"]) -> "_Pairs":
        """Sort the targets of all losses. The order is found on the host, and copied without waiting for the device."""
        if not targets:
            raise ValueError("targets must have at least one loss, got none")
        rows = torch.cat([part.rows for part in targets])
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < num_rows:
            raise ValueError(f"rows of targets must be in [0, {num_rows}), got {int(rows.min())} to {int(rows.max())}")
        device, centres = centre.device, at_least_float32(centre.detach()).reshape(-1, centre.shape[-1])
        rows, order = rows.sort(stable=True)
        found, places, counts = rows.unique_consecutive(return_inverse=True, return_counts=True)
        losses = torch.arange(len(targets)).repeat_interleave(torch.tensor([len(part.rows) for part in targets]))
        groups = None
        if len(centres) > 1:
            groups = send(torch.cat([_given(part.groups) for part in targets])[order], device)
        on_device = send(order, device)
        return cls(
            torch.cat([at_least_float32(part.embeddings.detach()) for part in targets])[on_device],
            centres,
            groups,
            torch.cat([send(part.weights.to(centres.dtype), device) for part in targets])[on_device],
            send(losses[order], device),
            len(targets),
            send(found, device),
            send(places, device),
            [0, *counts.cumsum(0).tolist()],
        )

    def scaled(self, factor: float) -> "_Pairs":
        """With teacher and centres multiplied, so that the logits come out multiplied."""
        return replace(self, teacher=self.teacher * factor, centres=self.centres * factor)

    def blocks(self, most: int) -> Iterator[tuple[slice, slice]]:
        """Parts of `rows`, each with its pairs: no more than `most` of either, but always one row."""
        start, rows = 0, len(self.offsets) - 1
        while start < rows:
            stop = bisect_right(self.offsets, self.offsets[start] + most) - 1
            stop = max(start + 1, min(stop, start + most))
            yield slice(start, stop), slice(self.offsets[start], self.offsets[stop])
            start = stop


def _given(groups: Tensor | None) -> Tensor:
    if groups is None:
        raise ValueError("with several centres, targets need groups: which centre each subtracts")
    return groups


class _PrototypeLosses(torch.autograd.Function):
    """Forward and backward of `prototype_losses` in one pass over blocks of rows.

    The gradient of the cross-entropy needs the very probabilities that its value needs; taking both at once
    saves forming the logits again in backward, and leaves nothing but the gradients to keep.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        student_prototypes: Tensor,
        pairs: _Pairs,
        teacher_prototypes: Tensor,
        block_rows: int,
    ) -> Tensor:
        needs_student, needs_prototypes = ctx.needs_input_grad[:2]
        student_gradient = torch.zeros_like(student) if needs_student else None
        prototype_gradient = torch.zeros_like(student_prototypes) if needs_prototypes else None
        values = [student.new_zeros(0)]
        difference = differences.on(student.device)
        with torch.autocast(student.device.type, enabled=False):
            for rows, own in pairs.blocks(block_rows):
                places, weights = pairs.places[own] - rows.start, pairs.weights[own]
                learned = student[pairs.rows[rows]]
                groups = None if pairs.groups is None else pairs.groups[own]
                logits = product(learned, student_prototypes)
                targets = product(pairs.teacher[own], teacher_prototypes)
                values.append(difference(logits, targets, places, weights, pairs.centres, groups))
                if student_gradient is not None:
                    student_gradient[pairs.rows[rows]] = product(logits, student_prototypes.T)
                if prototype_gradient is not None:
                    add_product(prototype_gradient, logits, learned)
        ctx.save_for_backward(student_gradient, prototype_gradient)
        # Sums of a fixed order, which scattered additions on a GPU have not.
        counted = pairs.losses == torch.arange(pairs.num_losses, device=student.device)[:, None]
        return torch.where(counted, torch.cat(values), 0).sum(dim=1)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        factor = _common(gradients[0])
        kept = _get_current_graph_task_keep_graph()
        scaled = [None if g is None else (g * factor if kept else g.mul_(factor)) for g in ctx.saved_tensors]
        return (*scaled, None, None, None)


def _common(gradients: Float[Tensor, " losses"]) -> Float[Tensor, ""]:
    """The one gradient that comes in for all losses."""
    message = (
        "the losses of one prototype_losses share one gradient and must be added as they are: to let one count more, "
        "give its Targets larger weights"
    )
    same = (gradients == gradients[0]).all()
    if gradients.is_cuda:
        torch.ops.aten._assert_async.msg(same, message)  # without waiting for the device
    elif not same:
        raise RuntimeError(message)
    return gradients[0]
