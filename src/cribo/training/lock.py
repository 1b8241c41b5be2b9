"""The lock on a run folder: no two runs write to the same one."""

import contextlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from cribo.files import FolderError, is_part

log = logging.getLogger("cribo")

RUN_LOCK = "run.lock"


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold a run folder for this process, which is the first of its run.

    The lock is the system's own: it is gone when the process is, however that came about. Where the file system has no
    locks, there is a warning instead.

    Raises:
        FolderError: another run holds the folder, or it cannot be written to.
    """
    lock, owner = FileLock(folder / RUN_LOCK), os.getpid()
    try:
        if not folder.is_dir():
            raise FolderError(f"cannot use {folder}: No such folder")
        lock.acquire(timeout=0)
    except (Timeout, RuntimeError) as error:  # RuntimeError: held by this very process
        if isinstance(error, NotImplementedError):
            log.warning("%s cannot be locked: see to it that no other run uses this folder", folder)
        else:
            raise FolderError(
                f"{folder} is in use by another run: wait for its end or stop it, or use another --name or --out"
            ) from error
    except OSError as error:
        raise FolderError(f"cannot write to {folder}: {error.strerror}; mend that, or use another folder") from error
    try:
        yield
    finally:
        if os.getpid() == owner:  # and no fork of it that ends by an exception
            with contextlib.suppress(OSError):
                (folder / RUN_LOCK).unlink()  # while it is held: whoever opened it before finds that it is gone
            lock.release()


def is_barely_begun(folder: Path) -> bool:
    """Whether a start was killed, or is under way, before it has written what it is."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return bool(names) and all(name == RUN_LOCK or is_part(name) for name in names)
