"""Choose the number of epochs for a given training time on this machine."""

import dataclasses
import logging
import time
from contextlib import closing
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, LambdaCallback

from cribo.arguments import ConfigError
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.session import Forever, Session
from cribo.training.lightning import interruptible, quiet_lightning

log = logging.getLogger("cribo")

_TIMED_STEPS = 8  # after the same number of warm-up steps


def plan(session: Session, minutes: float) -> "TimeLimit":
    """Time some steps of a discarded copy, and set the session's epochs to the number that fits.

    Returns:
        A callback that ends the run after twice the time.

    Raises:
        ConfigError: `minutes` is not positive, or there are several devices.
    """
    if minutes <= 0:
        raise ConfigError(f"minutes must be > 0, got {minutes}")
    per_step = seconds_per_step(session)
    steps_per_epoch = session.module.schedules.steps_per_epoch
    seconds_per_epoch = per_step * steps_per_epoch
    epochs = max(1, round(60 * minutes / seconds_per_epoch))
    log.info(
        "optim.epochs set to %d: %.2f s per step on this machine, %d steps per epoch, about %.1f minutes in total",
        epochs,
        per_step,
        steps_per_epoch,
        epochs * seconds_per_epoch / 60,
    )
    session.config = with_epochs(session.config, epochs)
    session.module = session.make_module()
    return TimeLimit(2 * max(60 * minutes, seconds_per_epoch))


def seconds_per_step(session: Session) -> float:
    """Time some steps. They train the session's module, which must be created again afterwards.

    Raises:
        ConfigError: there are several devices.
    """
    if session.config.runtime.devices not in (1, "1") or session.config.runtime.num_nodes > 1:
        raise ConfigError("--minutes supports a single device only: set optim.epochs instead")
    times: list[float] = []
    timer = LambdaCallback(on_train_batch_end=lambda *_: times.append(time.perf_counter()))
    with quiet_lightning():
        trainer = session.trainer(None, [timer], 2 * _TIMED_STEPS)
        with interruptible(trainer), closing(session.loader(trainer)) as loader:
            trainer.fit(session.module, Forever(loader))
    return (times[-1] - times[_TIMED_STEPS - 1]) / _TIMED_STEPS


class TimeLimit(Callback):
    """Callback that ends a planned run after twice the planned time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._started = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop after the time limit."""
        if time.perf_counter() - self._started > self.seconds and not trainer.should_stop:
            log.warning(
                "stopping at step %d of %d, after twice the planned time: the machine has become slower",
                trainer.global_step,
                trainer.max_steps,
            )
            trainer.should_stop = True


def with_epochs(config: PretrainConfig, epochs: int) -> PretrainConfig:
    """Return the configuration of a run of another length, with the epochs of its schedules scaled.

    Example:
        >>> from cribo.pretraining import load_config
        >>> shorter = with_epochs(load_config("imagenet_vits16"), 10)
        >>> shorter.optim.warmup_epochs
        0.125
    """
    factor = epochs / config.optim.epochs

    def placed(epoch: int) -> int:
        return epoch if epoch <= 1 else max(1, round(factor * epoch))

    optim, losses, score = config.optim, config.losses, config.score
    return dataclasses.replace(
        config,
        optim=dataclasses.replace(
            optim,
            epochs=epochs,
            warmup_epochs=factor * optim.warmup_epochs,
            freeze_last_layers_epochs=placed(optim.freeze_last_layers_epochs),
            freeze_backbone_epochs=placed(optim.freeze_backbone_epochs),
        ),
        losses=dataclasses.replace(
            losses,
            # A run of one epoch uses all losses of the longer run.
            cross_image_from_epoch=placed(losses.cross_image_from_epoch)
            if epochs > 1 or losses.cross_image_from_epoch >= optim.epochs
            else 0,
            teacher_temperature_epochs=placed(losses.teacher_temperature_epochs),
        ),
        score=dataclasses.replace(score, every_epochs=placed(score.every_epochs)),
    )
