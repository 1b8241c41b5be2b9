"""Training step for Lightning: losses, backward pass, optimiser step, update of the objective."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from cribo.base.errors import ConfigError, InputError, NonFiniteLoss
from cribo.base.redaction import masked
from cribo.data.samples import Batch
from cribo.models import describe
from cribo.objectives import Setting, Step, make_objective
from cribo.objectives.base import check_output
from cribo.pretraining.compiling import compile_objective
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.parameters import clip_each, drop_gradients, make_optimiser, parameter_groups
from cribo.pretraining.schedules import Schedules
from cribo.pretraining.sums import RunningSums
from cribo.training.module import ResumableModule


class PretrainingModule(ResumableModule):
    """Lightning module that trains an objective; each `training_step` is one optimiser step of all its micro-batches.

    Args:
        config: configuration of the run.
        num_images: number of images in the collection.
        steps_per_epoch: number of optimiser steps per epoch.

    Raises:
        ConfigError: the objective cannot be created.
    """

    advice = (
        "resume from the last one with --resume, where --runtime.precision bf16-mixed helps if it is 16-mixed; or "
        "start a new run with a lower optim.lr, a longer optim.warmup_epochs or optim.clip 0.3"
    )

    def __init__(self, config: PretrainConfig, *, num_images: int, steps_per_epoch: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.num_images = num_images
        setting = Setting(config, num_images, steps_per_epoch, config.data.reading)
        self.objective = make_objective(config.objective.name, config.objective.args, setting)
        if self.objective.whole_batch and config.optim.micro_batches > 1:
            raise ConfigError(
                f"optim.micro_batches must be 1 for {config.objective.name}, whose losses depend on a device's whole "
                f"batch, got {config.optim.micro_batches}: use a smaller optim.batch_size, more devices "
                "or, for a vision transformer, backbone.checkpointing selective"
            )
        self._parameter_groups()  # raises errors about options before training
        self.schedules = Schedules(config.optim, steps_per_epoch, self.objective.schedules)
        self.sums = RunningSums(self._gather, lambda: self.trainer.world_size)
        self._restored_sums: dict[str, Any] | None = None

    # ------------------------------------------------------------------------------------------------- set-up

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimiser of the configuration."""
        return make_optimiser(self._parameter_groups(), self.config.optim)

    def _parameter_groups(self) -> list[dict[str, Any]]:
        optim = self.config.optim
        factors = self.objective.lr_factors if optim.lr_factors is None else optim.lr_factors
        return parameter_groups(self.objective.trainable(), optim.layer_decay, factors)

    def on_fit_start(self) -> None:
        """Compile the objective, and move restored sums to the device."""
        if self._restored_sums is not None:
            self.sums.load_state_dict(self._restored_sums, self.device)
            self._restored_sums = None
        left = self.schedules.total_steps - self.step
        compile_objective(self.objective, self.config.runtime, self.device, steps=left)

    # --------------------------------------------------------------------------------------------------- step

    @property
    def step(self) -> int:
        """Number of completed optimiser steps."""
        return self.global_step

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0."""
        return self.step // self.schedules.steps_per_epoch

    def at(self, number: int) -> Step:
        """Return a step of this run."""
        return replace(self.schedules.step(number), gather=self._gather)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """Run one optimiser step."""
        objective, parts = self.objective, self.config.optim.micro_batches
        step, values = self.at(self.step), self.schedules.at(self.step)
        optimizer: Any = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] = values["lr"] * group["lr_scale"]
            group["weight_decay"] = values["weight_decay"] * group["decay"]

        optimizer.zero_grad()
        for number, part in enumerate(batch.split(parts), start=1):
            output = objective(part, step)
            check_output(output, objective.weights)
            total: Any = sum(objective.weights.get(name, 1.0) * loss for name, loss in output.losses.items())
            with nullcontext() if number == parts else self._gradients_kept_here():
                self.manual_backward(total / parts)
            self.sums.add(output, objective.weights)
        optimizer.step()
        objective.after_step(step)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the gradients of frozen parameters, and clip the others."""
        drop_gradients(self.objective.frozen(self.at(self.step)))
        optim = self.config.optim
        if optim.clip is None:
            return
        scaler: Any = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)  # 16-mixed: Lightning does not unscale gradients of fused optimisers
        trained = self.objective.trainable().parameters()
        if optim.clip_norm == "global":
            torch.nn.utils.clip_grad_norm_(trained, optim.clip)
        else:
            clip_each([p.grad for p in trained if p.grad is not None], optim.clip)

    # ------------------------------------------------------------------------------------------- several devices

    def _gradients_kept_here(self) -> AbstractContextManager[None]:
        """Accumulate gradients over micro-batches without reducing them over devices."""
        strategy = self.trainer.strategy
        return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()

    def _gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked in order: (devices, ...)."""
        if self.trainer.world_size == 1:
            return tensor[None]
        gathered = self.all_gather(tensor)
        assert isinstance(gathered, Tensor)
        return gathered

    # ------------------------------------------------------------------------------------------------ metrics

    def read_metrics(self) -> dict[str, float]:
        """Return means over the steps since the last reading, values of schedules, and metrics of `Objective.watch`.

        Synchronises with the device; call it on all ranks.

        Raises:
            NonFiniteLoss: a loss was infinite or not a number.
        """
        metrics = self.sums.read()
        for name, value in metrics.items():
            if name.startswith("loss") and not math.isfinite(value):
                raise NonFiniteLoss(f"the loss {name.removeprefix('loss_')}", self.step, self.advice)
        return {**metrics, **self.schedules.at(self.step - 1), **self.objective.watch(self.at(self.step - 1))}

    def check_weights(self) -> None:
        """Check that losses and weights are finite; synchronises with the device, call it on all ranks.

        Raises:
            NonFiniteLoss: a loss or weight is not finite.
        """
        if not self.sums.is_finite():
            raise NonFiniteLoss("a loss", self.step, self.advice)
        super().check_weights()

    # -------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the objective's state, without a prefix."""
        return self.objective.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load the objective's state."""
        return self.objective.load_state_dict(state_dict, strict=strict, assign=assign)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the unfinished row of metrics and the run's configuration."""
        checkpoint["cribo"] = {
            "sums": self.sums.state_dict(),
            "config": masked(asdict(self.config)),
            "backbone": describe(self.objective.exported()),  # to evaluate unfinished runs
            "num_images": self.num_images,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the unfinished row of metrics."""
        state = checkpoint["cribo"]
        if state["num_images"] != self.num_images:
            raise InputError(
                f"the run was trained on {state['num_images']} images, but data.root now has {self.num_images}, which "
                "would change its schedules: restore the images, or start a new run"
            )
        self._restored_sums = state["sums"]
