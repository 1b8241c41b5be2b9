"""Files in folders and object storage, and shards with a bounded local cache."""

import errno
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from datetime import datetime
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, Self, TypeVar

from filelock import FileLock, Timeout

from cribo.base.errors import DataError, MissingData, MissingPackage, ShardError, Stopped
from cribo.base.packages import install_command
from cribo.base.redaction import is_masked, without_secrets
from cribo.data.reading import FileState
from cribo.data.sources.images import is_url, list_directly

log = logging.getLogger("cribo")
T = TypeVar("T")
Store = TypeVar("Store", "LocalShards", "RemoteShards")

SUFFIX = ".tar"
CACHE_DIR = "~/.cache/cribo/shards"
CACHE_GIB = 100.0

RETRY_DELAYS: tuple[float, ...] = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)
"""Seconds to wait after each failed attempt: five minutes in total, longer than a gateway takes to restart."""

ANSWER_SECONDS = 15.0
"""Seconds to wait for the first answer of a URL."""

_OPENING_DELAYS = (0.5, 1.0)  # a wrong address should be reported within seconds
_BLOCK = 8 * 2**20  # bytes per request
_ROOM_SECONDS = 0.1

# Names of the modification time in the listings of S3, folders, Google Cloud, Azure and memory.
_TIMES = ("LastModified", "mtime", "updated", "last_modified", "created")


def needs_ranges(error: Exception) -> bool:
    """Whether fsspec reports that an HTTP server sends whole files only."""
    return isinstance(error, ValueError) and "range requests" in str(error)


