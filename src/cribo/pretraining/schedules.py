"""Schedules of learning rate and weight decay, and the objective's own (docs/method.md, "Recipe")."""

from collections.abc import Callable
from dataclasses import dataclass

from cribo.objectives.base import Step
from cribo.objectives.config import OptimConfig


def _none(step: Step) -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Schedules:
    """Schedules of a run.

    Attributes:
        optim: optimiser section of the configuration.
        steps_per_epoch: number of optimiser steps per epoch.
        own: the objective's own schedules (`Objective.schedules`).
    """

    optim: OptimConfig
    steps_per_epoch: int
    own: Callable[[Step], dict[str, float]] = _none

    @property
    def total_steps(self) -> int:
        """Number of optimiser steps of the run."""
        return self.optim.epochs * self.steps_per_epoch

    def step(self, number: int) -> Step:
        """Return step `number`, counted from 0."""
        return Step(number, self.steps_per_epoch, self.total_steps)

    def at(self, number: int) -> dict[str, float]:
        """Return the values at a step by name: `lr`, `weight_decay`, and the objective's."""
        optim, step = self.optim, self.step(number)
        warmup = min(round(optim.warmup_epochs * self.steps_per_epoch), self.total_steps)
        peak = optim.lr * optim.batch_size / 256
        if number < warmup:
            lr = peak * number / max(warmup - 1, 1)
        else:
            lr = Step(number - warmup, 1, self.total_steps - warmup).cosine(peak, optim.final_lr)
        return {"lr": lr, "weight_decay": step.cosine(*optim.weight_decay), **self.own(step)}
