"""What a module must be for its training to be stopped at any time, and gone on with."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from cribo.errors import Stopped


class Diverged(Stopped):
    """Weights became infinite or not a number.

    Attributes:
        step: after which that was seen.
    """

    everywhere = True

    def __init__(self, step: int) -> None:
        super().__init__(
            f"weights were not finite after step {step}: checkpoints hold nothing of it; start again with a lower "
            "learning rate, or with --runtime.precision bf16-mixed if it is 16-mixed"
        )
        self.step = step


class ResumableModule(L.LightningModule):
    """A module whose checkpoints are sound.

    Its checkpoints have an entry `cribo`, in which it may keep what is no registered state.
    """

    def check_weights(self) -> None:
        """Refuse weights that are not finite, before they are saved. Reads the device; to be called on all.

        Raises:
            Diverged: a trained weight is not finite.
        """
        trained = [parameter.detach().isfinite().all() for parameter in self.parameters() if parameter.requires_grad]
        finite = torch.stack(trained).all().float() if trained else torch.ones(())
        everywhere = self.all_gather(finite)
        assert isinstance(everywhere, Tensor)
        if not everywhere.all():
            raise Diverged(self.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the module's own entry."""
        checkpoint["cribo"] = {}
