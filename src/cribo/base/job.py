"""The life of a result folder: checked before any work, locked, resumed, interrupted, finished and merged."""

import contextlib
import itertools
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from filelock import FileLock, Timeout

from cribo.base.errors import ConfigError, FolderError, InputError, if_interrupted
from cribo.base.files import (
    append_json,
    path_inside,
    read_json,
    read_json_lines,
    remove_parts,
    require,
    write_folder_whole,
    write_json,
    write_text,
)
from cribo.base.redaction import masked
from cribo.base.shares import Share, order_shares, require_mergeable

log = logging.getLogger("cribo")

RECORD = "cribo.json"
"""The file of a result folder that names its kind, the version that wrote it, and what its results depend on."""

ACCOUNTS = ".parts.jsonl"
"""The file of a result folder with the account of each part that is done, one line each."""

LOCK = ".lock"
_LOCKS = ".locks"

Part = TypeVar("Part")
Account = dict[str, Any]
"""What is known of a part that is done, as JSON types."""

Changes = Callable[[Mapping[str, Any], Mapping[str, Any]], Iterable[str]]
"""Returns the differences between two identities as text: those of existing results, and those of this command."""


@dataclass(frozen=True)
class Record:
    """What a result folder says of itself.

    Attributes:
        kind: of the results, such as "embedding".
        version: of cribo that began them.
        command: that began them.
        identity: what must be equal to resume them, as JSON types; None for results that are written at once.
        share: of the whole collection, as i/n.
        finished: whether they are complete; False also for those of versions that did not record it.
    """

    kind: str
    version: str = ""
    command: str = ""
    identity: Mapping[str, Any] | None = None
    share: str = "1/1"
    finished: bool = False


