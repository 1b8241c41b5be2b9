"""The lock on a run folder: no two runs write to the same one."""

import contextlib
import errno
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cribo.files import FolderError, is_part

log = logging.getLogger("cribo")

RUN_LOCK = "run.lock"

_HELD_ELSEWHERE = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

# Which process holds which folder, by device and inode: the system's lock lets a process in that has it already.
_held: dict[tuple[int, int], int] = {}
_held_guard = threading.Lock()


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold a run folder for this process, which is the first of its run.

    The lock is the system's own: it is gone when the process is, however that came about. The file that bears it
    tells others who has the folder. Where the file system has no locks, there is a warning instead.

    Raises:
        FolderError: another run holds the folder, or it cannot be written to.
    """
    with _held_in_this_process(folder):
        path = folder / RUN_LOCK
        handle = _acquire(path)
        owner = os.getpid()
        try:
            yield
        finally:
            if os.getpid() == owner:  # and no fork of it that ends by an exception
                _release(path, handle)


@contextmanager
def _held_in_this_process(folder: Path) -> Iterator[None]:
    try:
        status = folder.stat()
    except OSError as error:
        raise FolderError(f"cannot use {folder}: {error.strerror}") from error
    key = status.st_dev, status.st_ino
    with _held_guard:
        if _held.get(key) == os.getpid():
            raise _in_use(folder, f"this process, {os.getpid()} on {socket.gethostname()}")
        _held[key] = os.getpid()
    try:
        yield
    finally:
        with _held_guard:
            _held.pop(key, None)


def is_barely_begun(folder: Path) -> bool:
    """Whether a start was killed, or is under way, before it has written what it is."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return bool(names) and all(name == RUN_LOCK or is_part(name) for name in names)


def _acquire(path: Path) -> int | None:
    """The descriptor of a file on which this process has the lock; None where there are no locks."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise FolderError(
                f"cannot write to {path.parent}: {error.strerror}; mend that, or use another folder"
            ) from error
        try:
            _lock(handle)
        except OSError as error:
            holder = _read_holder(handle)
            os.close(handle)
            if error.errno in _HELD_ELSEWHERE:
                raise _in_use(path.parent, holder) from error
            if error.errno not in _NO_LOCKS:
                raise
            log.warning(
                "%s cannot be locked (%s): see to it that no other run uses this folder", path.parent, error.strerror
            )
            return None
        if _is_still(path, handle):
            _write_holder(handle)
            return handle
        os.close(handle)  # its holder removed it between our opening and locking it


def _release(path: Path, handle: int | None) -> None:
    if handle is None:
        return
    with contextlib.suppress(OSError):
        if os.name != "nt":
            path.unlink()  # while it is held: whoever waits at this file finds that it is no longer there
    os.close(handle)
    with contextlib.suppress(OSError):
        if os.name == "nt":
            path.unlink()


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        # What is locked cannot be read by others, so it is a byte far behind the text.
        os.lseek(handle, 2**30, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        os.lseek(handle, 0, os.SEEK_SET)
else:
    import fcntl

    def _lock(handle: int) -> None:
        # POSIX's lock belongs to the process. That of flock belongs to the open file, which loader workers inherit by
        # fork: one that outlives a killed run would keep the folder for ever. POSIX's is lost when the process closes
        # any descriptor of the file; nothing else here opens it.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_still(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _write_holder(handle: int) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError):  # a full disk: the lock is held all the same
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())


def _read_holder(handle: int) -> str:
    with contextlib.suppress(OSError):
        os.lseek(handle, 0, os.SEEK_SET)
        return os.read(handle, 1000).decode(errors="replace").strip() or "another process"
    return "another process"


def _in_use(folder: Path, holder: str) -> FolderError:
    return FolderError(
        f"{folder} is in use by another run ({holder}): wait for its end or stop it, or use another --name or --out"
    )
