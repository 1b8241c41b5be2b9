"""Agreement of all ranks on the output folder of a training."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import lightning as L

from cribo.base.machine import LAUNCHER

log = logging.getLogger("cribo")

# Environment variable with the folder, for processes that Lightning starts for further devices.
_OPENED = "CRIBO_FOLDER"


@contextmanager
def open_on_all_ranks(trainer: L.Trainer, open_folder: Callable[[ExitStack], Path]) -> Iterator[Path]:
    """Open a folder on rank 0, for all ranks.

    Args:
        trainer: trainer with the strategy of the training.
        open_folder: called on rank 0 only; contexts that it enters, such as a lock, are closed at the end.

    Raises:
        Exception: errors of `open_folder`, on all ranks started by a launcher (torchrun, SLURM).
    """
    if _OPENED in os.environ and os.environ.get(LAUNCHER) != str(os.getpid()):
        # Lightning started this process after rank 0 opened the folder.
        yield Path(os.environ.pop(_OPENED))
        return
    with ExitStack() as held:
        folder = _agree(trainer, lambda: open_folder(held))
        for variable, value in ((_OPENED, str(folder)), (LAUNCHER, str(os.getpid()))):
            os.environ[variable] = value
            held.callback(os.environ.pop, variable, None)
        yield folder


def _agree(trainer: L.Trainer, make: Callable[[], Path]) -> Path:
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is None or not environment.creates_processes_externally:
        return make()
    trainer.strategy.setup_environment()
    made: Path | None = None
    error: Exception | None = None
    if trainer.is_global_zero:
        try:
            made = make()
        except Exception as raised:
            error = raised
    made, error = trainer.strategy.broadcast((made, error))
    if error is not None:
        raise error
    assert made is not None
    return made
