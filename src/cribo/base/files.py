"""Atomic writing of files and folders."""

import contextlib
import difflib
import errno
import io
import json
import os
import re
import shutil
import stat
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from cribo.base.errors import Damaged, DataError, FolderError, InputError, MissingData, full_disk
from cribo.base.redaction import masked, without_secrets
from cribo.base.wording import enumerated

if TYPE_CHECKING:
    from filelock import FileLock  # slow to import for --help

# Temporary names of `write_beside`.
_LONGEST = 100  # bytes of the name in a temporary name: names have at most 255, on some file systems 143
_PART = re.compile(r"\..*\.[0-9a-f]{32}\.part")


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


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of `append_json`, without the incomplete line of a killed process; empty without a file."""
    found: list[dict[str, Any]] = []
    if not path.is_file():
        return found
    with path.open(encoding="utf-8", errors="replace") as file:  # with a line for each image, it may be large
        while line := file.readline(TEXT_BYTES):
            with contextlib.suppress(ValueError):
                found.append(parse_json(line))
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


def nearest_path(path: Path) -> Path | None:
    """Return the path in the same folder whose name is most similar to a misspelled one; None without a similar one.

    Example:
        >>> folder = getfixture("tmp_path")
        >>> (folder / "mine.pth").touch()
        >>> nearest_path(folder / "mine.pht").name
        'mine.pth'
    """
    with contextlib.suppress(OSError):
        there = sorted(entry.name for entry in path.parent.iterdir() if not entry.name.startswith("."))
        return next((path.with_name(name) for name in difflib.get_close_matches(path.name, there, n=1)), None)
    return None


def matching_files(pattern: Path) -> tuple[Path, list[Path]]:
    """Return the folder above the first wildcard of a pattern, and the files that match, sorted.

    Folders that exist are not wildcards, such as `photos [1]` in `photos [1]/*.jpg`.

    Example:
        >>> folder = getfixture("tmp_path") / "photos [1]"
        >>> folder.mkdir()
        >>> (folder / "a.jpg").touch()
        >>> [path.name for path in matching_files(folder / "*.jpg")[1]]
        ['a.jpg']
    """
    folder, rest = Path(), list(pattern.parts)
    while len(rest) > 1 and (not {"*", "?", "["} & set(rest[0]) or (folder / rest[0]).is_dir()):
        folder /= rest.pop(0)
    return folder, sorted(path for path in folder.glob(str(Path(*rest))) if path.is_file())


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
        cribo.base.errors.InputError: part-00000.json refers to '../.bashrc', which is not inside out: ...
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


def _lock_part(part: Path) -> "FileLock | None":
    """Lock a temporary folder while it is incomplete; None on a file system without locks."""
    from filelock import FileLock

    part.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(_lock_file(part))
    try:
        lock.acquire()
    except (OSError, NotImplementedError):
        return None
    return lock


def _unlock_part(part: Path, lock: "FileLock | None") -> None:
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
    from filelock import FileLock, Timeout

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


TEXT_BYTES, YAML_BYTES = 64 * 2**20, 2**18
"""Largest text file that is read at once, and largest YAML, which takes a few seconds to parse."""

ARCHIVE_BYTES = 2**30
"""Largest size of an `.npz` archive once unpacked, unless the file itself is more than an eighth of that."""

_YAML_VALUES = 100_000


def read_text(path: Path, *, limit_bytes: int = TEXT_BYTES, errors: str = "strict") -> str:
    """Read a text file, which may be from a stranger: a regular file of limited size.

    Args:
        path: of the file.
        limit_bytes: maximum size.
        errors: what to do with bytes that are not UTF-8, as for `bytes.decode`.

    Raises:
        DataError: it is a pipe or a device, or is too large.
        UnicodeDecodeError: it is not UTF-8.
        OSError: it cannot be read.
    """
    return _read_bytes(path, limit_bytes).decode("utf-8", errors)


def read_lines(path: Path, what: str) -> list[tuple[int, str]]:
    """Return the number and text of each line of a text file that is not blank, without surrounding spaces.

    Args:
        path: of the file.
        what: what the file is, for the message.

    Raises:
        DataError: it is not UTF-8 text.
    """
    try:
        # utf-8-sig: without it, a byte-order mark would become part of the first line.
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not {what}: it is not UTF-8 text") from error
    return [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]


def require_regular(path: Path) -> None:
    """Check that a file which may be from a stranger is no pipe or device, which might never end.

    Raises:
        DataError: it is a folder, pipe or device.
        OSError: it does not exist.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise DataError(f"{path} is not a regular file, but a folder, pipe or device: replace it by a file")


def _read_bytes(path: Path, limit_bytes: int | None) -> bytes:
    """Read a regular file."""
    require_regular(path)
    with path.open("rb") as file:
        # Reading one more byte reveals a file that is too large or still growing.
        content = file.read(-1 if limit_bytes is None else min(limit_bytes, path.stat().st_size) + 1)
    if limit_bytes is not None and len(content) > limit_bytes:
        raise DataError(f"{path} is larger than {limit_bytes} bytes, the limit for its kind: shorten it")
    return content


