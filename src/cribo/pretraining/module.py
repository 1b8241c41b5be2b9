"""The training step under Lightning: the objective's losses, backward, update, and what follows an update."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from cribo.data.samples import Batch
from cribo.errors import Stopped
from cribo.models import describe
from cribo.objectives import Setting, Step, make_objective
from cribo.objectives.base import check_output
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.parameters import clip_each, drop_gradients, parameter_groups
from cribo.pretraining.schedules import Schedules
from cribo.pretraining.sums import RunningSums
from cribo.training.module import ResumableModule
from cribo.training.timing import StepTimer


class PretrainingModule(ResumableModule):
    """An objective, and what happens to it in one optimiser step.

    One call of `training_step` is one optimiser step, whatever the number of micro-batches.

    Args:
        config: of the run.
        num_images: of the collection.
        steps_per_epoch: optimiser steps of one pass.

    Raises:
        ConfigError: an objective that cannot be made.
    """

    def __init__(self, config: PretrainConfig, *, num_images: int, steps_per_epoch: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.num_images = num_images
        setting = Setting(config, num_images, steps_per_epoch)
        self.objective = make_objective(config.objective.name, config.objective.args, setting)
        self.schedules = Schedules(config.optim, steps_per_epoch, self.objective.schedules)
        self.sums = RunningSums(self._gather)
        self._restored_sums: dict[str, Any] | None = None
        self.timer = StepTimer()

    # ------------------------------------------------------------------------------------------------- set-up

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over the parameter groups; the schedules set its rates at every step."""
        groups = parameter_groups(self.objective.trainable(), self.config.optim.layer_decay)
        return torch.optim.AdamW(groups, lr=0.0, fused=True)

    def on_fit_start(self) -> None:
        """Compile, and take up what a checkpoint has brought, on the device."""
        if self._restored_sums is not None:
            self.sums.load_state_dict(self._restored_sums, self.device)
            self._restored_sums = None
        mode = self.config.runtime.compile_mode
        if mode is not None:
            self.objective.compile_parts(mode)

    # --------------------------------------------------------------------------------------------------- step

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.global_step

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the next step belongs to."""
        return self.step // self.schedules.steps_per_epoch

    def at(self, number: int) -> Step:
        """A step of this run."""
        return replace(self.schedules.step(number), gather=self._gather, lap=self.timer)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """One optimiser step."""
        objective, parts = self.objective, self.config.optim.micro_batches
        self.timer("waiting for data")
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
            self.timer("backbone, backward")
            self.sums.add(output, objective.weights)
        optimizer.step()
        self.timer("optimiser")
        objective.after_step(step)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip, then freeze."""
        trained = self.objective.trainable()
        if self.config.optim.clip is not None:
            scaler: Any = getattr(self.trainer.precision_plugin, "scaler", None)
            if scaler is not None:  # of 16-mixed; Lightning leaves it to a fused optimiser to unscale gradients
                scaler.unscale_(optimizer)
            clip_each([p.grad for p in trained.parameters() if p.grad is not None], self.config.optim.clip)
        drop_gradients(self.objective.frozen(self.at(self.step)))

    # ------------------------------------------------------------------------------------------- several devices

    def _gradients_kept_here(self) -> AbstractContextManager[None]:
        """Gradients are added up over micro-batches first, and over devices once."""
        strategy = self.trainer.strategy
        return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()

    def _gather(self, tensor: Tensor) -> Tensor:
        """The tensors that all devices call this with, in their order, stacked: (devices, ...)."""
        if self.trainer.world_size == 1:
            return tensor[None]
        gathered = self.all_gather(tensor)
        assert isinstance(gathered, Tensor)
        return gathered

    # ------------------------------------------------------------------------------------------------ numbers

    def read_metrics(self) -> dict[str, float]:
        """Means over the steps since the last reading, the schedules' values, and what the objective watches.

        Reads the device: call it now and then, on all devices.

        Raises:
            NonFiniteLoss: a loss was infinite or not a number.
        """
        metrics = self.sums.read()
        self._require_finite(metrics)
        return {**metrics, **self.schedules.at(self.step - 1), **self.objective.watch(self.at(self.step - 1))}

    def check_weights(self) -> None:
        """Refuse losses or weights that are not finite. Reads the device; to be called on all.

        Raises:
            NonFiniteLoss: naming the step.
        """
        if not self.sums.is_finite():
            raise NonFiniteLoss("a loss", self.step)
        trained = [p.detach().isfinite().all() for p in self.objective.trainable().parameters()]
        if not self._gather(torch.stack(trained).all().float()).all():
            raise NonFiniteLoss("the weights", self.step)

    def _require_finite(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if name.startswith("loss") and not abs(value) < float("inf"):
                raise NonFiniteLoss(f"the loss {name.removeprefix('loss_')}", self.step)

    # -------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The objective's, without a prefix: a checkpoint names what the objective names."""
        return self.objective.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Likewise."""
        return self.objective.load_state_dict(state_dict, strict=strict, assign=assign)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the row of metrics that was begun, and what the run was."""
        checkpoint["cribo"] = {
            "sums": self.sums.state_dict(),
            "config": asdict(self.config),
            "backbone": describe(self.objective.exported()),  # for those who evaluate a run before it is finished
            "num_images": self.num_images,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up the sums of the row that was begun."""
        state = checkpoint["cribo"]
        if state["num_images"] != self.num_images:
            raise ValueError(
                f"the run was trained on {state['num_images']} images, data.root now has {self.num_images}: its "
                "schedules would change; restore the images, or start a new run"
            )
        self._restored_sums = state["sums"]


class NonFiniteLoss(Stopped):
    """A loss or the weights became infinite or not a number.

    Attributes:
        what: of these it was.
        step: at which that was seen.
    """

    everywhere = True

    def __init__(self, what: str, step: int) -> None:
        were = "were" if what.endswith("s") and not what.startswith(("the loss", "a loss")) else "was"
        super().__init__(
            f"{what} {were} not finite, seen at step {step}. Checkpoints hold nothing of it: go on from the last one "
            "with --resume, where --runtime.precision bf16-mixed helps if it is 16-mixed; or start a new run with a "
            "lower optim.lr, a longer optim.warmup_epochs or optim.clip 0.3"
        )
        self.what = what
        self.step = step
