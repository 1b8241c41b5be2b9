"""Images in Parquet files: a column of bytes, of paths or URLs, or of Hugging Face's structs of both."""

from __future__ import annotations

import os
import posixpath
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from cribo.base.errors import DataError, UnreadableImage
from cribo.base.files import require
from cribo.base.wording import enumerated, nearest
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.reading import EXTENSIONS, EncodedImage, FileState
from cribo.data.sources.images import EncodedImages, PackedNames, ascending, is_url, list_directly, require_inside
from cribo.data.sources.remote import located
from cribo.data.sources.storage import file_state, file_system, list_folder, read_file, require_answer, retry

if TYPE_CHECKING:
    from jaxtyping import Int64, UInt8

T = TypeVar("T")

PARQUET = ".parquet"

COLUMNS = ("image", "img", "bytes", "content", "path", "image_path", "file", "file_name", "filename", "url")
"""Names of the column of images, by precedence."""

_BATCH_BYTES = 2**24  # of the rows that are decoded at a time
_BATCH_ROWS = (8, 64)  # at least, since threads read neighbouring rows; at most, since equal rows are stored once
_BATCHES = 4  # kept, since threads do not read in order
_FILES = 2  # kept open
_BUFFER = 2**23  # bytes per read
_OPENERS = 8  # files opened in parallel, since object storage has a high latency


class ParquetFile(NamedTuple):
    """A Parquet file.

    Attributes:
        location: path or URL.
        name: name of the file in the names of its images.
        state: size and modification time when it was opened.
    """

    location: str
    name: str
    state: FileState


class Column(NamedTuple):
    """A column of images: its name, the type of its values, and another column if that contains bytes instead."""

    name: str
    holds: Literal["bytes", "paths", "structs"]
    bytes_in: str | None = None


class ParquetImages(EncodedImages):
    """The images in the rows of Parquet files, as an ImageCollection; created by `open_parquet`.

    Rows are read in batches of limited size, of which the last ones are cached, so that reading in order is fast. This
    takes about twice the memory of a page, which pyarrow writes for every 1024 rows, and for each row group. Reading
    in random order, as pretraining does, decodes a row group up to the row each time: write shards for long runs.
    Instances can be pickled, shared by threads, and used after a fork.

    Args:
        files: the files.
        column: their column of images.
        ends: number of images up to the end of each file.
        rows: row of each image in its file.
        paths: paths or URLs of the images, for a column of paths.
        suffixes: for structs, the index of each image's suffix in `EXTENSIONS`, plus 1; 0 if it is unknown.
        reading: as for `read_image`.
        inside: paths in structs must be inside the folder of their file.
    """

    def __init__(
        self,
        files: Sequence[ParquetFile],
        column: Column,
        ends: Int64[np.ndarray, " files"],
        rows: Int64[np.ndarray, " n"],
        paths: PackedNames | None = None,
        suffixes: UInt8[np.ndarray, " n"] | None = None,
        *,
        reading: Reading = DEFAULT_READING,
        inside: bool = False,
    ) -> None:
        super().__init__(reading)
        self._inside = inside
        self.files = tuple(files)
        self.column = column
        self._ends = ends
        self._rows = rows
        self._paths = paths
        self._suffixes = suffixes
        self._rows_of_files = _Rows(column.name)

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, index: int) -> str:
        """Return the path of an image if the column contains paths, else FILE.parquet/ROW and a known suffix."""
        if self._paths is not None and (path := self._paths[index]):
            return path
        code = 0 if self._suffixes is None else int(self._suffixes[index])
        return f"{self._file(index).name}/{self._rows[index]}{('', *EXTENSIONS)[code]}"

    def read(self, index: int) -> EncodedImage:
        """Read the bytes of an image.

        Raises:
            UnreadableImage: the row has no bytes and no path, or the Parquet file is broken.
            OSError: a file is missing or cannot be read.
            ShardError: the storage of a URL failed repeatedly.
        """
        file, name = self._file(index), self.name(index)
        if self._paths is not None:
            content, path = None, self._paths[index]
        else:
            content, path = _content(self._rows_of_files.read(file.location, int(self._rows[index]), name))
            if path and not content:
                self._check_path(name, path, file)
        if content:
            return EncodedImage(name, content)
        if path:
            try:
                return EncodedImage(name, read_file(located(_folder(file.location), path)))
            except FileNotFoundError as error:
                if self.column.bytes_in is None:
                    raise
                other = f"the column {self.column.bytes_in!r} contains bytes: read it with --column"
                raise UnreadableImage(name, f"no such file; {other} {self.column.bytes_in}") from error
        raise UnreadableImage(name, f"the row has no {'path' if self.column.holds == 'paths' else 'bytes'}")

    def _check_path(self, name: str, path: str, file: ParquetFile) -> None:
        """Check the path of a row without bytes: the list of names does not show where it leads."""
        folder = _folder(file.location)
        if is_url(path) and not is_url(folder):
            raise UnreadableImage(name, f"the row has no bytes, and its URL {path} is not opened: use a column of URLs")
        if self._inside:
            try:
                require_inside(Path(folder), [(f"the path in {name}", path)])
            except DataError as error:
                raise UnreadableImage(name, str(error)) from error

    def state(self, index: int) -> FileState:
        """Return the state of the file at an image's path, or else of the Parquet file when it was opened."""
        file = self._file(index)
        if self._paths is not None and (path := self._paths[index]):
            return file_state(located(_folder(file.location), path))
        return file.state

    def part(self, indices: Sequence[int]) -> ParquetImages:
        """Return some of the images, given ascending indices. Other files are not opened."""
        chosen = ascending(indices, len(self))
        owners, counts = np.unique(np.searchsorted(self._ends, chosen, side="right"), return_counts=True)
        return ParquetImages(
            [self.files[owner] for owner in owners],
            self.column,
            np.cumsum(counts),
            self._rows[chosen],
            None if self._paths is None else PackedNames(self._paths[index] for index in chosen.tolist()),
            None if self._suffixes is None else self._suffixes[chosen],
            reading=self.reading,
            inside=self._inside,
        )

    def _file(self, index: int) -> ParquetFile:
        if not 0 <= index < len(self):
            raise IndexError(f"index must be in 0..{len(self) - 1}, got {index}")
        return self.files[int(np.searchsorted(self._ends, index, side="right"))]


