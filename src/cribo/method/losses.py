"""Self-distillation: centring, the prototype loss, and the paper's three losses (section 3.2.3)."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

BLOCK_LOGITS = 2**24
"""Logits held at once by default: 64 MiB in float32."""


@dataclass(frozen=True)
class SelfDistillation:
    """What turns the embeddings of one level (image or object) into a loss at one step.

    Attributes:
        student_prototypes: (L, E) weight of the student's last layer, with its gradient.
        teacher_prototypes: (L, E) weight of the teacher's.
        centre: (L,) what is subtracted from the teacher's logits.
        student_temperature: tau_s.
        teacher_temperature: tau_t.
    """

    student_prototypes: Float[Tensor, "l e"]
    teacher_prototypes: Float[Tensor, "l e"]
    centre: Float[Tensor, " l"]
    student_temperature: float
    teacher_temperature: float

    def __post_init__(self) -> None:
        for name in ("student_temperature", "teacher_temperature"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")


def prototype_loss(
    student: Float[Tensor, "r e"],
    teacher: Float[Tensor, "r e"],
    distillation: SelfDistillation,
    *,
    block_logits: int = BLOCK_LOGITS,
) -> Float[Tensor, ""]:
    """Mean cross-entropy H(p_teacher, p_student) over rows of embeddings.

    Teacher probabilities are softmax((logits - centre) / tau_t), the student's log-softmax(logits / tau_s).
    Rows are visited in blocks and the gradient is taken on the way, so that never more than `block_logits`
    logits of a kind are alive, forward and backward, however many rows there are. Equal to the plain formula.

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
    loss = _PrototypeLoss.apply(
        student.float(),
        distillation.student_prototypes.float(),
        teacher.detach().float(),
        distillation.teacher_prototypes.detach().float(),
        distillation.centre.detach().float(),
        distillation.student_temperature,
        distillation.teacher_temperature,
        max(1, block_logits // distillation.student_prototypes.shape[0]),
    )
    assert isinstance(loss, Tensor)
    return loss


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
    return prototype_loss(student.flip(0).flatten(0, 1), teacher.flatten(0, 1), distillation)


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
        valid: (2, R) which objects of each view have a valid neighbour.
        distillation: the object level's prototypes, centre and temperatures.

    Source: paper equation of L_ci^o.
    """
    directions = [prototype_loss(student[1 - view][valid[view]], neighbours[view], distillation) for view in (0, 1)]
    return (directions[0] + directions[1]) / 2


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
            mean_logits = prototypes.float() @ (total.float() / count.clamp_min(1))
        self.value.lerp_(mean_logits, (count > 0).float() * (1 - self.momentum))


@torch.no_grad()
def sinkhorn_centre(
    embeddings: Float[Tensor, "r e"],
    prototypes: Float[Tensor, "l e"],
    *,
    temperature: float,
    iterations: int = 3,
    block_logits: int = BLOCK_LOGITS,
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
        embeddings, prototypes = embeddings.float(), prototypes.float()
        rows, num_prototypes = embeddings.shape[0], prototypes.shape[0]
        shift = prototypes.new_zeros(num_prototypes)  # log of the columns' scaling
        if rows == 0:
            return shift
        block = max(1, block_logits // num_prototypes)
        for _ in range(iterations):
            mass = torch.zeros_like(shift)
            for part in embeddings.split(block):
                logits = torch.addmm(shift, part, prototypes.T, alpha=1 / temperature)
                mass += logits.softmax(dim=-1).sum(dim=0)
            shift = shift - (mass * (num_prototypes / rows)).clamp_min(1e-30).log()
        return -temperature * shift


class _PrototypeLoss(torch.autograd.Function):
    """Forward and backward of `prototype_loss` in one pass over blocks of rows.

    The gradient of the cross-entropy needs the very probabilities that its value needs; taking both at once
    saves forming the logits again in backward, and leaves nothing but the gradients to keep.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        student_prototypes: Tensor,
        teacher: Tensor,
        teacher_prototypes: Tensor,
        centre: Tensor,
        student_temperature: float,
        teacher_temperature: float,
        block_rows: int,
    ) -> Tensor:
        rows = student.shape[0]
        needs_student, needs_prototypes = ctx.needs_input_grad[:2]
        student_gradient = torch.zeros_like(student) if needs_student else None
        prototype_gradient = torch.zeros_like(student_prototypes) if needs_prototypes else None
        total = student.new_zeros(())
        with torch.autocast(student.device.type, enabled=False):
            for start in range(0, rows, block_rows):
                block = slice(start, start + block_rows)
                target = torch.addmm(-centre, teacher[block], teacher_prototypes.T)
                target = target.div_(teacher_temperature).softmax(dim=-1)
                logits = (student[block] @ student_prototypes.T).div_(student_temperature)
                log_normaliser = logits.logsumexp(dim=-1, keepdim=True)
                total += log_normaliser.sum() - torch.vdot(target.flatten(), logits.flatten())
                if student_gradient is None and prototype_gradient is None:
                    continue
                difference = logits.sub_(log_normaliser).exp_().sub_(target)
                difference.div_(student_temperature * rows)
                if student_gradient is not None:
                    student_gradient[block] = difference @ student_prototypes
                if prototype_gradient is not None:
                    prototype_gradient.addmm_(difference.T, student[block])
        ctx.save_for_backward(student_gradient, prototype_gradient)
        return total / max(rows, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        student_gradient, prototype_gradient = ctx.saved_tensors
        scaled = [None if g is None else g * gradients[0] for g in (student_gradient, prototype_gradient)]
        return (*scaled, None, None, None, None, None, None)
