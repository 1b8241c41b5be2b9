"""Atomic writing of files and folders."""

import contextlib
import errno
import json
import os
import re
import shutil
import uuid
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from cribo.errors import InputError

# Temporary names of `write_beside`.
_PART = re.compile(r"\..+\.[0-9a-f]{32}\.part")


class FolderError(InputError):
    """A folder cannot be used for results. The message says what to do instead."""


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a dictionary as indented JSON, atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text, atomically."""
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def append_json(path: Path, content: dict[str, Any]) -> None:
    """Append a dictionary as one line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of `append_json`, without the incomplete line of a killed process; empty without a file."""
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: readers see the old file or the new one, also after a crash.

    Args:
        path: of the file.
        write: called with a temporary path in the same folder, to which it writes the file.

    Raises:
        OSError: writing failed; the old file is unchanged and the temporary file is removed. (If only syncing the
            folder fails, the new file is in place, but may be lost in a power failure.)
    """
    temporary = write_beside(path, write)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link to a file that is never modified in place, or a copy where links are impossible.

    Raises:
        OSError: the file cannot be read, or the target cannot be written.
    """
    try:
        target.hardlink_to(source)
    except OSError:  # another file system, one without links, or the file of another user
        shutil.copyfile(source, target)


def write_beside(path: Path, write: Callable[[Path], object]) -> Path:
    """Write and sync a file under a temporary name in the folder of `path`; remove it on failure.

    For several files that belong together: write each to a temporary path, then move them all.

    Returns:
        The temporary path, which the caller must move into place or remove.
    """
    temporary = _beside(path)
    try:
        mode = _create(temporary)
        write(temporary)
        temporary.chmod(mode)
        sync(temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_folder_whole(folder: Path, write: Callable[[Path], object], *, replaces: bool = False) -> None:
    """Write a folder as a whole: readers see the old folder or the new one.

    Args:
        folder: to write.
        write: called with a temporary folder in the same parent folder, to which it writes the files.
        replaces: whether a non-empty folder is replaced once the new one is complete.

    Raises:
        FolderError: the folder is not empty and `replaces` is not set, also if another process wrote it meanwhile; or
            the folders cannot be exchanged, in which case the message names the folder of the new results.
        OSError: writing failed; the old folder is unchanged and the temporary folder is removed.
    """
    if not replaces and folder.is_dir() and any(folder.iterdir()):
        raise FolderError(f"{folder} already exists: choose another folder")
    remove_abandoned(folder.parent)
    part = _beside(folder)
    lock = _lock_part(part)
    try:
        part.mkdir(parents=True)
        probe = part / ".mode"
        mode = _create(probe)
        probe.unlink()
        write(part)
        for path in sorted(part.rglob("*")):
            if path.is_file():
                if path.stat().st_nlink > 1:  # by `link_or_copy`: complete, and its mode is that of the other name
                    continue
                path.chmod(mode)
            sync(path)
        sync(part)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        _unlock_part(part, lock)
        raise
    try:
        _exchange(folder, part, replaces=replaces)
    except OSError as error:
        if not replaces and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            shutil.rmtree(part, ignore_errors=True)
            raise FolderError(f"{folder} already exists: another process wrote it; choose another folder") from error
        raise FolderError(f"cannot write {folder} ({error}): the complete results are in {part}") from error
    finally:
        _unlock_part(part, lock)


def _exchange(folder: Path, part: Path, *, replaces: bool) -> None:
    """Move a new folder into place, then delete the old one."""
    old = _beside(folder)
    try:
        folder.rmdir()  # removes it only if it is empty
    except OSError:
        if folder.exists():
            if not replaces:
                raise FileExistsError(errno.EEXIST, "already exists", str(folder)) from None
            folder.rename(old)
    try:
        part.rename(folder)
    except OSError:
        if old.exists():
            try:
                old.rename(folder)
            except OSError as error:
                raise OSError(error.errno, "the previous results were moved to", str(old)) from error
        raise
    sync(folder.parent)
    if old.exists():
        lock = _lock_part(old)  # only now: until the new folder is in place, the old one is not abandoned
        shutil.rmtree(old, ignore_errors=True)
        _unlock_part(old, lock)


def _lock_part(part: Path) -> FileLock | None:
    """Lock a temporary folder while it is incomplete; None on a file system without locks."""
    part.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(_lock_file(part))
    try:
        lock.acquire()
    except (OSError, NotImplementedError):
        return None
    return lock


def _unlock_part(part: Path, lock: FileLock | None) -> None:
    """Remove the lock of a temporary folder that is complete or removed."""
    if lock is not None:
        lock.release()
    with contextlib.suppress(OSError):
        _lock_file(part).unlink()


def _lock_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.lock")


def remove_abandoned(folder: Path) -> None:
    """Remove temporary folders of `write_folder_whole` in a folder whose processes were killed.

    The operating system releases the lock of a process that ends. Folders without a lock file are kept: they are
    complete.
    """
    with contextlib.suppress(OSError):
        for file in folder.glob(".*.part.lock"):
            part = file.with_suffix("")
            lock = FileLock(file)
            if not is_part(part.name):
                continue
            try:
                lock.acquire(timeout=0)
            except (Timeout, OSError, NotImplementedError):
                continue
            shutil.rmtree(part, ignore_errors=True)
            _unlock_part(part, lock)


def _beside(path: Path) -> Path:
    """Return a temporary name in the same folder."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")


def _create(path: Path) -> int:
    """Create an empty file and return its default mode; some writers restrict the mode to the owner."""
    path.touch()
    return path.stat().st_mode


def is_part(name: str) -> bool:
    """Whether a file name is a temporary name of `write_beside`."""
    return _PART.fullmatch(name) is not None


def remove_parts(folder: Path) -> None:
    """Remove temporary files of killed processes; no other process may be writing to the folder."""
    for path in folder.glob(".*.part"):
        if is_part(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":
        return  # Windows cannot open folders
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems support fsync for files only.
        if not is_folder or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


class Damaged(InputError):
    """A file is damaged. The message gives the reason, without the file name."""


def check_archive(path: Path) -> None:
    """Verify the checksums of a zip archive, such as a file of `torch.save`.

    Raises:
        Damaged: a checksum does not match, or the file is not an archive.
        OSError: the file cannot be read.
    """
    if not path.stat().st_size:
        raise Damaged("the file is empty")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise Damaged(f"truncated, damaged, or not a PyTorch file ({error})") from error
    if damaged is not None:
        raise Damaged(f"the checksum of {damaged} in the archive does not match")
