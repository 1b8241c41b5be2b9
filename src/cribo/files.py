"""Atomic writing of files and folders, and creation of result folders without data loss."""

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import tempfile
import uuid
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Temporary names of `write_beside`.
_PART = re.compile(r"\..+\.[0-9a-f]{32}\.part")


class FolderError(ValueError):
    """A folder cannot be used for results; the message says what to do instead."""


def make_numbered_folder(parent: Path, name: str) -> Path:
    """Create the first of the folders `name`, `name-2`, ... that does not exist; safe against concurrent calls.

    Raises:
        FolderError: `parent` is a file, or cannot be written to.
    """
    _require_folder(parent)
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            _try_writing(folder)
        except FileExistsError:
            continue
        except OSError as error:
            raise FolderError(f"cannot write to {parent}: {error.strerror}; choose another --out") from error
        return folder
    raise AssertionError("unreachable")


def claim_folder(folder: Path, *, marker: str, overwrite: bool, advice: str) -> None:
    """Create an empty folder for results; a non-empty one is replaced only on request.

    Args:
        folder: to create.
        marker: file that identifies results of this kind; folders without it are never replaced.
        overwrite: replace existing results.
        advice: what to do if the folder exists, as the end of an error message.

    Raises:
        FolderError: the folder is not empty and `overwrite` is not set, or it contains something else, is a file, or
            is not writable.
    """
    try:
        if holds_results(folder, marker=marker, overwrite=overwrite, advice=advice):
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _try_writing(folder)
    except OSError as error:
        raise FolderError(f"cannot write to {folder}: {error.strerror}; choose another --out") from error


def holds_results(folder: Path, *, marker: str, overwrite: bool, advice: str) -> bool:
    """Whether there are results that `claim_folder` would replace; changes nothing.

    Raises:
        FolderError: as `claim_folder` does.
    """
    _require_folder(folder)
    try:
        if not folder.exists() or not any(folder.iterdir()):
            return False
        if not overwrite:
            raise FolderError(f"{folder} exists already: {advice}")
        if not (folder / marker).is_file():
            raise FolderError(f"{folder} has no {marker}: not created by cribo, refusing to replace it")
        _try_writing(folder)
    except OSError as error:
        raise FolderError(f"cannot write to {folder}: {error.strerror}; choose another --out") from error
    return True


def _require_folder(folder: Path) -> None:
    for part in (folder, *folder.parents):
        if part.is_dir():
            return
        if part.exists():
            raise FolderError(f"{part} is a file, not a folder: choose another --out")


def _try_writing(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder):
        pass


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a dictionary as indented JSON, atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text, atomically."""
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: readers see the old file or the new one, also after a crash.

    Args:
        path: of the file.
        write: called with a temporary path in the same folder, to which it writes the file.

    Raises:
        OSError: writing failed; the old file is unchanged and the temporary one is removed. (If only syncing the folder
            fails, the new file is in place, but may be lost in a power failure.)
    """
    temporary = write_beside(path, write)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_beside(path: Path, write: Callable[[Path], object]) -> Path:
    """Write and sync a file under a temporary name beside `path`; removes it on failure.

    For files that belong together: write each to a temporary path, then move them all.

    Returns:
        The temporary path, which the caller must move into place or remove.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
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
        write: called with a temporary folder beside it, to which it writes the files.
        replaces: whether a non-empty folder is replaced once the new one is complete.

    Raises:
        FolderError: the folder is not empty and `replaces` is not set.
        OSError: writing failed; the old folder is unchanged and the temporary one is removed.
    """
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.part")
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.part")
    try:
        part.mkdir(parents=True)
        probe = part / ".mode"
        mode = _create(probe)
        probe.unlink()
        write(part)
        for path in sorted(part.rglob("*")):
            if path.is_file():
                path.chmod(mode)
            sync(path)
        sync(part)
        if folder.exists():
            if not replaces and any(folder.iterdir()):
                raise FolderError(f"{folder} exists already")
            folder.rename(aside)
        try:
            part.rename(folder)
        except BaseException:
            if aside.exists():
                aside.rename(folder)
            raise
        sync(folder.parent)
    finally:
        for leftover in (part, aside):
            shutil.rmtree(leftover, ignore_errors=True)


def _create(path: Path) -> int:
    """Create an empty file and return its mode, to restore after writers that set a mode for their owner only."""
    path.touch()
    return path.stat().st_mode


def is_part(name: str) -> bool:
    """Whether a file name is a temporary name of `write_beside`."""
    return _PART.fullmatch(name) is not None


def remove_parts(folder: Path) -> None:
    """Remove temporary files of killed processes; no other process may be writing to the folder."""
    for path in folder.glob(".*.part"):
        if is_part(path.name):
            with contextlib.suppress(OSError):  # harmless if it stays
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
        # Some network file systems support it for files only.
        if not is_folder or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


class Damaged(ValueError):
    """A file is damaged; the message gives the reason, without the name of the file."""


def check_archive(path: Path) -> None:
    """Verify the checksums of a zip archive, such as a file of `torch.save`.

    Raises:
        Damaged: a checksum differs, or the file is not an archive.
        OSError: it cannot be read.
    """
    if not path.stat().st_size:
        raise Damaged("it is empty")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise Damaged(f"it was cut short or damaged, or is no file of PyTorch ({error})") from error
    if damaged is not None:
        raise Damaged(f"the content of {damaged} in it does not fit its checksum")
