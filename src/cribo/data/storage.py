"""Where shards lie: a folder, or object storage whose shards pass through a bounded folder on this machine."""

import errno
import hashlib
import logging
import os
import posixpath
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar
from urllib.parse import quote

from filelock import FileLock, Timeout

from cribo.data.images import DataError, MissingData
from cribo.errors import Stopped

log = logging.getLogger("cribo")
T = TypeVar("T")

SUFFIX = ".tar"
CACHE_DIR = "~/.cache/cribo/shards"
CACHE_GIB = 100.0

_BLOCK = 8 * 2**20  # of one request: large enough for throughput, small enough to notice a stall between two
_DOWNLOADS = 8  # at a time, of one process
_ROOM_SECONDS = 0.1


class ShardError(Stopped):
    """A shard that cannot be read although the collection could be opened; the message names it."""


@dataclass(frozen=True)
class Patience:
    """How long a storage that does not answer is waited for.

    Attributes:
        delays: seconds to wait after each failed attempt; one more attempt follows the last of them.
        stall: seconds without a byte after which an attempt counts as failed.
    """

    # Five minutes in sum: longer than a restart of a gateway, shorter than anybody wants to wait for a wrong key.
    delays: tuple[float, ...] = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)
    stall: float = 60.0

    def try_to(self, what: str, attempt: Callable[[], T]) -> T:
        """What `attempt` returns, as soon as it does.

        Raises:
            ShardError: what was asked for is not there, or every attempt failed; it begins with `what`.
        """
        for number, delay in enumerate((*self.delays, None), start=1):
            try:
                return attempt()
            except (ShardError, DataError, ImportError):
                raise
            except FileNotFoundError as error:  # waiting brings no file back
                raise ShardError(f"{what}: it is not there (any more)") from error
            except Exception as error:  # every storage has errors of its own
                said = f"{what}: {str(error) or type(error).__name__}"
                if delay is None:
                    raise ShardError(f"{said}; tried {number} times") from error
                log.warning("%s; attempt %d failed, the next one in %g s", said, number, delay)
                time.sleep(delay)
        raise AssertionError("the last attempt returns or raises")


def key_of(place: str) -> str:
    """The name of the folder in which something about a collection is kept."""
    return hashlib.sha256(os.fsencode(place)).hexdigest()[:16]


class ShardStore(Protocol):
    """Numbered tar files: what a `ShardedImages` reads from.

    Attributes:
        root: where they are, for messages.
        names: of the shards, in order.
        sizes: bytes of each.
        patience: with the storage.
    """

    root: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    patience: Patience

    def open(self, shard: int) -> BinaryIO:
        """A shard as a local file; raises ShardError."""
        ...

    def stream(self, shard: int) -> BinaryIO:
        """A shard to run through once, without keeping it; errors are the storage's own."""
        ...

    def prepare(self, shards: Sequence[int]) -> None:
        """Have these shards on this machine; raises ShardError."""
        ...


class LocalShards:
    """The tar files of a folder, or one tar file, as a ShardStore.

    Raises:
        DataError: there is none.
    """

    def __init__(self, path: str | os.PathLike[str], *, patience: Patience = Patience()) -> None:
        folder = Path(path).expanduser()
        single = folder.is_file()
        self.root = str(folder.parent if single else folder)
        self.patience = patience
        files = [folder] if single else _tars_of(folder)
        if not files:
            raise DataError(f"no shards in {folder}: looked for files that end in {SUFFIX}")
        self.names = tuple(file.name for file in files)
        self.sizes = tuple(file.stat().st_size for file in files)

    def open(self, shard: int) -> BinaryIO:
        """The shard's file."""
        path = Path(self.root, self.names[shard])
        # Network file systems fail for a moment, too.
        return self.patience.try_to(f"the shard {path}", lambda: path.open("rb", buffering=0))

    def stream(self, shard: int) -> BinaryIO:
        """The shard's file."""
        return Path(self.root, self.names[shard]).open("rb")

    def prepare(self, shards: Sequence[int]) -> None:
        """Nothing to do."""


def holds_tars(folder: Path) -> bool:
    """Whether tar files lie in a folder, not further below."""
    return bool(_tars_of(folder))


def _tars_of(folder: Path) -> list[Path]:
    return sorted(
        (path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith(".") and path.is_file()),
        key=lambda path: path.name,
    )