def retry(what: str, attempt: Callable[[], T]) -> T:
    """Call `attempt` until it succeeds, waiting `RETRY_DELAYS` between attempts.

    Raises:
        ShardError: the file does not exist, or every attempt failed; the message begins with `what`.
        OSError: the disk of this machine is full.
    """
    for number, delay in enumerate((*RETRY_DELAYS, None), start=1):
        try:
            return attempt()
        except (Stopped, DataError, ImportError):
            raise
        except FileNotFoundError as error:  # permanent
            raise ShardError(f"{what}: file not found; it may have been removed") from error
        except Exception as error:  # error classes depend on the storage
            if needs_ranges(error):
                raise ShardError(
                    f"{what}: the server does not support range requests (it sends whole files only): copy the files "
                    "to a folder, or use another server"
                ) from error
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # error of the cache, not of the storage
            message = f"{what}: {str(error) or type(error).__name__}"
            if delay is None:
                raise ShardError(f"{message}; tried {number} times") from error
            log.warning("%s; attempt %d failed, next attempt in %g s", message, number, delay)
            time.sleep(delay)
    raise AssertionError("the last attempt returns or raises")


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and its path there.

    Credentials and endpoints come from the environment.

    Raises:
        DataError: the URL's scheme is unknown, or its secrets are masked.
        ImportError: the URL's scheme needs a package that is not installed.
    """
    if is_masked(url):
        raise DataError(f"the credentials of {url} are not stored with results: give the complete URL again")
    # fsspec caches instances per process, since connections and event loops do not survive a fork.
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)
    except ImportError as error:
        raise MissingPackage(f"{url}: {error}; for s3:// and https://: {install_command('stream')}") from error
    except ValueError as error:
        raise DataError(f"{url}: {error}") from error


def require_answer(url: str) -> None:
    """Check within `ANSWER_SECONDS` that a URL exists and can be read.

    Raises:
        MissingData: it does not exist.
        DataError: access is denied, or the URL's scheme is unknown.
        ConnectionError: the storage does not answer.
        ImportError: the URL's scheme needs a package that is not installed.
    """
    system, path = file_system(url)
    answer: Future[None] = Future()

    def request() -> None:
        for delay in (*_OPENING_DELAYS, None):
            try:
                answer.set_result(system.info(path))
                return
            except Exception as error:
                if delay is None or isinstance(error, FileNotFoundError | PermissionError | ImportError):
                    answer.set_exception(error)
                    return
                time.sleep(delay)

    # Not a pool, which would wait for the thread at exit.
    Thread(target=request, daemon=True).start()
    advice = "check the address, the network, and the credentials and endpoint in the environment"
    try:
        answer.result(ANSWER_SECONDS)
    except FileNotFoundError as error:
        raise MissingData(f"{url} does not exist, or contains no files") from error
    except PermissionError as error:
        raise DataError(f"{url}: access denied ({error}); check the credentials in the environment") from error
    except ImportError:
        raise
    except Exception as error:  # error classes depend on the storage
        reason = str(error) or f"no answer within {ANSWER_SECONDS:g} s"
        raise ConnectionError(f"cannot open {url}: {reason}; {advice}") from error


def list_folder(url: str) -> tuple[dict[str, FileState], list[str]]:
    """List the visible files and folders directly below a URL.

    Returns:
        the states of the files and the names of the folders. A size is -1 if the storage does not list it.

    Raises:
        MissingData: the URL does not exist.
        ShardError: the storage failed repeatedly.
    """
    entries = _entries(url, lambda system, path: {entry["name"]: entry for entry in system.ls(path, detail=True)})
    files = {name: state_of(entry) for name, entry in entries.items() if entry["type"] == "file" and "/" not in name}
    return files, sorted(name for name, entry in entries.items() if entry["type"] == "directory")


def list_tree(url: str) -> dict[str, FileState]:
    """List the visible files at any depth below a URL; raises as `list_folder` does."""
    entries = _entries(url, lambda system, path: system.find(path, detail=True))
    return {name: state_of(entry) for name, entry in entries.items()}


def _entries(url: str, list_names: Callable[[Any, str], dict[str, Any]]) -> dict[str, Any]:
    """Return what `list_names` finds below a URL, by visible name relative to it."""
    system, path = file_system(url)

    def request() -> dict[str, Any]:
        system.invalidate_cache()  # s3fs would repeat an earlier listing
        return list_names(system, path)

    try:
        found = retry(url, request)
    except ShardError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise MissingData(f"{url} does not exist, or contains no files") from error
        raise
    above = path.rstrip("/") + "/"
    if url.startswith("http"):  # links to other orders of the listing
        found = {name: entry for name, entry in found.items() if "?" not in name}
    below = {name.removeprefix(above).rstrip("/"): entry for name, entry in found.items() if name.startswith(above)}
    return {name: entry for name, entry in below.items() if name and not f"/{name}".count("/.")}


def with_sizes(url: str, files: dict[str, FileState]) -> dict[str, FileState]:
    """Request the sizes that a listing, such as one over HTTP, does not contain; -1 if the server does not report it.

    Raises:
        ShardError: the storage failed repeatedly.
    """
    missing = [name for name, state in files.items() if state.size_bytes < 0]
    if not missing:
        return files
    system, path = file_system(url)
    sizes = retry(url, lambda: system.sizes([f"{path.rstrip('/')}/{name}" for name in missing]))
    found = zip(missing, sizes, strict=True)
    return {**files, **{name: FileState(-1 if size is None else size, files[name].mtime_ns) for name, size in found}}


def state_of(entry: Mapping[str, Any]) -> FileState:
    """Return the state of a file from an entry of fsspec; the size is -1 if it is unknown."""
    size, time_ns = entry.get("size"), 0
    for name in _TIMES:
        value = entry.get(name)
        if isinstance(value, str):  # Google Cloud
            value = datetime.fromisoformat(value)
        if value is not None:
            seconds = value.timestamp() if isinstance(value, datetime) else float(value)
            time_ns = round(seconds * 1e6) * 1000
            break
    return FileState(-1 if size is None else int(size), time_ns)


def read_file(location: str) -> bytes:
    """Return the content of a file, given its path or URL.

    Raises:
        OSError: the file does not exist, or cannot be read.
        ShardError: the storage of a URL failed repeatedly.
    """
    if not is_url(location):
        return Path(location).read_bytes()
    system, path = file_system(location)
    return _existing(location, lambda: system.cat_file(path))


def file_state(location: str) -> FileState:
    """Return size and modification time of a file, given its path or URL; raises as `read_file` does."""
    if not is_url(location):
        status = Path(location).stat()
        return FileState(status.st_size, status.st_mtime_ns)
    system, path = file_system(location)
    return state_of(_existing(location, lambda: system.info(path)))


_TEMPORARY = (408, 429)  # a timeout, too many requests


def _existing(location: str, request: Callable[[], T]) -> T:
    """Retry a request to the storage, but not for a file that is missing or forbidden."""

    def attempt() -> T | OSError:
        try:
            return request()
        except FileNotFoundError:
            # fsspec raises this error without a reason.
            return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), location)
        except (PermissionError, IsADirectoryError) as error:
            return error
        except Exception as error:
            status = getattr(error, "status", None)  # of an HTTP client
            if isinstance(status, int) and 400 <= status < 500 and status not in _TEMPORARY:
                return PermissionError(errno.EACCES, f"the server answers with status {status}", location)
            raise

    answer = retry(location, attempt)
    if isinstance(answer, OSError):
        raise answer
    return answer


class LocalShards:
    """The tar files of a folder, or a single tar file.

    Attributes:
        root: the folder.
        names: names of the shards, in order.
        sizes: size of each shard in bytes.
        mtimes_ns: modification time of each shard in nanoseconds since 1970; 0 if it is unknown.

    Raises:
        DataError: there are no tar files.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path).expanduser()
        files = [path] if path.is_file() else list_directly(path, SUFFIX)
        if not files:
            raise DataError(f"no shards in {path}: looked for files that end in {SUFFIX}")
        self.root = str((path.parent if path.is_file() else path).absolute())
        self.names = tuple(file.name for file in files)
        status = [file.stat() for file in files]
        self.sizes = tuple(one.st_size for one in status)
        self.mtimes_ns = tuple(one.st_mtime_ns for one in status)

    def part(self, shards: Sequence[int]) -> Self:
        """Return some of the shards."""
        return _part_of(self, shards)

    @property
    def index_folder(self) -> Path:
        """Folder for a new index: that of the shards, or the default cache folder if it is read-only."""
        if os.access(self.root, os.W_OK):
            return Path(self.root)
        return Path(CACHE_DIR).expanduser() / _key(os.path.realpath(self.root))

    def open(self, shard: int) -> BinaryIO:
        """Open a shard for random access."""
        return Path(self.root, self.names[shard]).open("rb", buffering=0)

    def stream(self, shard: int) -> BinaryIO:
        """Open a shard for one pass over its headers."""
        return Path(self.root, self.names[shard]).open("rb")

    def read_beside(self, name: str) -> bytes:
        """Return the content of another file in the folder of the shards."""
        return Path(self.root, name).read_bytes()