def _content(value: Any) -> tuple[bytes | None, str | None]:
    """Return the bytes and the path of a value of a column of bytes or structs."""
    return (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)


def _folder(location: str) -> str:
    return posixpath.dirname(location) if is_url(location) else os.path.dirname(location)  # noqa: PTH120


class _Rows:
    """Reads rows of Parquet files, the last of which stay open."""

    def __init__(self, column: str) -> None:
        self._column = column
        self._start()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Rows, (self._column,)

    def _start(self) -> None:
        self._process = os.getpid()
        self._lock = Lock()
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()

    def read(self, location: str, row: int, name: str) -> Any:
        """Return the value of a row; raises UnreadableImage, OSError and ShardError as `ParquetImages.read` does."""
        import pyarrow as pa

        if self._process != os.getpid():  # connections do not survive a fork
            self._start()

        def attempt() -> Any:
            with self._lock:
                try:
                    return self._file(location).row(row)
                except Exception as error:
                    self._open.pop(location, None)  # a stale handle would fail again
                    if isinstance(error, pa.ArrowInvalid | IndexError):
                        raise UnreadableImage(name, f"{location} is broken or has changed: {error}") from error
                    raise

        return retry(location, attempt) if is_url(location) else attempt()

    def _file(self, location: str) -> _OpenFile:
        if location not in self._open:
            for other in self._open.values():
                other.pause()
            self._open[location] = _OpenFile(location, self._column)
        self._open.move_to_end(location)
        while len(self._open) > _FILES:
            self._open.popitem(last=False)
        return self._open[location]


