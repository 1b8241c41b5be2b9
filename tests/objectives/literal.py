"""Training steps of an objective beside the same steps written out in a test.

The test writes losses and updates as the paper or the released code states them, with the networks as functions.
Student and teacher differ, and there are two steps, so that every loss, gradient and state is compared.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cribo.data.samples import Batch
from cribo.objectives import Objective, Step

STEPS = (Step(5, steps_per_epoch=4, total_steps=12), Step(6, steps_per_epoch=4, total_steps=12))
"""Two steps in the middle of a run of 12, where no schedule has its first or last value."""

MOMENTUM = 0.6, 0.8
"""`optim.momentum` of the objectives whose teacher `follow` updates."""

RATE = 0.5

Losses = Callable[[Any, Batch, Step], dict[str, Tensor]]
Update = Callable[[Any, Step], None]


def unequal(objective: Any, *, scale: float = 0.2) -> Any:
    """Return an objective in float64 whose networks have changed weights: student and teacher, if any, differ."""
    objective.double()
    generator = torch.Generator().manual_seed(0)
    trained = {name for name, parameter in objective.trainable().named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for network in (objective.trainable(), *([objective.teacher] if hasattr(objective, "teacher") else [])):
            for name, parameter in network.named_parameters():
                if name in trained:
                    parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return objective


def linear(start: float, end: float, epochs: int, step: Step) -> float:
    """Return a value that changes from epoch to epoch until the last of `epochs`."""
    epoch = step.number // step.steps_per_epoch
    return start + (end - start) * min(epoch / (epochs - 1), 1)


def follow(objective: Any, step: Step) -> None:
    """Update the teacher, the momentum of which follows a cosine from the first to the last value of `MOMENTUM`."""
    start, end = MOMENTUM
    share = end - (end - start) * (math.cos(math.pi * step.number / step.total_steps) + 1) / 2
    student = dict(objective.student.named_parameters())
    with torch.no_grad():
        for name, parameter in objective.teacher.named_parameters():
            parameter.copy_(share * parameter + (1 - share) * student[name])


def assert_steps_are(
    objective: Objective,
    batches: Sequence[Batch],
    losses_of: Losses,
    update: Update = follow,
    *,
    tolerance: float = 1e-9,
) -> None:
    """Assert that two steps of an objective have the losses, gradients and states of those written out.

    Args:
        objective: the objective, in float64.
        batches: a batch for each step.
        losses_of: returns the losses, given a copy of the objective, whose networks it may use, a batch and a step.
        update: updates this copy after the optimiser's step; only the teacher by default.
        tolerance: relative and absolute.
    """
    written: Any = copy.deepcopy(objective)
    for step, batch in zip(STEPS, batches, strict=True):
        found, wanted = objective(batch, step).losses, losses_of(written, batch, step)
        assert found.keys() == wanted.keys()
        for name, loss in found.items():
            wanted[name] = wanted[name].to(loss.dtype)
            _assert_close(loss, wanted[name], tolerance, f"loss {name}, step {step.number}")
        for each, losses in ((objective, found), (written, wanted)):
            _descend(each.trainable(), sum(objective.weights.get(name, 1) * loss for name, loss in losses.items()))
        _compare_gradients(objective.trainable(), written.trainable(), tolerance, step)
        objective.after_step(step)
        update(written, step)
        own, other = (dict(_tensors(each)) for each in (objective, written))
        assert own.keys() == other.keys()
        for name, value in own.items():
            _assert_close(value, other[name], tolerance, f"{name} after step {step.number}")


def _descend(network: nn.Module, loss: Any) -> None:
    network.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.grad is not None:
                parameter -= RATE * parameter.grad


def _compare_gradients(network: nn.Module, other: nn.Module, tolerance: float, step: Step) -> None:
    wanted = dict(other.named_parameters())
    for name, parameter in network.named_parameters():
        gradients = [each.grad for each in (parameter, wanted[name])]
        where = f"gradient of {name}, step {step.number}"
        assert (gradients[0] is None) == (gradients[1] is None), where
        if gradients[0] is not None:
            _assert_close(gradients[0], gradients[1], tolerance, where)


def _tensors(objective: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Return parameters and buffers, also those that checkpoints leave out."""
    yield from objective.named_parameters()
    yield from objective.named_buffers()


def _assert_close(found: Any, wanted: Any, tolerance: float, where: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}")
