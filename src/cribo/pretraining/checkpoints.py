"""Checkpoints: written whole or not at all, the last few kept, never of a run that has gone wrong."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from cribo.files import write_whole
from cribo.pretraining.files import CHECKPOINTS, is_disk_full
from cribo.pretraining.module import PretrainingModule

log = logging.getLogger("cribo")


class WholeFileCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, moved into place only once they are complete on disk."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda part: torch.save(checkpoint, part))


class Checkpoints(L.Callback):
    """Saves every so many steps and at the end; a save that fails is reported and tried again.

    Lightning's own callback, under manual optimisation, saves weights from before the step it is called after,
    and forgets an older file whether or not the newer one could be written.

    Args:
        folder: the run folder.
        every_steps: between two checkpoints.
        keep: how many of the last stay on disk.
    """

    def __init__(self, folder: Path, *, every_steps: int, keep: int) -> None:
        self.folder = folder
        self.every_steps = every_steps
        self.keep = keep
        self.saved_step: int | None = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when it is time."""
        if trainer.global_step % self.every_steps == 0:
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save where the run ended, so that it can be looked at or continued."""
        if self.saved_step != trainer.global_step:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        module = trainer.lightning_module
        assert isinstance(module, PretrainingModule)
        module.check_finite()  # weights that a bad loss has touched are not worth keeping
        module.check_weights()
        path = self.folder / CHECKPOINTS / f"step={trainer.global_step:08d}.ckpt"
        try:
            trainer.save_checkpoint(path)
        except (OSError, RuntimeError) as error:
            if not isinstance(error, OSError) and not is_disk_full(error):
                raise
            reason = "the disk is full" if is_disk_full(error) else str(error)
            log.error(
                "could not save %s: %s. The checkpoint before is intact; training goes on and saves again in %d "
                "steps: make room until then",
                path,
                reason,
                self.every_steps,
            )
            return
        self.saved_step = trainer.global_step
        if trainer.is_global_zero:
            for old in _checkpoints(self.folder)[: -self.keep]:
                old.unlink(missing_ok=True)


def last_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the latest step in a run folder, if there is one."""
    found = _checkpoints(folder)
    return found[-1] if found else None


def _checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / CHECKPOINTS).glob("step=*.ckpt"))