class Job:
    """A result folder and the work that fills it.

    The constructor checks what needs no work, and changes no file. Results that are written at once are written by
    `create`. Longer work is done in parts inside `open`, and can be interrupted at any time and resumed. If several
    processes do the parts at the same time, each calls `join` instead, and does those that it can `claim`.

    An existing folder is replaced only on request, as a whole, and only if its record names the same kind of results.
    New results are written to a temporary folder, which is then exchanged with the old one. Nothing else is deleted.

    Args:
        path: of the folder.
        kind: of the results, such as "search".
        numbered: use the first of `path`, `path-2`, `path-3`, ... that does not exist; or with `resume`, the last that
            contains results of this kind.
        resume: keep results of this kind; None for a command that cannot resume.
        overwrite: replace results of this kind.
        inputs: input files and folders, which must not lie in the folder; paths that do not exist are ignored.
        option: what to choose another of, --out or --name, for error messages.
        advice: what to do if the folder exists, for error messages. [from the other arguments]

    Attributes:
        path: of the folder; a numbered folder has none before `create` or `open`.
        resumes: whether existing results are kept.
        replaces: whether existing results are replaced.

    Raises:
        ConfigError: `overwrite` is set with `resume` or `numbered`.
        FolderError: the folder is not empty and neither `overwrite` nor `resume` is set; contains other files, an
            input or the current folder; is a file, a symbolic link or a mounted volume; or is not writable.

    Example:
        >>> out = getfixture("tmp_path") / "out"
        >>> with Job(out, "squares").open({"power": 2}) as job:
        ...     for number in job.missing([1, 2, 3]):
        ...         job.done(number, square=number**2)
        ...     job.finish()
        >>> with Job(out, "squares", resume=True).open({"power": 3}) as job:
        ...     pass
        Traceback (most recent call last):
        cribo.base.errors.FolderError: ... cannot be resumed: power was 2, is 3. ...
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        *,
        numbered: bool = False,
        resume: bool | None = None,
        overwrite: bool = False,
        inputs: Iterable[str | os.PathLike[str] | None] = (),
        option: str = "--out",
        advice: str | None = None,
    ) -> None:
        if overwrite and (resume or numbered):
            why = "cannot be combined with --resume" if resume else f"requires {option}: without it, a folder is new"
            raise ConfigError(f"--overwrite {why}")
        if path.parts and re.fullmatch(r"\w{2,}:", path.parts[0]):
            raise FolderError(f"{option} {path} is a URL: results are written to a folder; copy them afterwards")
        path = path.expanduser()
        if numbered and resume and (last := _last_numbered(path, kind)) is not None:
            path, numbered = last, False
        self._path = path.resolve() if ".." in path.parts else path  # the last part must be a name
        self.kind, self.numbered, self.option = kind, numbered, option
        self.resumes = self.replaces = False
        self.accounts: dict[str, Account] = {}
        self._record = Record(kind, finished=True)
        self._every: list[str] = []
        self._unit = "parts"
        try:
            require_writable(path.parent if numbered else path)
            if numbered:
                return
            _require_outside(path, inputs, option)
            found = result_kind(path)
            self.resumes = bool(resume) and found == kind
            if self.resumes:
                self.accounts = _read_accounts(path)
            else:
                _require_replaceable(path)
            if self.resumes or not path.exists() or not any(path.iterdir()):
                return
            self.replaces = overwrite
        except OSError as error:
            raise _not_writable(path, error) from error
        why = f"has no {RECORD}: not created by cribo" if found is None else f"contains {found} results"
        if found != kind and overwrite:
            raise FolderError(f"{path} {why}, refusing to replace it with {kind} results")
        if found != kind:
            raise FolderError(f"{path} already exists and {why}; choose another folder")
        if not overwrite:
            resume_it = "" if resume is None else ", resume it with --resume"
            advice = advice or f"choose another {option}{resume_it}, or replace it with --overwrite"
            raise FolderError(f"{path} already exists: {advice}")

    @property
    def path(self) -> Path:
        """The folder."""
        if self.numbered:
            raise RuntimeError(f"the number of the folder {self._path} is not known yet")
        return self._path

    def create(self, write: Callable[[Path], object] = lambda folder: None) -> Path:
        """Write the folder and move it into place once it is complete.

        Args:
            write: called with a temporary folder, to which it writes the files.

        Raises:
            FolderError: the folder is not writable, or another process is writing to the one that is replaced.
        """

        def recorded(part: Path) -> None:
            self._write_record(part)
            write(part)

        is_new = self.numbered
        if is_new:
            self._path, self.numbered = _make_numbered(self._path), False
        try:
            with (
                locked(self.path, otherwise=f"choose another {self.option}")
                if self.replaces
                else contextlib.nullcontext()
            ):
                write_folder_whole(self.path, recorded, replaces=self.replaces)
        except BaseException:
            if is_new:
                with contextlib.suppress(OSError):
                    self.path.rmdir()  # removes it only if it is empty
            raise
        return self.path

    @contextmanager
    def open(
        self,
        identity: Mapping[str, Any],
        *,
        command: str = "",
        share: str = "1/1",
        changes: Changes | None = None,
        again: Callable[[Path], str] = lambda path: "--resume",
        advice: str | None = None,
    ) -> Iterator[Self]:
        """Create the folder, or open the one that is resumed, and lock it until the end of a `with` statement.

        An interruption says how many parts are done, and how to continue. If nothing was done, an error of the user's
        input leaves no new folder.

        Args:
            identity: what must be equal to resume the results, by readable names.
            command: command line, to record.
            share: share of the whole collection, as i/n.
            changes: describes differences of the identity; by default, all values that differ.
            again: given the folder, returns the options to repeat the command with, to continue it.
            advice: what to do if the identity differs, as the end of the error.

        Raises:
            FolderError: the results to resume have another identity or share, or were begun by an earlier version;
                the record is damaged; or another process is writing to the folder.
        """
        now, owner = as_json(identity), os.getpid()
        with ExitStack() as after, ExitStack() as held:
            if not self.resumes:
                self._record = Record(self.kind, command=command, identity=now, share=share)
                self.create()
            held.enter_context(self._locked())
            if self.resumes:
                self._record = read_record(self.path, self.kind)
                self.accounts = _read_accounts(self.path)  # again, now that no other process adds to them
                self._require_same(now, share, changes or _flat_changes, advice)
                if self.accounts:
                    self._write_accounts(self.path)  # without the incomplete line of a killed process
                self._record = replace(self._record, identity=now, command=command)
                self._write_record(self.path)
            try:
                with if_interrupted(lambda: self.left(again(self.path))):
                    yield self
            except Exception as error:
                if os.getpid() != owner:  # in a forked process
                    raise
                if self._every and not isinstance(error, InputError):
                    log.warning("%s", self.left(again(self.path)))
                if isinstance(error, InputError) and not self.resumes:
                    self._remove_if_nothing_was_done(after)
                raise

    def join(
        self,
        identity: Mapping[str, Any],
        write: Callable[[Path], object] = lambda folder: None,
        *,
        changes: Changes | None = None,
        advice: str | None = None,
    ) -> None:
        """Create the folder, or use the one that another process has created, to share its parts with that process.

        Args:
            identity: what must be equal for all processes, by readable names.
            write: called with a temporary folder, to which it writes what all processes share; not called if the folder
                exists.
            changes: describes differences of the identity; by default, all values that differ.
            advice: what to do if the identity differs, as the end of the error.

        Raises:
            FolderError: the folder has another identity, or was created by an earlier version; its record is damaged;
                or it is not writable.
        """
        now = as_json(identity)
        if not self.resumes:
            self._record = Record(self.kind, identity=now)
            try:
                self.create(write)
            except FolderError:
                if result_kind(self.path) != self.kind:  # else another process has created it meanwhile
                    raise
        self._record, self.resumes = read_record(self.path, self.kind), True
        self._require_same(now, self._record.share, changes or _flat_changes, advice)

    @contextmanager
    def claim(self, part: object) -> Iterator[bool]:
        """Lock a part until the end of a `with` statement; yields False if another process has locked it."""
        (self.path / _LOCKS).mkdir(exist_ok=True)
        lock = FileLock(self.path / _LOCKS / str(part))
        try:
            lock.acquire(timeout=0)
            claimed = True
        except Timeout:
            claimed = False
        except NotImplementedError:  # the file system has no locks
            claimed = True
        try:
            yield claimed
        finally:
            lock.release()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for the lock of the joined processes, which one of them holds at a time, and hold it."""
        lock = FileLock(self.path / LOCK)
        with contextlib.suppress(NotImplementedError):  # the file system has no locks
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def missing(
        self, parts: Sequence[Part], is_whole: Callable[[Part], bool] = lambda part: True, *, unit: str = "parts"
    ) -> list[Part]:
        """Return the parts that are to be done.

        Args:
            parts: all parts, each recorded by its text.
            is_whole: whether the files of a part that was done are still there.
            unit: what a part is called in messages.
        """
        self._every, self._unit = [str(part) for part in parts], unit
        return [part for part in parts if str(part) not in self.accounts or not is_whole(part)]

    def done(self, part: object, **account: Any) -> None:
        """Record that a part is done, after its files are complete, with what is known of it, as JSON types."""
        if self._record.finished:
            self._set_finished(finished=False)
        append_json(self.path / ACCOUNTS, {"part": str(part), **account})
        self.accounts[str(part)] = account

    def finish(self) -> None:
        """Record that the results are complete, and remove temporary files of killed processes."""
        self._set_finished(finished=True)
        for folder in (self.path, *(path for path in self.path.rglob("*") if path.is_dir())):
            remove_parts(folder)

    def left(self, again: str = "--resume") -> str:
        """Return what an interruption leaves, and how to continue."""
        done = sum(name in self.accounts for name in self._every)
        kept = f"{done} of {len(self._every)} {self._unit} are done" if self._every else "what is done is kept"
        return f"{kept} in {self.path}; to continue, repeat the command with {again}"

    def merge(self, shares: Sequence["FinishedShare"], write: Callable[[Path], object], *, command: str = "") -> Path:
        """Write the results of all shares as if they were those of one command; see `finished_shares`.

        Args:
            shares: all shares, in order.
            write: called with a temporary folder, to which it writes the files.
            command: command line, to record.
        """
        first = shares[0].record
        self._record = replace(first, command=command, share=str(Share()), version="")
        self.accounts = {name: account for share in shares for name, account in share.accounts.items()}

        def joined(part: Path) -> None:
            self._write_accounts(part)
            write(part)

        return self.create(joined)

    @property
    def resumed_identity(self) -> Mapping[str, Any]:
        """Identity of the results that are resumed, empty for new ones; raises FolderError for a damaged record."""
        return (read_record(self.path, self.kind).identity or {}) if self.resumes else {}

    def _remove_if_nothing_was_done(self, after: ExitStack) -> None:
        if {path.name for path in self.path.iterdir()} <= {RECORD, LOCK}:
            (self.path / RECORD).unlink()
            after.callback(_remove_if_empty, self.path)  # once the lock is released

    def _locked(self) -> AbstractContextManager[None]:
        return locked(self.path, otherwise=f"choose another {self.option}")

    def _require_same(self, now: Mapping[str, Any], share: str, changes: Changes, advice: str | None) -> None:
        before = self._record.identity
        if before is None:
            raise FolderError(
                f"{self.path} was begun by cribo {self._record.version}, and this version cannot resume it: finish it "
                f"with that version, choose another {self.option}, or replace it with --overwrite"
            )
        found = [*describe_changes({"part": self._record.share}, {"part": share}), *changes(before, now)]
        if found:
            raise FolderError(
                f"{self.path} was created with different inputs and cannot be resumed: {'; '.join(found)}. "
                + (advice or f"Choose another {self.option}, or replace it with --overwrite")
            )

    def _write_accounts(self, folder: Path) -> None:
        lines = (json.dumps({"part": name, **account}) for name, account in self.accounts.items())
        write_text(folder / ACCOUNTS, "".join(f"{line}\n" for line in lines))

    def _set_finished(self, *, finished: bool) -> None:
        self._record = replace(self._record, finished=finished)
        self._write_record(self.path)

    def _write_record(self, folder: Path) -> None:
        record = {**asdict(self._record), "version": self._record.version or version("cribo-ssl")}
        write_json(folder / RECORD, {"made_by": "cribo", **record})