def read_json(path: Path, *, limit_bytes: int | None = TEXT_BYTES) -> Any:
    """Read a JSON file, which may be from a stranger: UTF-8, UTF-16 or UTF-32, also with a byte-order mark.

    Numbers may be infinite or not a number, which is for callers to check.

    Args:
        path: of the file.
        limit_bytes: maximum size; None for data of a user, such as annotations.

    Raises:
        MissingData: the file does not exist.
        DataError: it cannot be read, is a pipe or a device, is too large, is not JSON or incomplete, or is nested too
            deeply.
    """
    try:
        return parse_json(_read_bytes(path, limit_bytes))
    except FileNotFoundError as error:
        raise MissingData(f"{path} does not exist") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except DataError:
        raise
    except ValueError as error:
        raise DataError(
            f"{path} is not valid JSON ({error}): it may be damaged or incomplete; download or create it again"
        ) from error


def parse_json(text: str | bytes) -> Any:
    """Parse JSON, which may be from a stranger.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise InputError("it is nested too deeply") from error


def parse_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Parse YAML, which may be from a stranger.

    Raises:
        InputError: the text is too long, is nested too deeply, contains itself, or becomes too large by its aliases.
        yaml.YAMLError: the text is not YAML.
    """
    if len(text) > YAML_BYTES:
        raise InputError(f"it has {len(text)} characters, the limit is {YAML_BYTES}")
    reader = loader(text)
    try:
        root = reader.get_single_node()
        if root is None:
            return None
        if _count_values(root, {}) > _YAML_VALUES:
            raise InputError(f"its aliases make more than {_YAML_VALUES} values")
        return reader.construct_document(root)
    except RecursionError as error:
        raise InputError("it is nested too deeply") from error
    except ValueError as error:  # a date such as 2020-99-99
        raise InputError(str(error)) from error
    finally:
        reader.dispose()


def _count_values(node: yaml.Node, counts: dict[yaml.Node, int]) -> int:
    """Count the values of a node, those behind aliases each time; a node that contains itself recurses."""
    if node not in counts:
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        children = (each for pair in inner for each in (pair if isinstance(pair, tuple) else (pair,)))
        counts[node] = 1 + sum(_count_values(child, counts) for child in children)
    return counts[node]


@contextlib.contextmanager
def open_arrays(file: Path | io.BytesIO) -> Iterator[Any]:
    """Open an `.npz` archive of NumPy, which may be from a stranger: arrays of numbers, of limited size once unpacked.

    Args:
        file: its path, or its content.

    Yields:
        The arrays by name, which are read on access.

    Raises:
        DataError: its arrays are much larger than the file, or it is a pipe or a device.
        Exception: it cannot be read or is damaged, as for `numpy.load`.
    """
    import numpy as np

    if isinstance(file, Path):
        require_regular(file)
        size = file.stat().st_size
    else:
        size = file.getbuffer().nbytes
    with np.load(file, allow_pickle=False) as arrays:
        unpacked, limit = sum(entry.file_size for entry in arrays.zip.infolist()), max(ARCHIVE_BYTES, 8 * size)
        if unpacked > limit:
            raise DataError(
                f"{file if isinstance(file, Path) else 'the archive'} has {size} bytes, but {unpacked} unpacked, the "
                f"limit is {limit}: save it again with numpy.savez"
            )
        yield arrays


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
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise Damaged("it is compressed, which PyTorch does not write")
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise Damaged(f"truncated, damaged, or not a PyTorch file ({error})") from error
    if damaged is not None:
        raise Damaged(f"the checksum of {damaged} in the archive does not match")


def require(path: Path) -> None:
    """Raise MissingData if `path` does not exist, and suggest the nearest existing name."""
    if path.exists():
        return
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    parent = missing.parent
    message = f"there is no {missing.name!r} in {absolute_path(parent)}"
    if missing != path:
        message += f" (required: {path})"
    if not parent.is_dir():
        raise MissingData(f"{message}, which is a file")
    if {"*", "?"} & set(missing.name):
        raise MissingData(f"{message}, and patterns are not expanded: give a folder, or a .txt file that lists files")
    there = sorted(entry.name for entry in os.scandir(parent) if not entry.name.startswith("."))
    nearest = difflib.get_close_matches(missing.name, there, n=1, cutoff=0.5)
    if nearest:
        raise MissingData(f"{message}; did you mean {nearest[0]!r}?")
    if folders := [name for name in there if (parent / name).is_dir()]:
        raise MissingData(f"{message}; folders there: {enumerated(folders)}")
    raise MissingData(f"{message}; files there: {enumerated(there)}" if there else f"{message}, which is empty")


def absolute_path(path: Path) -> Path:
    """Return an absolute path without `..`."""
    return path.resolve() if ".." in path.parts else path.absolute()
