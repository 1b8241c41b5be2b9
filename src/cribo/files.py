"""Files that are written whole or not at all, and folders that are made without harm to what is there."""

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

# The temporary names that `write_beside` gives.
_PART = re.compile(r"\..+\.[0-9a-f]{32}\.part")


class FolderError(ValueError):
    """A folder that cannot be used for results, with what to do instead."""


def make_numbered_folder(parent: Path, name: str) -> Path:
    """Make the first folder of `name`, `name-2`, ... that is not there; safe beside others who do the same.

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
    raise AssertionError("numbers do not end")


def claim_folder(folder: Path, *, marker: str, overwrite: bool, advice: str) -> None:
    """Make a folder for results, empty; one that holds something is replaced on demand only.

    Args:
        folder: to make.
        marker: the file by which results of this kind are known; without it nothing is replaced.
        overwrite: replace what is there.
        advice: what to do if it is there, as the end of an error message.

    Raises:
        FolderError: the folder exists and `overwrite` is not set, holds something else, is a file, or cannot be
            written to.
    """
    try:
        if holds_results(folder, marker=marker, overwrite=overwrite, advice=advice):
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _try_writing(folder)
    except OSError as error:
        raise FolderError(f"cannot write to {folder}: {error.strerror}; choose another --out") from error


def holds_results(folder: Path, *, marker: str, overwrite: bool, advice: str) -> bool:
    """Whether there are results that `claim_folder` would replace; nothing is changed yet.

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
            raise FolderError(f"{folder} holds no {marker}, so it is nothing of ours and is left alone")
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
    """Write a dictionary as indented JSON, whole or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text, whole or not at all."""
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that readers see the old one or the new one, whatever happens on the way.

    Args:
        path: where it shall stand.
        write: writes it to the temporary path that it is given, in the same folder.

    Raises:
        OSError: writing failed; the file that stood there is untouched and the temporary one is gone. (Should the
            folder alone fail to be put on the disk, the new file stands there, but may not outlast a power failure.)
    """
    temporary = write_beside(path, write)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


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


def write_folder_whole(folder: Path, write: Callable[[Path], object], *, replaces: bool = False) -> None:
    """Write a folder so that readers see the old one or the new one, whatever happens on the way.

    Args:
        folder: where it shall stand.
        write: writes its files, into the temporary folder beside it that it is given.
        replaces: whether one that holds something is replaced, once the new one is complete.

    Raises:
        FolderError: the folder holds something and `replaces` is not set.
        OSError: writing failed; what stood there is untouched and the temporary folder is gone.
    """
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.part")
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.part")
    try:
        part.mkdir(parents=True)
        probe = part / ".mode"
        probe.touch()
        mode = probe.stat().st_mode
        probe.unlink()
        write(part)
        for path in sorted(part.rglob("*")):
            if path.is_file():
                path.chmod(mode)  # some writers leave a file readable for its owner alone
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


def is_part(name: str) -> bool:
    """Whether a file of this name is what `write_beside` has begun."""
    return _PART.fullmatch(name) is not None


def remove_parts(folder: Path) -> None:
    """Remove the temporary files that a killed process has left; no other may be writing to the folder."""
    for path in folder.glob(".*.part"):
        if is_part(path.name):
            with contextlib.suppress(OSError):  # it harms nobody
                path.unlink()


def sync(path: Path) -> None:
    """Have the system put a file, or a folder's list of files, on the disk."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":
        return  # Windows opens no folder
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems know this of files only.
        if not is_folder or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


class Damaged(ValueError):
    """A file that is not what was written; the message says why, without naming the file."""


def check_archive(path: Path) -> None:
    """Compare all that a zip archive holds, such as a file of `torch.save`, with its checksums.

    Raises:
        Damaged: it is not what was written, or no archive.
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