class FinishedShare(NamedTuple):
    """The finished results of a share of a collection, for `Job.merge`.

    Attributes:
        folder: of the results.
        record: what the folder says of itself.
        accounts: what is known of each part, by its text.
    """

    folder: Path
    record: Record
    accounts: dict[str, Account]

    @property
    def identity(self) -> Mapping[str, Any]:
        """What all shares have in common."""
        assert self.record.identity is not None
        return self.record.identity


def finished_shares(folders: Sequence[Path], kind: str, *, changes: Changes | None = None) -> list[FinishedShare]:
    """Return the results of all shares of one collection, in order.

    Raises:
        MissingData: a folder does not exist.
        FolderError: a folder contains other results, they are not finished or of an earlier version, or its record is
            damaged.
        ConfigError: shares are missing, repeated, or of different inputs.
    """
    for folder in folders:
        require(folder)
    records = [read_record(folder, kind) for folder in folders]
    names = [str(folder) for folder in folders]
    for name, record in zip(names, records, strict=True):
        if record.identity is None:
            raise FolderError(f"{name} was written by cribo {record.version}: repeat its command with --overwrite")
        if not record.finished:
            raise FolderError(f"{name} is not finished: repeat its command with --resume")
        assert records[0].identity is not None
        require_mergeable(names[0], name, [*(changes or _flat_changes)(records[0].identity, record.identity)])
    order = order_shares(names, [record.share for record in records])
    return [FinishedShare(folders[index], records[index], _read_accounts(folders[index])) for index in order]