class _OpenFile:
    """An open Parquet file, whose row groups are read forward in batches."""

    def __init__(self, location: str, column: str) -> None:
        self._file, self._column = _parquet_file(location), column
        groups = range(self._file.metadata.num_row_groups)
        self._ends = np.cumsum([self._file.metadata.row_group(group).num_rows for group in groups])
        self._recent: deque[tuple[int, Any]] = deque(maxlen=_BATCHES)
        self._batches: Iterator[Any] = iter(())
        self._next = self._end = 0

    def row(self, row: int) -> Any:
        """Return the value of a row; raises IndexError if there is no such row."""
        for start, batch in self._recent:
            if start <= row < start + len(batch):
                return batch[row - start].as_py()
        if not self._next <= row < self._end:
            self._enter(int(np.searchsorted(self._ends, row, side="right")))
        while row >= self._next:
            batch = next(self._batches).column(0)
            self._recent.append((self._next, batch))
            self._next += len(batch)
        start, batch = self._recent[-1]
        return batch[row - start].as_py()

    def pause(self) -> None:
        """Free the page that is being read; the last batches remain available."""
        self._batches, self._next, self._end = iter(()), 0, 0

    def _enter(self, group: int) -> None:
        """Start reading a row group."""
        if group >= len(self._ends):
            raise IndexError(f"it has {self._ends[-1] if len(self._ends) else 0} rows")
        about = self._file.metadata.row_group(group)
        columns = (about.column(number) for number in range(about.num_columns))
        own = [one for one in columns if f"{one.path_in_schema}.".startswith(f"{self._column}.")]
        per_row = sum(one.total_uncompressed_size for one in own) // max(1, about.num_rows)
        least, most = _BATCH_ROWS
        size = max(least, min(most, _BATCH_BYTES // max(1, per_row)))
        self._batches = self._file.iter_batches(
            min(size, about.num_rows), row_groups=[group], columns=[self._column], use_threads=False
        )
        self._end = int(self._ends[group])
        self._next = self._end - about.num_rows


def open_parquet(
    root: str | os.PathLike[str], *, column: str | None = None, reading: Reading = DEFAULT_READING, inside: bool = False
) -> ParquetImages:
    """Open a Parquet file, or all Parquet files directly in a folder or below a URL.

    The column may contain the bytes of images; their paths, absolute or relative to the folder of the file, or URLs; or
    structs of `bytes` and `path`, as Hugging Face writes them. Images are ordered by file name and row.

    Args:
        root: a .parquet file, a folder of such files, or a URL of either.
        column: the column of images; by default the only column, or the first of `COLUMNS`.
        reading: as for `read_image`.
        inside: as for `open_images`, for paths.

    Raises:
        DataError: there are no Parquet files, rows or images in the column, or a file is not a Parquet file.
        MissingData: the file, folder or URL does not exist.
        ConnectionError: the storage of a URL does not answer.
        ShardError: the storage failed repeatedly.

    >>> images = open_parquet("s3://pictures/train", column="photograph")  # doctest: +SKIP
    """
    files = _files_of(os.fspath(root))
    found = column_of(files[0].location, column)
    with ThreadPoolExecutor(_OPENERS) as pool:
        scanned = list(
            pool.map(lambda one: _with_file(one.location, lambda file: _scan(file, one.location, found)), files)
        )
    counts = np.array([count for count, _ in scanned], dtype=np.int64)
    if not counts.sum():
        raise DataError(f"no images in {os.fspath(root)}: its Parquet files have no rows")
    paths = PackedNames(path for _, own in scanned for path in own) if found.holds == "paths" else None
    suffixes = np.concatenate([own for _, own in scanned]) if found.holds == "structs" else None
    if inside and found.holds == "paths":
        for file, (_, own) in zip(files, scanned, strict=True):
            require_inside(Path(_folder(file.location)), ((f"a path in {file.name}", path) for path in own))
    rows = np.concatenate([np.arange(count) for count in counts])
    return ParquetImages(files, found, np.cumsum(counts), rows, paths, suffixes, reading=reading, inside=inside)


def open_row(location: str, row: int, *, column: str | None = None) -> ParquetImages:
    """Open one row of a Parquet file, without reading others; raises as `open_parquet` does."""
    found = column_of(location, column)
    if found.holds == "paths":
        raise DataError(f"column {found.name!r} of {location} contains paths: its images are named by them, not by row")
    file = ParquetFile(location, posixpath.basename(location), FileState(-1, 0))
    return ParquetImages([file], found, np.array([1]), np.array([row]))


def column_of(location: str, column: str | None = None) -> Column:
    """Return the column of images of a Parquet file (see `open_parquet`).

    Raises:
        DataError: the column does not exist or contains no images, or it is not a Parquet file.
    """
    types = _with_file(location, _types)
    if column is not None and column not in types:
        raise DataError(f"{location} has no column {column!r}: {nearest(column, types)}")
    if column is not None or len(types) == 1:
        name = column or next(iter(types))
        if (holds := _holds(types[name])) is None:
            raise DataError(
                f"column {name!r} of {location} has the type {types[name]}: images must be bytes, paths (text), or "
                "structs of bytes and path"
            )
        return Column(name, holds)
    for name in COLUMNS:
        if name in types and (holds := _holds(types[name])) is not None:
            others = (
                other for other, kind in types.items() if holds == "paths" and _holds(kind) in ("bytes", "structs")
            )
            return Column(name, holds, next(others, None))
    raise DataError(f"no column of images in {location}: choose one of its columns, {enumerated(list(types), 20)}")


def _holds(kind: Any) -> Literal["bytes", "paths", "structs"] | None:
    """Return the contents of a column of images by its type; None for other types."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return "bytes"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "paths"
    if pa.types.is_struct(kind) and "bytes" in (names := [field.name for field in kind]):
        typed = {name: _holds(kind.field(name).type) for name in names}
        return "structs" if typed["bytes"] == "bytes" and typed.get("path") in (None, "paths") else None
    return None


def _files_of(root: str) -> list[ParquetFile]:
    """List the Parquet files of a folder or URL, or return the one at a path or URL; raises as `open_parquet` does."""
    if is_url(root):
        require_answer(root)
    else:
        require(Path(root).expanduser())
    if root.lower().endswith(PARQUET) and (is_url(root) or not Path(root).expanduser().is_dir()):
        location = root if is_url(root) else str(Path(root).expanduser().absolute())
        return [ParquetFile(location, posixpath.basename(location.replace(os.sep, "/")), file_state(location))]
    if is_url(root):
        states, _ = list_folder(root)
        files = {name: (located(root, name), state) for name, state in states.items() if name.endswith(PARQUET)}
    else:
        paths = list_directly(Path(root).expanduser().absolute(), PARQUET)
        files = {path.name: (str(path), file_state(str(path))) for path in paths}
    if not files:
        raise DataError(f"no Parquet files in {root}: looked for files that end in {PARQUET}")
    return [ParquetFile(files[name][0], name, files[name][1]) for name in sorted(files)]


def _parquet_file(location: str) -> Any:
    """Open a Parquet file at a path or URL; raises OSError, or ArrowInvalid if it is another kind of file."""
    import pyarrow.parquet as pq

    options: dict[str, Any] = {"buffer_size": _BUFFER, "pre_buffer": False}  # reads a column in pieces
    if not is_url(location):
        return pq.ParquetFile(location, **options)
    system, path = file_system(location)
    return pq.ParquetFile(system.open(path, "rb", cache_type="none"), **options)


def _with_file(location: str, use: Callable[[Any], T]) -> T:
    """Apply a function to an open Parquet file, with retries for a URL.

    Raises:
        DataError: the file is broken, or of another kind.
        OSError: the file at a path cannot be read.
        ShardError: the storage of a URL failed repeatedly.
    """
    import pyarrow as pa

    def attempt() -> T:
        try:
            with _parquet_file(location) as file:
                return use(file)
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{location} is not a Parquet file, or it is incomplete: {error}; download or write it again"
            ) from error

    return retry(location, attempt) if is_url(location) else attempt()


def _types(file: Any) -> dict[str, Any]:
    """Return the types of the columns of a Parquet file by name."""
    return {field.name: field.type for field in file.schema_arrow}


def _scan(file: Any, location: str, column: Column) -> tuple[int, Any]:
    """Return the number of rows of a file, and their paths, or the suffix codes of structs; "" is a missing path."""
    kind = _types(file).get(column.name)
    if kind is None or _holds(kind) != column.holds:
        raise DataError(
            f"column {column.name!r} contains {column.holds} in other files, but in {location} it "
            f"{'does not exist' if kind is None else f'has the type {kind}'}: give files of one kind"
        )
    rows = file.metadata.num_rows
    if column.holds == "paths":
        batches = file.iter_batches(columns=[column.name], use_threads=False)
        return rows, [path or "" for batch in batches for path in batch.column(0).to_pylist()]
    codes = np.zeros(rows, dtype=np.uint8)
    if column.holds == "structs" and kind.get_field_index("path") >= 0:
        start = 0
        for batch in file.iter_batches(columns=[f"{column.name}.path"], use_threads=False):
            paths = batch.column(0).field("path").to_pylist()
            codes[start : start + len(paths)] = [_suffix_code(path) for path in paths]
            start += len(paths)
    return rows, codes


def _suffix_code(path: str | None) -> int:
    """Return the index of a path's suffix in `EXTENSIONS`, plus 1; 0 for others."""
    suffix = posixpath.splitext(path or "")[1].lower()
    return EXTENSIONS.index(suffix) + 1 if suffix in EXTENSIONS else 0
