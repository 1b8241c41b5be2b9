"""Estimation of the duration of a run, and of the number of epochs for a given duration."""

import dataclasses
import logging
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, LambdaCallback

from cribo.base.bounds import above
from cribo.base.console import duration
from cribo.base.errors import ConfigError
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.loading import DEFAULT_PRESET, load_config
from cribo.pretraining.session import Forever, Session
from cribo.training.lightning import interruptible, quiet_lightning

log = logging.getLogger("cribo")

TIMED_STEPS = 8  # after the same number of warm-up steps


def plan(session: Session, minutes: float) -> None:
    """Time some steps of a discarded copy, and set the session's epochs to the number that fits.

    Raises:
        ConfigError: `minutes` is not positive, or there are several devices.
    """
    above(0).check(minutes=minutes)
    seconds_per_epoch = seconds_per_step(session) * session.module.schedules.steps_per_epoch
    epochs = max(1, round(60 * minutes / seconds_per_epoch))
    log.info("--minutes %g: optim.epochs is %d instead of %d", minutes, epochs, session.config.optim.epochs)
    session.config = with_epochs(session.config, epochs)
    session.module = session.make_module()


def seconds_per_step(
    session: Session, clock: Callable[[], float] = time.perf_counter, *, steps: int = TIMED_STEPS
) -> float:
    """Time some steps. They train the session's module, which must be created again afterwards.

    Args:
        session: the run.
        clock: returns the time in seconds, such as `time.process_time`.
        steps: number of timed steps, and of warm-up steps before them.

    Raises:
        ConfigError: there are several devices.
    """
    if session.config.runtime.devices not in (1, "1") or session.config.runtime.num_nodes > 1:
        raise ConfigError("--minutes supports a single device only: set optim.epochs instead")
    times: list[float] = []
    timer = LambdaCallback(on_train_batch_end=lambda *_: times.append(clock()))
    with quiet_lightning():
        trainer = session.trainer(None, [timer], 2 * steps)
        with interruptible(trainer), closing(session.loader(trainer)) as loader:
            trainer.fit(session.module, Forever(loader))
    return (times[-1] - times[steps - 1]) / steps


class TimeEstimate(Callback):
    """Callback that logs the duration of the training, estimated from its first steps.

    For the quickstart, it also logs whether the run is too short to judge.

    Args:
        config: configuration of the run.
    """

    def __init__(self, config: PretrainConfig) -> None:
        self.config = config
        self._first = 0
        self._marked = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the first step, which is not 0 in a resumed run."""
        self._first = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the estimate once, after warm-up steps and timed steps."""
        done = trainer.global_step - self._first
        if done == TIMED_STEPS:
            self._marked = time.perf_counter()
        elif done == 2 * TIMED_STEPS:
            per_step = (time.perf_counter() - self._marked) / TIMED_STEPS
            left = trainer.max_steps - self._first
            text = f"{left} steps take about {duration(left * per_step)} on this machine"
            epochs, needed = self.config.optim.epochs, epochs_to_judge(self.config)
            if epochs < needed:
                whole = duration(trainer.max_steps * per_step * needed / epochs)
                text += f", too few to judge; the quickstart's {needed} epochs take about {whole}"
            elif needed:
                text += "; --minutes and --optim.epochs shorten this, but a shorter run is too short to judge"
            log.info(text)


def epochs_to_judge(config: PretrainConfig) -> int:
    """Return the fewest epochs that give the quickstart a meaningful score; 0 without a score or for another run."""
    if config.score.root is None:
        return 0
    quickstart = load_config(DEFAULT_PRESET)
    trained, shown = (
        (each.objective, each.backbone, each.data.root, each.data.scenes) for each in (config, quickstart)
    )
    return quickstart.optim.epochs if trained == shown else 0


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