class RemoteShards:
    """The tar files below a URL that fsspec understands, as a ShardStore; read shards are kept in `cache`.

    Args:
        url: of the folder, such as s3://bucket/prefix; settings such as keys and endpoints come from the environment.
        cache: where shards are kept.
        patience: with the storage.

    Raises:
        DataError: there is no shard, or the URL's kind is not known.
        ImportError: the URL's kind needs a package that is not installed.
        ShardError: the storage does not answer.
    """

    def __init__(self, url: str, cache: "ShardCache", *, patience: Patience = Patience()) -> None:
        self.root = url.rstrip("/")
        self.cache = cache
        self.patience = patience
        self.key = key_of(self.root)
        self._system: tuple[int, Any] | None = None
        self._path = ""
        self.names, self.sizes = self._list()

    @property
    def folder(self) -> Path:
        """Where this collection's shards are kept."""
        return self.cache.folder / self.key

    def open(self, shard: int) -> BinaryIO:
        """The shard's file in the cache, where it is brought if it is not there."""
        name = self.names[shard]
        # quoted: an object's name may hold what no file's name may
        path = self.folder / quote(name, safe=" ")
        return self.cache.open(path, self.sizes[shard], lambda room: self._download(shard, room))

    def stream(self, shard: int) -> BinaryIO:
        """The shard, read ahead a block at a time."""
        return self._open(self.names[shard], block_size=2**20, cache_type="readahead")

    def prepare(self, shards: Sequence[int]) -> None:
        """Bring several shards at a time."""
        if len(shards) > 1:
            with ThreadPoolExecutor(min(_DOWNLOADS, len(shards))) as pool:
                for file in pool.map(self.open, shards):
                    file.close()

    def read_beside(self, name: str) -> bytes | None:
        """A whole file that lies beside the shards; None if there is none that can be read."""
        try:
            with self._open(name) as file:
                return file.read()
        except Exception:  # every storage has errors of its own; nothing depends on this file
            return None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_system": None}

    def _list(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        def listed() -> list[dict[str, Any]]:
            try:
                return self._fs().ls(self._path, detail=True)
            except FileNotFoundError as error:
                raise MissingData(f"there is nothing at {self.root}") from error

        entries = self.patience.try_to(self.root, listed)
        sizes = {
            name: int(entry["size"])
            for entry in entries
            if entry["type"] == "file" and (name := posixpath.basename(entry["name"])).endswith(SUFFIX)
        }
        names = tuple(sorted(name for name in sizes if not name.startswith(".")))
        if not names:
            raise DataError(
                f"no shards in {self.root}: looked for files that end in {SUFFIX}, found {len(entries)} others"
            )
        return names, tuple(sizes[name] for name in names)

    def _fs(self) -> Any:
        # One for each process: connections and event loops do not survive a fork.
        if self._system is None or self._system[0] != os.getpid():
            from fsspec.core import url_to_fs

            try:
                system, self._path = url_to_fs(self.root)
            except ImportError as error:
                raise ImportError(f"{self.root}: {error}; cribo-ssl[stream] brings what s3:// needs") from error
            except ValueError as error:
                raise DataError(f"{self.root}: {error}") from error
            self._system = os.getpid(), system
        return self._system[1]

    def _open(self, name: str, **options: Any) -> BinaryIO:
        system = self._fs()
        return system.open(f"{self._path}/{name}", "rb", **options)

    def _download(self, shard: int, room: "Room") -> Path:
        name, size = self.names[shard], self.sizes[shard]

        def attempt() -> Path:
            part = room(size)
            transfer = _Transfer(lambda: self._open(name, cache_type="none"), part, size)
            try:
                transfer.finish(self.patience.stall)
            except BaseException as error:
                part.unlink(missing_ok=True)
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise ShardError(
                        f"no room for the shard {name} in {self.cache.folder}: lower data.cache_gib, or name another "
                        "data.cache_dir"
                    ) from error
                raise
            return part

        return self.patience.try_to(f"the shard {self.root}/{name}", attempt)


class _Transfer(threading.Thread):
    """One attempt at bringing a file here; a thread, since a storage that has stalled cannot be interrupted."""

    def __init__(self, source: Callable[[], BinaryIO], target: Path, size: int) -> None:
        super().__init__(daemon=True, name=f"transfer of {target.name}")
        self._source, self._target, self._size = source, target, size
        self._error: BaseException | None = None
        self._abandoned = False
        self._moved = time.monotonic()

    def finish(self, stall: float) -> None:
        """Run to the end; raises what went wrong, TimeoutError if nothing came for `stall` seconds."""
        self.start()
        while self.is_alive():
            self.join(min(1.0, stall))
            if self.is_alive() and time.monotonic() - self._moved > stall:
                self._abandoned = True
                raise TimeoutError(f"no byte for {stall:g} s")
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Copy; what goes wrong is kept for `finish`."""
        try:
            self._copy()
        except BaseException as error:
            self._error = error

    def _copy(self) -> None:
        received = 0
        with self._target.open("r+b") as target, self._source() as source:
            while received < self._size and not self._abandoned:
                block = source.read(min(_BLOCK, self._size - received))
                if not block:
                    raise OSError(f"it ended after {received} of {self._size} bytes")
                target.write(block)
                received += len(block)
                self._moved = time.monotonic()


Room = Callable[[int], Path]
"""Makes room in the cache for so many bytes: an empty file to write them to."""


class ShardCache:
    """Shards on this machine: those used last, within a limit, for all processes that name the same folder.

    A shard stands under its name only when it is whole. Who brings one locks it, so that the others wait and nobody
    brings it twice; the bytes on the way count. An evicted shard stays readable for who has it open.

    Args:
        folder: to keep them in, made when it is needed.
        limit_bytes: of all shards in it together.
    """

    def __init__(
        self, folder: str | os.PathLike[str] = CACHE_DIR, *, limit_bytes: int = int(CACHE_GIB * 2**30)
    ) -> None:
        self.folder = Path(folder).expanduser()
        self.limit_bytes = limit_bytes

    def open(self, path: Path, size: int, bring: Callable[[Room], Path]) -> BinaryIO:
        """A shard that is kept, or is brought now.

        Args:
            path: its place.
            size: bytes that it must have; one of another size is brought again.
            bring: gets a function that makes room, and gives the file that it wrote there.

        Raises:
            ShardError: what `bring` raises; there can be no room; the folder cannot be written to.
        """
        file = _opened(path, size)
        if file is not None:
            return file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _lock_of(path):
                file = _opened(path, size)  # brought while this process waited for the lock
                if file is None:
                    bring(lambda bytes_: self._room(path, bytes_)).replace(path)
                    # Opened before others may evict it.
                    file = path.open("rb", buffering=0)
                return file
        except OSError as error:
            raise ShardError(f"cannot keep shards in {self.folder}: {error}; name another data.cache_dir") from error

    def _room(self, path: Path, size: int) -> Path:
        if size > self.limit_bytes:
            raise ShardError(
                f"the shard {path.name} has {size / 2**30:.3g} GiB, more than the cache may hold: raise "
                f"data.cache_gib, now {self.limit_bytes / 2**30:.3g}"
            )
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
        while True:
            with FileLock(self.folder / ".room.lock"):
                if self._evict(size):
                    with part.open("wb") as file:
                        file.truncate(size)  # so that the others count it from now on
                    return part
            time.sleep(_ROOM_SECONDS)  # all that is left is on its way: it can go when it has come

    def _evict(self, size: int) -> bool:
        """Remove what was used longest ago until `size` more bytes fit; False if they do not, for now."""
        kept = sorted(_kept(self.folder), key=lambda file: file[1].st_mtime)
        used = sum(status.st_size for _, status in kept)
        for file, status in kept:
            if used + size <= self.limit_bytes:
                break
            if file.suffix == ".part" and not _abandoned(file):
                continue
            try:
                file.unlink()
                used -= status.st_size
            except FileNotFoundError:  # a partial one that has become whole: count again
                return False
            except PermissionError:  # Windows keeps what somebody has open
                continue
        return used + size <= self.limit_bytes


def _opened(path: Path, size: int) -> BinaryIO | None:
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        return None
    if os.fstat(file.fileno()).st_size != size:  # of a shard that has been replaced since
        file.close()
        return None
    with suppress(OSError):
        os.utime(path)  # by which the cache knows what was used last; access times are often switched off
    return file


def _kept(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    # What becomes whole meanwhile may count twice, but it is not missed.
    for pattern in ("*/*.part", f"*/*{SUFFIX}"):
        for path in folder.glob(pattern):
            try:
                yield path, path.stat()
            except FileNotFoundError:  # removed meanwhile
                continue


def _lock_of(path: Path, timeout: float = -1) -> FileLock:
    return FileLock(path.with_name(f"{path.name}.lock"), timeout=timeout)


def _abandoned(part: Path) -> bool:
    """Whether nobody is bringing the shard that a partial file is of: its process was killed."""
    shard = part.with_name(part.name.rsplit(".", 2)[0])
    try:
        with _lock_of(shard, timeout=0):
            return True
    except Timeout:
        return False


@contextmanager
def only_one(folder: Path, name: str) -> Iterator[None]:
    """Have the processes of this machine do something one after another."""
    with FileLock(folder / f".{name}.lock"):
        yield
