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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cribo.errors import DataError, InputError, MissingData, full_disk
from cribo.redaction import masked, without_secrets

# Temporary names of `write_beside`.
_LONGEST = 100  # bytes of the name in a temporary name: names have at most 255, on some file systems 143
_PART = re.compile(r"\..*\.[0-9a-f]{32}\.part")


class FolderError(InputError):
    """A folder cannot be used for results. The message says what to do instead."""


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a dictionary as indented JSON, atomically, without secrets in URLs."""
    write_text(path, json.dumps(masked(content), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text, atomically, without secrets in URLs.

    All records of commands, sources and errors are written by this function: results are passed on.
    """
    write_whole(path, lambda part: part.write_text(without_secrets(text), encoding="utf-8"))


def append_json(path: Path, content: dict[str, Any]) -> None:
    """Append a dictionary as one line of JSON, without secrets in URLs."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(masked(content)) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file from a user: UTF-8, UTF-16 or UTF-32, also with a byte-order mark.

    Numbers may be infinite or not a number, which is for callers to check.

    Raises:
        MissingData: the file does not exist.
        DataError: it cannot be read, is not JSON or incomplete, or is nested too deeply.
    """
    if not path.exists():
        raise MissingData(f"{path} does not exist")
    if not path.is_file():  # reading a pipe or a device might never end
        raise DataError(f"{path} is not a file: give a JSON file")
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise DataError(f"{path} is damaged: its values are nested too deeply for a file of data") from error
    except ValueError as error:
        raise DataError(
            f"{path} is not valid JSON ({error}): it may be incomplete; download or export it again"
        ) from error


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
        FileExistsError: the target exists.
        OSError: the file cannot be read, or the target cannot be written.
    """
    try:
        target.hardlink_to(source)
    except FileExistsError:
        raise
    except OSError:  # another file system, one without links, or the file of another user
        with source.open("rb") as content, target.open("xb") as copy:
            shutil.copyfileobj(content, copy)


def path_inside(folder: Path, name: object, *, source: object, follow_links: bool = False) -> Path:
    """Return the path of a name that a file gives, which must lie inside a folder.

    Args:
        folder: the folder.
        name: relative path, as the file gives it.
        source: the file, for the message.
        follow_links: whether links inside the folder may lead outside, as in folders of images.

    Raises:
        InputError: the name is absolute, contains too many `..` or a null character, is the folder itself, or leads
            outside through a link.

    Example:
        >>> path_inside(Path("out"), "../.bashrc", source="part-00000.json")
        Traceback (most recent call last):
        cribo.errors.InputError: part-00000.json refers to '../.bashrc', which is not inside out: ...
    """
    if isinstance(name, str) and name and "\0" not in name:
        resolve = os.path.abspath if follow_links else os.path.realpath
        path, home = Path(folder, name), Path(resolve(folder))
        place = Path(resolve(path))
        if not Path(name).is_absolute() and place != home and place.is_relative_to(home):
            return path
    raise InputError(
        f"{source} refers to {name!r}, which is not inside {folder}: paths in files must be relative and lead to files "
        "below their folder; create the file again"
    )


def write_beside(path: Path, write: Callable[[Path], object]) -> Path:
    """Write and sync a file under a temporary name in the folder of `path`; remove it on failure.

    For several files that belong together: write each to a temporary path, then move them all.

    Returns:
        The temporary path, which the caller must move into place or remove.
    """
    temporary = _beside(path)
    try:
        with _naming(path):
            mode = _create(temporary)
            write(temporary)
            temporary.chmod(mode)
            sync(temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise errors of a full disk as OSError with the path that was written, also those of libraries."""
    try:
        yield
    except Exception as error:
        if isinstance(error, InputError) or (full := full_disk(error)) is None:
            raise
        raise OSError(full.errno, os.strerror(full.errno or 0), str(path)) from error


def write_folder_whole(folder: Path, write: Callable[[Path], object], *, replaces: bool = False) -> None:
    """Write a folder as a whole: readers see the old folder or the new one.

    Args:
        folder: to write.
        write: called with a temporary folder in the same parent folder, to which it writes the files.
        replaces: whether a non-empty folder is replaced once the new one is complete.

    Raises:
        FolderError: the folder is not empty and `replaces` is not set; or the folders cannot be exchanged, in which
            case the message names the folder of the new results.
        OSError: writing failed; the old folder is unchanged and the temporary folder is removed.
    """
    if not replaces and folder.is_dir() and any(folder.iterdir()):
        raise FolderError(f"{folder} already exists: choose another folder")
    part = _beside(folder)
    try:
        with _naming(folder):
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
        raise
    try:
        _exchange(folder, part, replaces=replaces)
    except OSError as error:
        raise FolderError(f"cannot write {folder} ({error}): the complete results are in {part}") from error


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
    shutil.rmtree(old, ignore_errors=True)


def _beside(path: Path) -> Path:
    """Return a temporary name in the same folder."""
    start = os.fsencode(path.name)[:_LONGEST].decode(errors="ignore")
    return path.with_name(f".{start}.{uuid.uuid4().hex}.part")


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
