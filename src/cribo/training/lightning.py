"""Configure Lightning's trainer for all training in this package."""

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import LayerSync
from timm.layers.norm_act import convert_sync_batchnorm
from torch.nn import Module

from cribo.base.console import log_level
from cribo.base.errors import ConfigError
from cribo.base.machine import keep_freed_memory
from cribo.training.checkpoints import AtomicCheckpointIO

log = logging.getLogger("cribo")


def make_trainer(
    folder: Path | None,
    callbacks: Sequence[Callback],
    steps: int,
    *,
    accelerator: str,
    threads: int | None,
    loggers: Sequence[Logger] = (),
    plugins: Sequence[Any] = (),
    **options: Any,
) -> L.Trainer:
    """Create a trainer that stops after `steps`, with atomic checkpoints and without Lightning's displays.

    Args:
        folder: folder of the training, if it has one.
        callbacks: callbacks of the trainer.
        steps: number of optimiser steps.
        accelerator: auto, cpu, gpu, ...
        threads: number of PyTorch's CPU threads; None for one while a GPU trains, otherwise PyTorch's default.
        loggers: loggers of numbers.
        plugins: additional plugins.
        options: passed to `lightning.Trainer`.

    Raises:
        ConfigError: the devices do not exist.
    """
    on_gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())
    if not on_gpu:
        keep_freed_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        with quiet_lightning():
            trainer = L.Trainer(
                accelerator=accelerator,
                max_steps=steps,
                max_epochs=-1,
                callbacks=[*callbacks, *([_OneThread()] if on_gpu and threads is None else [])],
                logger=[*loggers],
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
                use_distributed_sampler=False,
                plugins=[AtomicCheckpointIO(), *([_SyncBatchNorm()] if on_gpu else []), *plugins],
                default_root_dir=folder,
                **options,
            )
    except (MisconfigurationException, ValueError) as error:
        raise ConfigError(f"runtime.accelerator {accelerator}: {error}") from error
    # Lightning would broadcast SIGTERM on the device in every step; `Interruption` handles it instead.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    return trainer


def require_launched(devices: int | str, num_nodes: int) -> None:
    """Check the number of launched processes; with a wrong number, each process would start its own run.

    Args:
        devices: number of devices per node, `runtime.devices`.
        num_nodes: number of nodes, `runtime.num_nodes`.

    Raises:
        ConfigError: torchrun started another number, or there are several nodes but no launcher.
    """
    started = int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None
    if started is not None and str(devices).isdecimal() and int(devices) * num_nodes != started:
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        raise ConfigError(
            f"torchrun started {started} processes, but runtime.devices x runtime.num_nodes is {devices} x "
            f"{num_nodes}: give --runtime.devices {here} --runtime.num_nodes {started // here}"
        )
    launched = started is not None or "SLURM_NTASKS" in os.environ or "LOCAL_RANK" in os.environ
    if num_nodes > 1 and not launched:
        raise ConfigError(
            f"runtime.num_nodes {num_nodes} requires a launcher that starts the processes of all nodes: run this "
            "command with torchrun or srun (docs/reliability.md)"
        )


@contextmanager
def interruptible(trainer: L.Trainer, *, advice: str = "") -> Iterator[None]:
    """Raise KeyboardInterrupt with the step and `advice` on Ctrl-C; Lightning would exit the program."""
    try:
        yield
    except SystemExit as error:
        if not trainer.interrupted:
            raise
        raise KeyboardInterrupt(advice and f"step {trainer.global_step} was the last, {advice}") from error


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Suppress Lightning's warnings about intended settings."""
    with log_level(logging.WARNING, "lightning.pytorch"), warnings.catch_warnings():
        for text in (
            ".*does not have many workers.*",
            ".*GPU available but not used.*",
            ".*tensorboardX.*",
            ".*is smaller than the logging interval.*",
            ".*in eval mode at the start of training.*",  # frozen parts
            ".*You defined a `validation_step` but have no `val_dataloader`.*",  # validation runs after training
            ".*your dataloader is not resumable.*",  # the order of the data depends only on the step
            ".*sync_dist=True.*",  # logged values are already averaged, or intentionally of one rank
            ".*torch.distributed.nn.functional.all_gather is deprecated.*",
            ".*LeafSpec.*is deprecated.*",
            ".*`broadcast_buffers` is deprecated.*",  # the replacement is not in all supported versions of torch
        ):
            warnings.filterwarnings("ignore", text)
        yield


class _OneThread(Callback):
    """Use one CPU thread during training; several would wait for each other while data workers use the cores."""

    def setup(self, *_: Any, **__: Any) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(1)

    def teardown(self, *_: Any, **__: Any) -> None:
        torch.set_num_threads(self._before)

    def on_exception(self, *_: Any, **__: Any) -> None:
        torch.set_num_threads(self._before)


class _SyncBatchNorm(LayerSync):
    """Synchronise batch norms over GPUs; timm's conversion keeps the activations inside its norm layers."""

    def apply(self, model: Module) -> Module:
        return convert_sync_batchnorm(model)

    def revert(self, model: Module) -> Module:
        return model
