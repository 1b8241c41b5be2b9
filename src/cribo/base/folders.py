"""Result folders: checked before any work, and replaced only by complete results of the same kind."""

import contextlib
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from cribo.base.errors import FolderError, InputError
from cribo.base.files import path_inside, read_json, write_folder_whole, write_json

MARKER = "cribo.json"
"""The file that names the kind of the results in a folder, and the version that wrote them."""


class ResultFolder:
    """A folder for results.

    An existing folder is replaced only on request, as a whole, and only if its marker names the same kind of results.
    New results are written to a temporary folder, which is then exchanged with the old one. Nothing else is deleted.
    The constructor checks these conditions without changing any file.

    Args:
        path: of the folder.
        kind: of the results, such as "search".
        numbered: use the first of `path`, `path-2`, `path-3`, ... that does not exist.
        overwrite: replace results of this kind.
        resume: keep results of this kind.
        known_by: name of a file that identifies resumable results of earlier versions, which have no marker.
        inputs: input files and folders, which must not lie in the folder; paths that do not exist are ignored.
        advice: what to do if the folder exists, as the end of an error message.

    Attributes:
        path: of the folder; for a numbered folder, set by `create`.
        resumes: whether existing results are kept.
        replaces: whether existing results are replaced.

    Raises:
        FolderError: the folder is not empty and neither `overwrite` nor `resume` is set; contains other files, an
            input or the current folder; is a file, a symbolic link or a mounted volume; or is not writable.

    Example:
        >>> folder = ResultFolder(getfixture("tmp_path") / "out", "search").create(
        ...     lambda part: (part / "sheet.png").touch()
        ... )
        >>> sorted(path.name for path in folder.iterdir())
        ['cribo.json', 'sheet.png']
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        *,
        numbered: bool = False,
        overwrite: bool = False,
        resume: bool = False,
        known_by: str | None = None,
        inputs: Iterable[str | os.PathLike[str] | None] = (),
        advice: str = "choose another --out, or replace it with --overwrite",
    ) -> None:
        if path.parts and re.fullmatch(r"\w{2,}:", path.parts[0]):
            raise FolderError(f"--out {path} is a URL: results are written to a folder; copy them afterwards")
        path = path.expanduser()
        self.path = path.resolve() if ".." in path.parts else path  # the last part must be a name
        self.kind, self.numbered = kind, numbered
        self.resumes = self.replaces = False
        try:
            require_writable(path.parent if numbered else path)
            if numbered:
                return
            _require_outside(path, inputs)
            found = result_kind(path)
            legacy = found is None and known_by is not None and (path / known_by).is_file()
            self.resumes = resume and (found == kind or legacy)
            if not self.resumes:
                _require_replaceable(path)
            if self.resumes or not path.exists() or not any(path.iterdir()):
                return
            self.replaces = overwrite
        except OSError as error:
            raise _not_writable(path, error) from error
        why = f"has no {MARKER}: not created by cribo" if found is None else f"contains {found} results"
        if found != kind and overwrite:
            raise FolderError(f"{path} {why}, refusing to replace it with {kind} results")
        if found != kind and not legacy:
            raise FolderError(f"{path} already exists and {why}; choose another folder")
        if not overwrite:
            raise FolderError(f"{path} already exists: {advice}")

    def create(self, write: Callable[[Path], object] = lambda folder: None) -> Path:
        """Write the folder and move it into place once it is complete.

        Args:
            write: called with a temporary folder, to which it writes the files. By default it writes none, for work
                that continues in the folder itself.

        Raises:
            FolderError: the folder is not writable.
        """

        def marked(part: Path) -> None:
            write_json(part / MARKER, {"made_by": "cribo", "version": version("cribo-ssl"), "kind": self.kind})
            write(part)

        if self.numbered:
            self.path = _make_numbered(self.path)
        try:
            write_folder_whole(self.path, marked, replaces=self.replaces)
        except BaseException:
            if self.numbered:
                with contextlib.suppress(OSError):
                    self.path.rmdir()  # removes it only if it is empty
            raise
        return self.path


def named_folder(out: str | os.PathLike[str], name: str) -> Path:
    """Return the folder of results with a name, below their parent folder.

    Raises:
        FolderError: the name leads out of the parent folder, such as `../up`.

    Example:
        >>> named_folder("runs", "mine").as_posix()
        'runs/mine'
    """
    try:
        return path_inside(Path(out), name, source="--name", follow_links=True)
    except InputError as error:
        raise FolderError(
            f"--name must be a folder below --out {out}, got {name!r}: give its parent folder as --out"
        ) from error


def lock_writer(folder: Path, name: str = ".lock", *, command: str, advice: str) -> FileLock:
    """Lock an existing folder for one writer, until the end of a `with` statement.

    Args:
        folder: the folder; on a shared file system, the lock holds on all machines.
        name: name of the lock file.
        command: that writes, for the message.
        advice: what else to do, as the end of the message.

    Raises:
        FolderError: another process holds the lock, or the folder is not writable.
    """
    try:
        # The operating system releases the lock when the process ends, even if it is killed.
        lock = FileLock(folder / name)
        lock.acquire(timeout=0)
        return lock
    except Timeout as error:
        raise FolderError(
            f"another {command} is writing to {folder}: wait until it has finished, stop it, or {advice}"
        ) from error
    except OSError as error:
        raise FolderError(f"cannot write to {folder}: {error.strerror or error}; {advice}") from error


def lock_replaced(target: ResultFolder, *, command: str) -> AbstractContextManager[object]:
    """Lock results that a `ResultFolder` replaces, until the end of a `with` statement; see `lock_writer`."""
    advice = "choose another --out"
    return lock_writer(target.path, command=command, advice=advice) if target.replaces else contextlib.nullcontext()


def require_same(
    file: Path,
    find_changes: Callable[[], Iterable[str]],
    *,
    advice: str = "Choose another --out, or replace it with --overwrite",
) -> None:
    """Require that results to resume were created with the same inputs.

    Args:
        file: file in the folder of the results that describes the inputs.
        find_changes: reads the file, and returns what has changed as text; an error means that the file is damaged.
        advice: what to do if anything has changed, as the end of an error message.

    Raises:
        FolderError: inputs differ, and the message names them; or the file is damaged.

    Example:
        >>> require_same(Path("out/about.json"), lambda: describe_changes({"size": 448}, {"size": 224}))
        Traceback (most recent call last):
        cribo.base.errors.FolderError: out was created with different inputs and cannot be resumed: size was ...
    """
    try:
        changes = list(find_changes())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FolderError(f"{file} is damaged: choose another --out, or replace it with --overwrite") from error
    if changes:
        raise FolderError(
            f"{file.parent} was created with different inputs and cannot be resumed: {'; '.join(changes)}. {advice}"
        )


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield each value that has changed as text; a missing value equals None."""
    for name in dict.fromkeys((*before, *now)):
        if before.get(name) != now.get(name):
            yield f"{name} was {before.get(name, 'not given')}, is {now.get(name, 'not given')}"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted names.

    Example:
        >>> flat({"k": 50, "optim": {"lr": 0.1}})
        {'k': 50, 'optim.lr': 0.1}
    """
    result: dict[str, Any] = {}
    for name, value in values.items():
        result |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return result


def read_finished(folder: Path, kind: str, about: str) -> dict[str, Any]:
    """Read the description of finished results.

    Args:
        folder: the folder of the results.
        kind: of the results.
        about: name of the file that describes them.

    Raises:
        FolderError: the folder contains other results, they are not finished, or the file is damaged.
    """
    if (found := result_kind(folder)) != kind:
        contains = "no results of cribo" if found is None else f"{found} results"
        raise FolderError(f"{folder} contains {contains}, not {kind} results: give results of one kind")
    try:
        path = folder / about
        content = read_json(path) if path.is_file() else {"finished": False}
        finished = content["finished"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FolderError(f"{folder / about} is damaged: repeat the command of {folder} with --overwrite") from error
    if not finished:
        raise FolderError(f"{folder} is not finished: repeat its command with --resume")
    return content


def result_kind(folder: Path) -> str | None:
    """Return the kind of the results in a folder, or None if there are none that cribo wrote with a marker."""
    try:
        content = read_json(folder / MARKER)
        return content["kind"] if content["made_by"] == "cribo" else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _require_outside(path: Path, inputs: Iterable[str | os.PathLike[str] | None]) -> None:
    for given in filter(None, inputs):
        place = Path(given).expanduser()
        if place.exists() and place.resolve().is_relative_to(path.resolve()):
            raise FolderError(f"the input {given} is inside the results folder {path}: choose another --out")


def _require_replaceable(path: Path) -> None:
    """Raise an error for folders that cannot be exchanged with another."""
    if path.is_symlink():
        raise FolderError(
            f"{path} is a symbolic link, which would be replaced: give the folder itself, {path.resolve()}"
        )
    if Path.cwd().is_relative_to(path.resolve()):
        raise FolderError(f"{path} contains the current folder, which cannot be replaced: choose a folder in it")
    if path.resolve().is_mount():
        raise FolderError(f"{path} is a mounted volume, which cannot be replaced: choose a folder in it")
    require_writable(path.parent)


def require_writable(path: Path, option: str = "--out") -> None:
    """Raise an error that names the option if a folder is not writable or cannot be created."""
    for folder in (path, *path.parents):
        if folder.is_dir():
            _try_writing(folder, option)
            return
        if folder.exists():
            raise FolderError(f"{folder} is a file, not a folder: choose another {option}")


def _try_writing(folder: Path, option: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_writable(folder, error, option) from error


def _not_writable(path: Path, error: OSError, option: str = "--out") -> FolderError:
    return FolderError(f"cannot write to {path}: {error.strerror}; choose another {option}")


def _make_numbered(path: Path) -> Path:
    """Create the first of the folders `path`, `path-2`, ... that does not exist; safe against concurrent calls."""
    for number in itertools.count(1):
        folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise _not_writable(path.parent, error) from error
        return folder
    raise AssertionError("unreachable")
