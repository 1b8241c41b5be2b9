"""Base class of Lightning modules whose training can be stopped at any step and resumed."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from cribo.errors import Stopped


class NonFiniteLoss(Stopped):
    """A loss or the weights became infinite or NaN.

    Attributes:
        what: the value that was not finite.
        step: the step at which it was detected.
    """

    everywhere = True

    def __init__(self, what: str, step: int, advice: str) -> None:
        were = "were" if what in ("the weights", "the predictions") else "was"
        super().__init__(f"{what} {were} not finite, seen at step {step}. No checkpoint contains such values: {advice}")
        self.what = what
        self.step = step


class ResumableModule(L.LightningModule):
    """Module whose checkpoints contain only finite weights.

    Attributes:
        advice: advice in the message of a `NonFiniteLoss`.
    """

    advice = "start again with a lower learning rate, or with --runtime.precision bf16-mixed if it is 16-mixed"

    def check_weights(self) -> None:
        """Check that the trained weights are finite on all ranks; synchronises with the device.

        Raises:
            NonFiniteLoss: a trained weight is not finite.
        """
        trained = [parameter.detach().isfinite().all() for parameter in self.parameters() if parameter.requires_grad]
        finite = self.all_gather(torch.stack(trained).all().float()) if trained else torch.ones(())
        assert isinstance(finite, Tensor)
        if not finite.all():
            raise NonFiniteLoss("the weights", self.global_step, self.advice)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the entry `cribo`, for state that is not a registered buffer."""
        checkpoint["cribo"] = {}
