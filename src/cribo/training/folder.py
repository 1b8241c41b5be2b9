"""Create and lock the output folder of a training, the same on all ranks."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import lightning as L
from filelock import FileLock, Timeout

from cribo.base.errors import FolderError
from cribo.base.folders import ResultFolder
from cribo.base.machine import LAUNCHER

log = logging.getLogger("cribo")

RUN_LOCK = "run.lock"

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


def claim(held: ExitStack, folder: ResultFolder) -> Path:
    """Create the folder of a training, or keep that of a resumed one, and lock it.

    Args:
        held: context that holds the lock.
        folder: folder of the training.

    Raises:
        FolderError: the folder is in use, or cannot be written to.
    """
    if folder.replaces:
        with run_lock(folder.path):  # fails if the folder to replace is in use
            pass
    path = folder.path if folder.resumes else folder.create()
    held.enter_context(run_lock(path))
    return path


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Lock a folder until this process ends, even if it is killed. Warn if the file system does not support locks.

    Raises:
        FolderError: another run holds the lock, or the folder cannot be written to.
    """
    lock, owner = FileLock(folder / RUN_LOCK), os.getpid()
    try:
        lock.acquire(timeout=0)
    except NotImplementedError:
        log.warning("cannot lock %s: make sure that no other run uses this folder", folder)
    except (Timeout, RuntimeError) as error:  # RuntimeError: held by this process
        raise FolderError(
            f"{folder} is in use by another run: wait until it ends, stop it, or use another --name or --out"
        ) from error
    except OSError as error:
        raise FolderError(f"cannot write to {folder}: {error.strerror}; use another folder") from error
    try:
        yield
    finally:
        if os.getpid() == owner:  # not in a forked process that raised an exception
            with contextlib.suppress(OSError):
                (folder / RUN_LOCK).unlink()
            lock.release()
