"""Storage of shards: a folder, or object storage with a bounded local cache."""

import errno
import hashlib
import logging
import os
import posixpath
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from filelock import FileLock, Timeout

from cribo.data.images import DataError, MissingData
from cribo.errors import MissingPackage, Stopped

log = logging.getLogger("cribo")
T = TypeVar("T")

SUFFIX = ".tar"
CACHE_DIR = "~/.cache/cribo/shards"
CACHE_GIB = 100.0

RETRY_DELAYS: tuple[float, ...] = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)
"""Seconds to wait after each failed attempt: five minutes in total, longer than a gateway takes to restart."""

_BLOCK = 8 * 2**20  # bytes per request
_ROOM_SECONDS = 0.1


class ShardError(Stopped):
    """A shard of an opened collection cannot be read; the message names it."""


def retry(what: str, attempt: Callable[[], T]) -> T:
    """Call `attempt` until it succeeds, waiting `RETRY_DELAYS` between attempts.

    Raises:
        ShardError: the file does not exist, or every attempt failed; the message begins with `what`.
        OSError: the disk of this machine is full.
    """
    for number, delay in enumerate((*RETRY_DELAYS, None), start=1):
        try:
            return attempt()
        except (ShardError, DataError, ImportError):
            raise
        except FileNotFoundError as error:  # permanent
            raise ShardError(f"{what}: file not found; it may have been removed") from error
        except Exception as error:  # error classes depend on the storage
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # error of the cache, not of the storage
            message = f"{what}: {str(error) or type(error).__name__}"
            if delay is None:
                raise ShardError(f"{message}; tried {number} times") from error
            log.warning("%s; attempt %d failed, next attempt in %g s", message, number, delay)
            time.sleep(delay)
    raise AssertionError("the last attempt returns or raises")


class LocalShards:
    """The tar files of a folder, or a single tar file.

    Attributes:
        root: the folder.
        names: names of the shards, in order.
        sizes: size of each shard in bytes.

    Raises:
        DataError: there are no tar files.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path).expanduser()
        files = [path] if path.is_file() else list_tars(path)
        if not files:
            raise DataError(f"no shards in {path}: looked for files that end in {SUFFIX}")
        self.root = str(path.parent if path.is_file() else path)
        self.names = tuple(file.name for file in files)
        self.sizes = tuple(file.stat().st_size for file in files)

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


def list_tars(folder: Path) -> list[Path]:
    """List the tar files directly in a folder, without hidden ones, sorted by name."""
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith(".") and path.is_file())


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
        sizes = retry(self.root, self._list)
        self.names = tuple(sorted(sizes))
        self.sizes = tuple(sizes[name] for name in self.names)

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

    def _list(self) -> dict[str, int]:
        """Return the size of each shard by name."""
        system, path = self._system()
        try:
            entries = system.ls(path, detail=True)
        except FileNotFoundError as error:
            raise MissingData(f"{self.root} does not exist, or contains no files") from error
        files = {posixpath.basename(entry["name"]): entry for entry in entries if entry["type"] == "file"}
        shards = {name: file for name, file in files.items() if name.endswith(SUFFIX) and not name.startswith(".")}
        if not shards:
            raise DataError(
                f"no shards in {self.root}: looked for files that end in {SUFFIX}, found {len(entries)} others"
            )
        sizes = [file["size"] for file in shards.values()]
        if None in sizes:  # listings over HTTP
            sizes = system.sizes([file["name"] for file in shards.values()])
        if None in sizes:
            raise DataError(f"{self.root}: the server does not report file sizes; copy the shards to a folder")
        return dict(zip(shards, sizes, strict=True))

    def _open(self, name: str, **options: Any) -> BinaryIO:
        system, path = self._system()
        return system.open(f"{path}/{name}", "rb", **options)

    def _system(self) -> tuple[Any, str]:
        # fsspec caches instances per process, since connections and event loops do not survive a fork.
        from fsspec.core import url_to_fs

        try:
            return url_to_fs(self.root)
        except ImportError as error:
            raise MissingPackage(f"{self.root}: {error}; install cribo-ssl[stream] for s3://") from error
        except ValueError as error:
            raise DataError(f"{self.root}: {error}") from error


ShardStore = LocalShards | RemoteShards


def _key(place: str) -> str:
    return hashlib.sha256(os.fsencode(place)).hexdigest()[:16]


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
