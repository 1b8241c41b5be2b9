"""Base class of Lightning modules whose training can be stopped at any step and resumed."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from cribo.base.errors import NonFiniteLoss


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
