"""Lightning's trainer as every training here uses it."""

import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import lightning as L
from lightning.pytorch.plugins import LayerSync
from timm.layers.norm_act import convert_sync_batchnorm
from torch.nn import Module

from cribo.arguments import ConfigError

log = logging.getLogger("cribo")

T = TypeVar("T")


def require_launched(devices: int | str, num_nodes: int) -> None:
    """Refuse to share a run among another number of processes than were started; each would make a run of its own.

    Args:
        devices: of each node, `runtime.devices`.
        num_nodes: `runtime.num_nodes`.

    Raises:
        ConfigError: torchrun has started another number, or several nodes lack a launcher.
    """
    started = int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None
    if started is not None and str(devices).isdecimal() and int(devices) * num_nodes != started:
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        raise ConfigError(
            f"torchrun has started {started} processes, but runtime.devices x runtime.num_nodes is {devices} x "
            f"{num_nodes}: give --runtime.devices {here} --runtime.num_nodes {started // here}"
        )
    launched = started is not None or "SLURM_NTASKS" in os.environ or "LOCAL_RANK" in os.environ
    if num_nodes > 1 and not launched:
        raise ConfigError(
            f"runtime.num_nodes {num_nodes} needs a launcher that starts the processes of all nodes: run this "
            "command by torchrun or srun (docs/reliability.md)"
        )


def agreed(trainer: L.Trainer, make: Callable[[], T]) -> T:
    """What the first process makes, on all processes that a launcher (torchrun, SLURM) has started.

    Args:
        trainer: with the strategy of the run.
        make: called on the first process alone.

    Raises:
        whatever `make` raises, on all of them.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is None or not environment.creates_processes_externally:
        return make()
    trainer.strategy.setup_environment()
    made: T | None = None
    error: Exception | None = None
    if trainer.is_global_zero:
        try:
            made = make()
        except Exception as raised:
            error = raised
    made, error = trainer.strategy.broadcast((made, error))
    if error is not None:
        raise error
    return cast(T, made)


def ask_nobody_about_sigterm(trainer: L.Trainer) -> None:
    """Leave SIGTERM to `Interruption`: Lightning would have every step wait for the device, to learn of one."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


@contextmanager
def interruptible(trainer: L.Trainer, *, advice: str = "") -> Iterator[None]:
    """Let Ctrl-C end the training as it ends anything else in Python.

    Lightning makes it an exit of the whole program, deaf to further ones.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        if not trainer.interrupted:
            raise
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
        if advice:
            log.warning("interrupted at step %d: %s", trainer.global_step, advice)
        raise KeyboardInterrupt from error


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Leave out what Lightning says about choices that were made on purpose."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for text in (
                ".*does not have many workers.*",
                ".*GPU available but not used.*",
                ".*tensorboardX.*",
                ".*is smaller than the logging interval.*",
                ".*in eval mode at the start of training.*",  # what is frozen
                ".*You defined a `validation_step` but have no `val_dataloader`.*",  # of its own, after the training
                # The order of the data is a function of the step: StepBatchSampler.
                ".*your dataloader is not resumable.*",
                ".*sync_dist=True.*",  # what is logged is of all processes already, or of one on purpose
                ".*torch.distributed.nn.functional.all_gather is deprecated.*",
                ".*LeafSpec.*is deprecated.*",
                ".*`broadcast_buffers` is deprecated.*",  # its successor is not in all versions of torch
                ".*FSDP2-wrapped module .* returned a view tensor.*",  # nothing changes tokens in place
            ):
                warnings.filterwarnings("ignore", text)
            yield
    finally:
        logger.setLevel(level)


class SyncBatchNorm(LayerSync):
    """Batch norms over all GPUs; timm's conversion keeps the activations inside its own norms."""

    def apply(self, model: Module) -> Module:
        """Convert."""
        return convert_sync_batchnorm(model)

    def revert(self, model: Module) -> Module:
        """Leave them as they are: their state is the same."""
        return model