def _part_of(store: Store, shards: Sequence[int]) -> Store:
    """Return a copy of a store with some of its shards."""
    part = copy(store)
    part.names = tuple(store.names[shard] for shard in shards)
    part.sizes = tuple(store.sizes[shard] for shard in shards)
    part.mtimes_ns = tuple(store.mtimes_ns[shard] for shard in shards)
    return part


class RemoteShards:
    """The tar files below a URL supported by fsspec; `open` downloads them to a cache.

    Has the attributes and methods of `LocalShards`.

    Args:
        url: URL of the folder, such as s3://bucket/prefix; credentials and endpoints come from the environment.
        cache: cache for downloaded shards.

    Raises:
        DataError: there are no shards, or the URL's scheme is unknown.
        ImportError: the URL's scheme needs a package that is not installed.
        ShardError: the storage failed repeatedly.
    """

    def __init__(self, url: str, cache: "ShardCache") -> None:
        self.root = url.rstrip("/")
        self.cache = cache
        shards = self._list()
        self.names = tuple(sorted(shards))
        self.sizes = tuple(shards[name].size_bytes for name in self.names)
        self.mtimes_ns = tuple(shards[name].mtime_ns for name in self.names)

    def part(self, shards: Sequence[int]) -> Self:
        """Return some of the shards."""
        return _part_of(self, shards)

    @property
    def index_folder(self) -> Path:
        """Cache folder of this collection's shards and index."""
        return self.cache.folder / _key(self.root)

    def open(self, shard: int) -> BinaryIO:
        """Open a cached shard for random access, downloading it if needed; raises ShardError."""
        name, size = self.names[shard], self.sizes[shard]

        def fetch(part: Path) -> None:
            with self._open(name, cache_type="none") as source, part.open("r+b") as target:
                shutil.copyfileobj(source, target, _BLOCK)
                if target.tell() != size:
                    raise OSError(f"received {target.tell()} of {size} bytes")

        path = self.index_folder / name
        return self.cache.open(path, size, lambda part: retry(f"the shard {self.root}/{name}", lambda: fetch(part)))

    def stream(self, shard: int) -> BinaryIO:
        """Open a shard for one pass over its headers, without caching it; raises errors of the storage."""
        return self._open(self.names[shard], block_size=2**20, cache_type="readahead")

    def read_beside(self, name: str) -> bytes:
        """Return the content of another object below the URL; raises errors of the storage."""
        with self._open(name) as file:
            return file.read()

    def _list(self) -> dict[str, FileState]:
        """Return the state of each shard by name."""
        files, _ = list_folder(self.root)
        shards = {name: state for name, state in files.items() if name.endswith(SUFFIX)}
        if not shards:
            raise DataError(
                f"no shards in {self.root}: looked for files that end in {SUFFIX}, found {len(files)} others"
            )
        shards = with_sizes(self.root, shards)
        if any(state.size_bytes < 0 for state in shards.values()):
            raise DataError(f"{self.root}: the server does not report file sizes; copy the shards to a folder")
        return shards

    def _open(self, name: str, **options: Any) -> BinaryIO:
        system, path = file_system(self.root)
        return system.open(f"{path}/{name}", "rb", **options)


