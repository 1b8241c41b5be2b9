"""Files that are written whole or not at all, and survive a power cut once they are."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that readers see the old one or the new one, whatever happens on the way.

    Args:
        path: where it shall stand.
        write: writes it to the temporary path that it is given, in the same folder.

    Raises:
        OSError: writing failed; the file that stood there is untouched and the temporary one is gone.
    """
    temporary = write_beside(path, write)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_beside(path: Path, write: Callable[[Path], object]) -> Path:
    """Write a whole, synchronised file under a temporary name beside `path`; nothing stays on failure.

    For files that belong together: write each beside its place, then move them all.

    Returns:
        the temporary path; whoever calls moves it into place, or removes it.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)  # some writers leave a file readable for its owner alone
        sync(temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def sync(path: Path) -> None:
    """Have the system put a file, or a folder's list of files, on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folder
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
