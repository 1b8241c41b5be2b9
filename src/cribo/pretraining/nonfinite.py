"""Steps whose losses or gradients are not finite: the device has left them out, here it is decided what follows."""

import logging
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision

from cribo.pretraining.config import OnNonFinite
from cribo.pretraining.module import NonFiniteLoss, PretrainingModule, not_finite
from cribo.training.checkpoints import Checkpoints

log = logging.getLogger("cribo")

# More than this is no accident. The scale of 16-bit losses is found in sixteen steps from where it begins.
_MOST_IN_A_ROW = 50
_MOST_RETURNS = 3


class NonFiniteSteps(L.Callback):
    """Looks every so many steps, and before each checkpoint, whether steps were left out, and acts by the policy.

    Args:
        policy: `skip`, `rollback` or `stop`.
        checkpoints: of the run.
        every_steps: between two looks.

    Attributes:
        left_out: how many steps were, in all.
        returns: (step, step of the checkpoint) of each return to a checkpoint.
    """

    def __init__(self, policy: OnNonFinite, checkpoints: Checkpoints, *, every_steps: int) -> None:
        self.policy = policy
        self.checkpoints = checkpoints
        self.every_steps = every_steps
        self.left_out = 0
        self.returns: list[tuple[int, int]] = []

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"left_out": self.left_out, "returns": [list(pair) for pair in self.returns]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the counts of the run that is resumed."""
        self.left_out = state_dict["left_out"]
        self.returns = [(step, to) for step, to in state_dict["returns"]]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look when it is time.

        Raises:
            NonFiniteLoss: the run has to stop.
        """
        step = trainer.global_step
        if step % self.every_steps == 0 or step == trainer.max_steps or self.checkpoints.is_due(step):
            self.settle(trainer)

    def settle(self, trainer: L.Trainer) -> None:
        """Act on what was left out since the last time; to be called on all processes.

        Raises:
            NonFiniteLoss: the run has to stop.
        """
        module = trainer.lightning_module
        assert isinstance(module, PretrainingModule)
        found = module.sums.read_left_out()
        self.left_out += found.count
        what, first = found.earliest or ("the gradients", trainer.global_step - found.in_a_row)
        # Of a run that is shorter, not all steps may be so, but for those that look for the scale of 16-bit losses.
        most = _MOST_IN_A_ROW if found.earliest is None else min(_MOST_IN_A_ROW, trainer.max_steps)
        if found.in_a_row >= most:
            raise NonFiniteLoss(what, first, f", and {found.in_a_row} steps in a row were left out")
        if found.earliest is None:
            return
        if self.policy == "stop":
            raise NonFiniteLoss(what, first)
        happened = (
            f"{not_finite(what, first)}: steps left out since the last look {found.count}, in all {self.left_out}"
        )
        if self.policy == "rollback":
            happened += self._roll_back(trainer, what, first)
        if trainer.is_global_zero:
            log.warning("%s", happened)

    def _roll_back(self, trainer: L.Trainer, what: str, first: int) -> str:
        to = self.checkpoints.roll_back(trainer)
        if to is None:
            raise NonFiniteLoss(what, first, ", before there was a checkpoint to return to")
        self.returns.append((trainer.global_step, to))
        if sum(step == to for _, step in self.returns) > _MOST_RETURNS:
            raise NonFiniteLoss(what, first, f", after {_MOST_RETURNS} returns to the checkpoint of step {to}")
        return f". Weights, optimiser, centres and bank are those of the checkpoint of step {to} again"


class LossScaling(MixedPrecision):
    """Losses scaled for 16-bit floats, without a wait for the device in every step.

    Torch's own scaler asks the device whether to take the step. Here gradients are unscaled first, the module looks
    whether they are finite, and the fused optimiser leaves the update out by itself.

    Args:
        device: the type of device, for autocast.
    """

    def __init__(self, device: str) -> None:
        super().__init__("16-mixed", device, torch.amp.GradScaler(device))

    def optimizer_step(
        self, optimizer: Any, model: L.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Unscale, let the module look and clip, take the step, and find the next scale."""
        assert self.scaler is not None
        result = closure()
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        optimizer.step(**kwargs)
        self.scaler.update()
        return result