ShardStore = LocalShards | RemoteShards


def _key(place: str) -> str:
    return hashlib.sha256(os.fsencode(without_secrets(place))).hexdigest()[:16]  # a token may change


class ShardCache:
    """A folder of downloaded shards, bounded in bytes and shared by the processes of a machine.

    Each shard is downloaded by one process, under a lock, after its full size has been reserved, and renamed once
    complete. The least recently used shards are evicted first; processes that have an evicted shard open can still
    read it.

    Args:
        folder: folder of the cache, created when needed.
        limit_bytes: maximum total size of all shards; no single shard may exceed it.
    """

    def __init__(self, folder: str | os.PathLike[str], *, limit_bytes: int) -> None:
        self.folder = Path(folder).expanduser()
        self.limit_bytes = limit_bytes

    def open(self, path: Path, size: int, fetch: Callable[[Path], None]) -> BinaryIO:
        """Open a shard, downloading it if it is missing or its size differs.

        Args:
            path: path of the shard, in a sub-folder of the cache.
            size: size of the shard in bytes.
            fetch: writes the shard to the given file.

        Raises:
            ShardError: `fetch` raised it, or the folder is not writable.
        """
        try:
            file = _open_complete(path, size)
            if file is not None:
                return file
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(_lock_of(path)):
                file = _open_complete(path, size)  # another process may have downloaded it meanwhile
                if file is not None:
                    return file
                part = path.with_name(f"{path.name}.part")
                try:
                    path.unlink(missing_ok=True)
                    self._reserve(part, size)
                    fetch(part)
                    part.replace(path)
                finally:
                    part.unlink(missing_ok=True)
                return path.open("rb", buffering=0)  # under the lock, so that it cannot be evicted first
        except OSError as error:
            raise ShardError(
                f"cannot store shards in {self.folder}: {error}; lower data.cache_gib, or choose another data.cache_dir"
            ) from error

    def _reserve(self, part: Path, size: int) -> None:
        """Create a file of `size` bytes, evicting others as needed."""
        part.unlink(missing_ok=True)  # left by a killed process
        while True:
            with FileLock(self.folder / ".room.lock"):
                if self._evict(size):
                    with part.open("wb") as file:
                        file.truncate(size)
                    return
            time.sleep(_ROOM_SECONDS)  # shards in download can be evicted afterwards

    def _evict(self, size: int) -> bool:
        """Remove least recently used shards until `size` more bytes fit; return whether they fit."""
        found: list[tuple[float, int, Path]] = []
        # In this order, a shard completed meanwhile is counted twice, not missed.
        for pattern in ("*/*.part", f"*/*{SUFFIX}"):
            for path in self.folder.glob(pattern):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    found.append((status.st_mtime, status.st_size, path))
        used = sum(taken for _, taken, _ in found)
        for _, taken, path in sorted(found):
            if used + size <= self.limit_bytes:
                break
            # A locked shard is being downloaded; an unlocked partial file was left by a killed process.
            with suppress(Timeout, FileNotFoundError), FileLock(_lock_of(path), timeout=0):
                path.unlink()
                used -= taken
        return used + size <= self.limit_bytes


def _lock_of(path: Path) -> Path:
    """Return the path of the lock of a complete or partial shard."""
    return path.with_name(f"{path.name.removesuffix('.part')}.lock")


def _open_complete(path: Path, size: int) -> BinaryIO | None:
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        return None
    if os.fstat(file.fileno()).st_size != size:  # replaced in the storage
        file.close()
        return None
    with suppress(OSError):
        os.utime(path)  # mark as used, since access times are often disabled
    return file
