"""Learning rate, weight decay, teacher momentum and temperature at each step (docs/method.md, "Recipe")."""

import math
from dataclasses import dataclass

from cribo.pretraining.config import PretrainConfig


@dataclass(frozen=True)
class StepValues:
    """What the schedules say at one step."""

    lr: float
    weight_decay: float
    momentum: float
    teacher_temperature: float


@dataclass(frozen=True)
class Schedules:
    """The schedules of a run: cosines per step, the temperature one linear step per epoch.

    Attributes:
        config: the run's configuration.
        steps_per_epoch: optimiser steps of one pass over the data.
    """

    config: PretrainConfig
    steps_per_epoch: int

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the run."""
        return self.config.optim.epochs * self.steps_per_epoch

    def at(self, step: int) -> StepValues:
        """The values of step `step`, counted from 0."""
        optim, losses = self.config.optim, self.config.losses
        warmup = min(optim.warmup_epochs * self.steps_per_epoch, self.total_steps)
        peak = optim.lr * optim.batch_size / 256
        if step < warmup:
            lr = peak * step / max(warmup - 1, 1)
        else:
            lr = _cosine(peak, optim.final_lr, step - warmup, self.total_steps - warmup)
        return StepValues(
            lr=lr,
            weight_decay=_cosine(*optim.weight_decay, step, self.total_steps),
            momentum=_cosine(*optim.momentum, step, self.total_steps),
            teacher_temperature=_linear(
                *losses.teacher_temperature, step // self.steps_per_epoch, losses.teacher_temperature_epochs
            ),
        )


def _cosine(start: float, end: float, step: int, steps: int) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * step / max(steps, 1))) / 2


def _linear(start: float, end: float, epoch: int, epochs: int) -> float:
    """From start in epoch 0 to end in epoch `epochs` - 1, and end from there on; over one epoch, start in epoch 0."""
    return end if epoch >= epochs else start + (end - start) * epoch / max(epochs - 1, 1)