def read_record(folder: Path, kind: str) -> Record:
    """Read the record of a result folder.

    Raises:
        FolderError: the folder contains other results, or the record is damaged.
    """
    if (found := result_kind(folder)) != kind:
        contains = "no results of cribo" if found is None else f"{found} results"
        raise FolderError(f"{folder} contains {contains}, not {kind} results: give results of one kind")
    content = read_json(folder / RECORD)
    names = {each.name for each in fields(Record)}
    record = Record(**{name: value for name, value in content.items() if name in names})
    if not isinstance(record.identity, Mapping | None) or not isinstance(record.share, str):
        raise FolderError(f"{folder / RECORD} is damaged: choose another folder, or replace it with --overwrite")
    return record


def _read_accounts(folder: Path) -> dict[str, Account]:
    return {each.pop("part"): each for each in read_json_lines(folder / ACCOUNTS) if "part" in each}


def result_kind(folder: Path) -> str | None:
    """Return the kind of the results in a folder, or None if there are none that cribo wrote with a record."""
    try:
        content = read_json(folder / RECORD)
        return content["kind"] if content["made_by"] == "cribo" else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def locked(folder: Path, name: str = LOCK, *, otherwise: str) -> Iterator[None]:
    """Lock an existing folder for one writer, until the end of a `with` statement or of the process.

    On a shared file system, the lock holds on all machines; a file system without locks causes a warning.

    Args:
        folder: the folder.
        name: name of the lock file.
        otherwise: what else to do if another process holds the lock, for the error.

    Raises:
        FolderError: another process holds the lock, or the folder is not writable.
    """
    path, owner = folder / name, os.getpid()
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except NotImplementedError:
        log.warning("cannot lock %s: make sure that no other process writes to it", folder)
    except (Timeout, RuntimeError) as error:  # RuntimeError: held by this process
        raise FolderError(
            f"{folder} is in use by another process: wait until it has finished, stop it, or {otherwise}"
        ) from error
    except OSError as error:
        raise FolderError(f"cannot write to {folder}: {error.strerror or error}; {otherwise}") from error
    own = path.stat() if path.exists() else None
    try:
        yield
    finally:
        if os.getpid() == owner:  # not in a forked process that raised an exception
            with contextlib.suppress(OSError):
                if own is not None and path.stat().st_ino == own.st_ino:  # the folder may have been replaced
                    path.unlink()
            lock.release()


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


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield each value that has changed as text; a missing value equals None."""
    for name in dict.fromkeys((*before, *now)):
        if before.get(name) != now.get(name):
            yield f"{name} was {before.get(name, 'not given')}, is {now.get(name, 'not given')}"


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as they are read from a record, without passwords."""
    return json.loads(json.dumps(masked(values)))


def _flat_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    return describe_changes(flat(before), flat(now))


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


def _require_outside(path: Path, inputs: Iterable[str | os.PathLike[str] | None], option: str) -> None:
    for given in filter(None, inputs):
        place = Path(given).expanduser()
        if place.exists() and place.resolve().is_relative_to(path.resolve()):
            raise FolderError(f"the input {given} is inside the results folder {path}: choose another {option}")


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


def _last_numbered(path: Path, kind: str) -> Path | None:
    """Return the last of the folders `path`, `path-2`, ... that contains results of a kind, if any."""
    pattern = re.compile(rf"{re.escape(path.name)}(-\d+)?")
    names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    numbers = {int((found[1] or "-1")[1:]): name for name in names if (found := pattern.fullmatch(name))}
    folders = (path.with_name(numbers[number]) for number in sorted(numbers, reverse=True))
    return next((folder for folder in folders if result_kind(folder) == kind), None)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # rmdir removes only empty folders
        folder.rmdir()
