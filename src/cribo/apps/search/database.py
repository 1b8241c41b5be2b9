"""Database of the images of a collection, their objects and the objects' vectors.

A database consists of three Lance tables in a folder, or below a URL of object storage. `about` holds the settings of
the database; it is created last, so that creation is atomic. `images` has one row per image file, with a unique entry
number for each indexed state of the file, and `objects` holds the objects with the entry number of their image. Objects
are written before the row of their image and removed after it. Readers ignore objects whose entry number is in no row
of `images`, so they never see the partial state of an interrupted write.

Many processes can write objects at the same time: each writes files with an `ObjectWriter`, and one process adds all of
them to the database by `ObjectDatabase.commit`. Files that are never committed are not part of the database.
"""

import dataclasses
import json
import os
import re
import secrets
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int

from cribo.base.bounds import at_least
from cribo.base.console import Progress
from cribo.base.errors import ConfigError, DatabaseError, DataError, InputError
from cribo.base.files import parse_json, require
from cribo.base.packages import load_lance
from cribo.base.redaction import masked
from cribo.base.trust import check_address, check_import, is_address
from cribo.base.wording import command_line, option_text
from cribo.data.config import Reading
from cribo.data.reading import EncodedImage
from cribo.data.sources.collection import locate_image, read_named
from cribo.data.sources.images import is_url
from cribo.features.config import BackboneSource, ObjectSettings, portable_source
from cribo.features.objects import GridMask, ImageObject

if TYPE_CHECKING:
    from cribo.features.encoder import Encoder

_FORMAT = 1
_ABOUT, _IMAGES, _OBJECTS = "about", "images", "objects"
_INDEX = "vector_idx"
_KEPT_VERSIONS = timedelta(days=7)

T = TypeVar("T")


def index_command(uri: str) -> str:
    """Return the command that indexes a folder of images in a database."""
    return command_line("cribo", "index", "--images", "DIR", "--db", uri)


@dataclass(frozen=True)
class DatabaseInfo:
    """Backbone, images and settings of a database.

    Attributes:
        identity: hash of the encoder's network, weights, normalisation and layers.
        backbone: description of the backbone (`Encoder.about`).
        config: fields of the `BackboneSource` that opens the backbone.
        dim: D, the dimension of an object's vector.
        settings: settings that define objects.
        root: absolute path of the folder of the images; their paths are relative to it. For shards, Parquet files and
            URLs, the same as `images`.
        images: indexed folder, text file in it that lists images, shards, Parquet files or URL.
        blocks: numbers of the blocks that give features; None for the last ones (`config.layers`).
        files: whether the images are files below `root`.
        column: of Parquet files, the column of the images, if it was given.
        part: share of the images that is indexed, as in --part.
        collection: number of images and hash of the names of all shares.
        unread: number of images that could not be read, perhaps temporarily, and the name of the first; None until all
            images are indexed.
        pixels: range, channels and page with which images are read, if they were given (see `PixelOptions`).
    """

    identity: str
    backbone: dict[str, Any]
    config: dict[str, Any]
    dim: int
    settings: ObjectSettings
    root: str
    images: str = ""
    blocks: tuple[int, ...] | None = None
    files: bool = True
    column: str | None = None
    part: str = "1/1"
    collection: str = ""
    unread: tuple[int, str] | None = None
    pixels: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        encoder: "Encoder",
        source: BackboneSource,
        settings: ObjectSettings,
        root: str,
        *,
        images: str = "",
        blocks: tuple[int, ...] | None = None,
    ) -> "DatabaseInfo":
        """Describe a new database with the features of an encoder."""
        config = dataclasses.asdict(portable_source(source))  # a search may run in another working directory
        return cls(str(encoder.identity), encoder.about, config, encoder.dim, settings, root, images, blocks)

    @property
    def backbone_name(self) -> str:
        """Name of the backbone."""
        return str(self.backbone["name"])

    def backbone_source(self, given: BackboneSource | str | None = None, *, trust: bool = False) -> BackboneSource:
        """Source of the backbone.

        What a database says is not trusted: it cannot allow code to run, name custom code, or open an address.

        Args:
            given: the user's source of the same backbone. A string replaces only the place of the weights.
            trust: whether the user trusts the database.

        Raises:
            Untrusted: the database names an address, or custom code, that the user has not given.
        """
        if isinstance(given, BackboneSource):
            return given
        own = BackboneSource(**{**self.config, "trust": trust})
        if given is not None:
            own = dataclasses.replace(own, source=given)
        else:
            check_address(own.source, "the database", "--backbone", trust=trust)
        if own.architecture is not None and "." in own.architecture:
            check_import(own.architecture, "the database", "--backbone.architecture", trust=trust)
        return own


class IndexedImage(NamedTuple):
    """State of an image file at the time of indexing.

    Attributes:
        path: path relative to the root, separated by `/`.
        entry: unique number of this state of the file, stored with its objects.
        size_bytes: size of the file in bytes.
        mtime_ns: modification time of the file, in nanoseconds since 1970.
        sha256: hash of the file's content.
        height: height in pixels after applying the EXIF orientation; 0 if the file is unreadable.
        width: width in pixels after applying the EXIF orientation; 0 if the file is unreadable.
        objects: number of objects.
        error: reason why the file is unreadable; empty if it is readable.
    """

    path: str
    entry: int
    size_bytes: int
    mtime_ns: int
    sha256: str
    height: int
    width: int
    objects: int
    error: str


class FoundObject(NamedTuple):
    """An object found by a search, without its vector, and its cosine similarity to the query."""

    similarity: float
    indexed: IndexedImage
    object: ImageObject

    @property
    def image(self) -> str:
        """Path of its image, relative to the root."""
        return self.indexed.path


@dataclass(frozen=True)
class ObjectWriter:
    """Writes objects to files of a database, which `ObjectDatabase.commit` adds to it.

    Can be pickled. Any number of processes may write at the same time; readers do not see the objects before the
    commit. Files that are never committed are harmless; `ObjectDatabase.compact` removes them.

    Attributes:
        uri: the folder or URL of an existing database.
        dim: D, the dimension of an object's vector.

    Example:
        >>> writer = database.writer()  # doctest: +SKIP
        >>> fragments = writer.write([(image, objects)])  # in any process  # doctest: +SKIP
        >>> database.commit(fragments, [image])  # doctest: +SKIP
    """

    uri: str
    dim: int

    def write(self, images: Sequence[tuple[IndexedImage, Sequence[ImageObject]]]) -> list[str]:
        """Write the objects of images, whose entries are from `new_entry`.

        Returns:
            Descriptions of the files for `commit`, as JSON; empty if there are no objects.

        Raises:
            InputError: a vector has another dimension.
            DatabaseError: there is no database.
            OSError: the database is not reachable or not writable, or the disk is full.
        """
        objects = [(image, found) for image, several in images for found in several]
        if not objects:
            return []
        rows = _objects_table(objects, self.dim)
        entries = sorted({image.entry for image, _ in objects})
        table = _opened(self.uri, _OBJECTS)
        if table is None:
            raise DatabaseError(f"{self.uri} contains no database of objects")
        with _writing(self.uri):
            fragments = _lance().fragment.write_fragments(rows, table, mode="append")
        return [json.dumps({"entries": entries, "fragment": each.to_json()}) for each in fragments]


class ObjectDatabase:
    """Database of the objects of an image collection; use `open` or `create` to get one.

    Each read sees the latest commit and may run while another process writes.

    Attributes:
        uri: the folder or URL of the database.
        info: backbone, images and settings of the database.
        root: the folder of the images.

    Example:
        >>> database = ObjectDatabase.open("street.db")  # doctest: +SKIP
        >>> database.search(database.objects_of("0001.png")[0].vector[None], 5)  # doctest: +SKIP
    """

    def __init__(
        self,
        uri: str,
        info: DatabaseInfo,
        root: Path,
        *,
        images: str | os.PathLike[str] | None = None,
        trust: bool = False,
    ) -> None:
        self.uri = uri
        self._given = () if images is None else (os.fspath(images),)
        self._trust = trust
        self.info = info
        self.root = root
        self._session = _lance().Session()  # caches metadata and indices for all versions
        if missing := [name for name in (_OBJECTS, _IMAGES) if _opened(uri, name, self._session) is None]:
            raise DatabaseError(f"{uri} has no table {missing[0]!r}: rebuild it with cribo index --db ELSEWHERE")

    @property
    def _objects(self) -> Any:
        return self._latest(_OBJECTS)

    @property
    def _images(self) -> Any:
        return self._latest(_IMAGES)

    def _latest(self, name: str) -> Any:
        """Open the latest version of a table; a table that is open keeps its version."""
        return _lance().dataset(_path(self.uri, name), session=self._session)

    # ------------------------------------------------------------------ opening and creating

    @classmethod
    def open(
        cls, uri: str | os.PathLike[str], *, images: str | os.PathLike[str] | None = None, trust: bool = False
    ) -> "ObjectDatabase":
        """Open an existing database for reading and writing.

        Args:
            uri: a folder, or a URL of object storage (s3://bucket/name).
            images: new location of the folder of images, if it was moved after indexing; or the URL of the images,
                which is opened only if it is given, with its credentials, which are not stored.
            trust: open all addresses that the database names. Only for databases from sources that you trust.

        Raises:
            DataError: the place contains no database, or one of another format.
            ImportError: Lance is not installed.
        """
        place = as_uri(uri)
        if not is_remote(place):
            require(Path(place))
        about = _opened(place, _ABOUT)
        if about is None:
            raise DatabaseError(f"{place} contains no database of objects: create one with {index_command(place)}")
        info = _read_info(place, about)
        if images is not None and is_url(images):
            info = dataclasses.replace(info, root=os.fspath(images), images=os.fspath(images))
        return cls(place, info, Path(images or info.root), images=images, trust=trust)

    @classmethod
    def create(
        cls,
        uri: str | os.PathLike[str],
        info: DatabaseInfo,
        fill: Callable[["ObjectDatabase"], object] = lambda database: None,
    ) -> "ObjectDatabase":
        """Create a database.

        Args:
            uri: an empty folder, or a URL.
            info: backbone, images and settings.
            fill: called with the empty database before it is complete: until then, it cannot be opened.

        Raises:
            DatabaseError: the place already contains a database or other files.
            ImportError: Lance is not installed.
        """
        place = as_uri(uri)
        if _opened(place, _ABOUT) is not None:
            raise DatabaseError(f"{place} already contains a database: open it, or use another --db")
        require_free(place)
        # Empty tables are left over from an interrupted `create`; replace them.
        tables = {_OBJECTS: _objects_schema(info.dim), _IMAGES: _images_schema()}
        for name in tables:
            table = _opened(place, name)
            if table is not None and table.count_rows():
                raise DatabaseError(
                    f"{place} contains a table {name!r}, but no database: an interrupted cribo merge left it, or cribo "
                    "did not create it. Delete it, or use another place"
                )
        for name, schema in tables.items():
            _overwrite(place, name, schema.empty_table())
        database = cls(place, info, Path(info.root))
        fill(database)
        with _writing(place):
            _write_info(place, info)
        return database

    def require_encoder(self, encoder: "Encoder", name: str) -> None:
        """Check that an encoder is the one with which the database was built.

        Raises:
            ConfigError: backbone or blocks differ; the message names both.
        """
        if encoder.identity != self.info.identity:
            source = self.info.config["source"]
            blocks = "the last" if self.info.blocks is None else ",".join(map(str, self.info.blocks))
            raise ConfigError(
                f"{self.uri} was built with the backbone {self.info.backbone_name} ({source}, "
                f"{self.info.identity[:12]}, blocks: {blocks}), not with {name} ({str(encoder.identity)[:12]}, blocks: "
                f"{','.join(map(str, encoder.blocks))}): vectors of different backbones or blocks cannot be compared. "
                f"Omit --blocks, use the same version of --backbone {source}, or build another database with cribo "
                "index --db ELSEWHERE"
            )

    def require_settings(self, settings: ObjectSettings) -> None:
        """Check that settings are those with which the database was built.

        Raises:
            ConfigError: settings differ; the message names them.
        """
        theirs, ours = dataclasses.asdict(self.info.settings), dataclasses.asdict(settings)
        different = [name for name in ours if ours[name] != theirs[name]]
        if different:
            stored = ", ".join(f"{name} {theirs[name]} (requested: {ours[name]})" for name in different)
            raise ConfigError(
                f"{self.uri} was built with {stored}: omit these options to use the stored values, or build another "
                "database with cribo index --db ELSEWHERE"
            )

    def reading(self, wanted: Reading) -> Reading:
        """Return how images are read: with the range, channels and page of the database.

        Raises:
            ConfigError: others are wanted.
        """
        stored = self.info.pixels
        if different := [name for name, value in wanted.given.items() if value != stored.get(name)]:
            theirs = ", ".join(f"{name} {option_text(stored.get(name))}" for name in different)
            ours = ", ".join(f"{name} {option_text(wanted.given[name])}" for name in different)
            raise ConfigError(
                f"{self.uri} was built with {theirs}, got {ours}: omit --{different[0]}, or build another database "
                "with cribo index --db ELSEWHERE"
            )
        return Reading(max_pixels=wanted.max_pixels, **stored)

    # ------------------------------------------------------------------ reading

    def __len__(self) -> int:
        """Return the number of objects."""
        counts = self._read(lambda: self._images.to_table(columns=["objects"]))["objects"]
        return sum(counts.to_pylist())

    def count_images(self, *, unreadable: bool = False) -> int:
        """Return the number of images, optionally with unreadable files."""
        return self._read(lambda: self._images.count_rows(None if unreadable else "error = ''"))

    def paths(self) -> Any:
        """Return the paths of all images, including unreadable ones, as an Arrow array."""
        return self._read(lambda: self._images.to_table(columns=["path"]))["path"]

    @property
    def num_rows(self) -> int:
        """Number of rows of the table of objects, including stale ones; faster than `len`."""
        return self._read(lambda: self._objects.count_rows())

    def images(self) -> list[IndexedImage]:
        """Return all images, including unreadable ones, sorted by path."""
        return sorted(self._images_where(None))

    def image(self, path: str) -> IndexedImage | None:
        """Return the image with a path relative to the root; None if it is not indexed."""
        found = self._images_where(f"path = {_quoted(path)}")
        return found[0] if found else None

    def objects_of(self, image: str) -> list[ImageObject]:
        """Return the objects of the image with a path relative to the root; empty if it is not indexed."""
        row = self.image(image)
        if row is None:
            return []
        columns = [*_OBJECT_COLUMNS, "vector"]
        found = self._read(lambda: self._objects.to_table(columns, filter=f"entry = {row.entry}"))
        return sorted((_object_from(fields) for fields in found.to_pylist()), key=lambda each: each.number)

    def search(
        self,
        vectors: Float[np.ndarray, "q d"],
        k: int = 10,
        *,
        exclude_image: str | None = None,
        path: str | None = None,
        one_per_image: bool = False,
        exact: bool = False,
    ) -> list[list[FoundObject]]:
        """Find the k objects with the highest cosine similarity to each query vector, in descending order.

        Args:
            vectors: (Q, D) query vectors of non-zero length.
            k: maximum number of objects per query.
            exclude_image: path of an image whose objects are excluded.
            path: shell-style pattern of the images' paths; `*` also matches `/`. The search among these images is
                exact.
            one_per_image: return only the most similar object of each image.
            exact: compare with every object, without the vector index.

        Raises:
            ValueError: k is out of range, or vectors have the wrong shape, are zero or not finite.
            DatabaseError: the database contains no objects.
        """
        vectors = self._checked(vectors, k)
        own = None if exclude_image is None else self.image(exclude_image)
        available = self.num_rows
        if not available:
            raise DatabaseError(f"{self.uri} contains no objects: index images with {index_command(self.uri)}")
        limit = min(available, k + (own.objects if own is not None else 0))
        found: list[list[FoundObject]] = [[] for _ in vectors]
        waiting = list(range(len(vectors)))
        while waiting:
            rows = self._nearest(vectors[waiting], limit, path, exact=exact)
            entries = sorted({row["entry"] for several in rows for row in several})
            # Stale objects have entries without an image.
            images = {image.entry: image for image in self._images_where(_among("entry", entries))}
            if own is not None:
                images.pop(own.entry, None)
            for query, several in zip(waiting, rows, strict=True):
                shown = [row for row in several if row["entry"] in images]
                shown = [row for row in shown if path is None or fnmatchcase(row["image"], path)]
                if one_per_image:
                    first: dict[int, dict[str, Any]] = {}
                    for row in shown:
                        first.setdefault(row["entry"], row)
                    shown = list(first.values())
                found[query] = [
                    FoundObject(1.0 - row["_distance"], images[row["entry"]], _object_from(row)) for row in shown[:k]
                ]
            if limit == available:
                break
            waiting = [query for query in waiting if len(found[query]) < k]
            limit = min(available, 4 * limit)
        return found

    def locate(self, image: str) -> Path | EncodedImage:
        """Return the file of an indexed image, or its content if it is in a shard, a Parquet file or below a URL.

        Raises:
            Untrusted: the image is at an address that the user has not given.
            OSError: the storage cannot be read, or the image is gone.
            UnreadableImage: there are no bytes to read.
            DataError: the name leads outside the images.
        """
        if self.info.files:
            return Path(locate_image(self.root, image, source=self.info.images or self.root))
        self.check_images()
        if is_address(image):  # a line of a list, or a path in a Parquet file
            check_address(image, self.uri, "--images", trust=self._trust)
        return read_named(self.info.images, image, column=self.info.column)

    def check_images(self) -> None:
        """Check that the images may be opened.

        Raises:
            Untrusted: they are at an address that the user has not given.
        """
        check_address(self.info.images, self.uri, "--images", trust=self._trust, given=self._given)

    def is_changed(self, image: IndexedImage) -> str:
        """Return `missing` or `changed` if an image's file was deleted or modified after indexing, otherwise "".

        Compares size and modification time; the content is not read. Images that are not files in a folder count as
        unchanged.
        """
        if not self.info.files:
            return ""
        try:
            status = Path(locate_image(self.root, image.path, source=self.info.images or self.root)).stat()
        except (OSError, DataError):
            return "missing"
        same = (status.st_size, status.st_mtime_ns) == (image.size_bytes, image.mtime_ns)
        return "" if same else "changed"

    def sample_objects(self, number: int) -> list[tuple[IndexedImage, Float[np.ndarray, " d"]]]:
        """Return the images and vectors of objects drawn uniformly; every call draws the same."""
        rows = self.num_rows
        places = np.random.default_rng(0).choice(rows, size=min(number, rows), replace=False)
        found = self._read(lambda: self._objects.take(sorted(places.tolist()), columns=["entry", "vector"]))
        images = {image.entry: image for image in self._images_where(_among("entry", found["entry"].to_pylist()))}
        return [
            (images[entry], vector)
            for entry, vector in zip(found["entry"].to_pylist(), _matrix(found["vector"].combine_chunks()), strict=True)
            if entry in images
        ]

    def kth_similarities(
        self, vectors: Float[np.ndarray, "q d"], k: int, *, exclude: Sequence[int]
    ) -> Float[np.ndarray, " q"]:
        """Return the similarity of the k-th nearest object of each query, in one pass over all objects.

        Args:
            vectors: (Q, D) query vectors of non-zero length.
            k: number of neighbours, at most the number of objects.
            exclude: entry of an image for each query, whose objects do not count.
        """
        vectors, entries = self._checked(vectors, k), np.asarray(exclude)[:, None]

        def read() -> Float[np.ndarray, " q"]:
            best = np.full((len(vectors), k), -np.inf, dtype=np.float32)
            for batch in self._objects.to_batches(columns=["entry", "vector"]):
                keys = _matrix(batch["vector"])
                similarity = vectors @ (keys / np.linalg.norm(keys, axis=1, keepdims=True)).T
                similarity[entries == batch["entry"].to_numpy()] = -np.inf
                best = np.partition(np.concatenate([best, similarity], axis=1), -k, axis=1)[:, -k:]
            return best.min(axis=1)

        return self._read(read)

    def image_vectors(self) -> dict[str, Float[np.ndarray, " d"]]:
        """Return the area-weighted mean of the object vectors of each image that has objects."""
        current = {image.entry: image.path for image in self.images() if image.objects}

        def read() -> dict[str, Float[np.ndarray, " d"]]:
            sums = {path: np.zeros(self.info.dim, dtype=np.float32) for path in current.values()}
            areas = dict.fromkeys(sums, 0)
            for batch in self._objects.to_batches(columns=["entry", "area", "vector"]):
                vectors = _matrix(batch["vector"])
                entries, sizes = batch["entry"].to_pylist(), batch["area"].to_pylist()
                for entry, area, vector in zip(entries, sizes, vectors, strict=True):
                    if entry in current:
                        sums[current[entry]] += area * vector
                        areas[current[entry]] += area
            return {path: total / areas[path] for path, total in sums.items()}

        return self._read(read)

    def size_bytes(self) -> int | None:
        """Return the size on disk in bytes; None for object storage."""
        if is_remote(self.uri):
            return None
        return sum(path.stat().st_size for path in Path(self.uri).rglob("*") if path.is_file())

    # ------------------------------------------------------------------ writing

    def put(
        self, images: Sequence[tuple[IndexedImage, Sequence[ImageObject]]], *, replaced: Sequence[int] = ()
    ) -> None:
        """Insert or update images with their objects.

        Args:
            images: images and objects to add. An image has an entry from `new_entry`, or no objects to add and the
                entry of its stored ones.
            replaced: previous entries of these images; their objects are removed.
        """
        self.commit(self.writer().write(images), [image for image, _ in images], replaced=replaced)

    def writer(self) -> ObjectWriter:
        """Return a writer for this process or another one; a folder is given by its absolute path."""
        uri = self.uri if is_remote(self.uri) else str(Path(self.uri).absolute())
        return ObjectWriter(uri, self.info.dim)

    def commit(self, fragments: Sequence[str], images: Sequence[IndexedImage], *, replaced: Sequence[int] = ()) -> None:
        """Insert or update images with the objects that writers wrote, all objects in one commit.

        Repeating a commit, for example after a crash, does not add objects twice. Commits of the same fragments must
        not run at the same time.

        Args:
            fragments: results of `ObjectWriter.write`.
            images: the images whose objects were written, and others that change without new objects.
            replaced: previous entries of these images; their objects are removed.

        Raises:
            InputError: fragments contain objects of other images.
            DatabaseError: files no longer exist; their images must be indexed again. Nothing is changed.
            OSError: the database is not writable.
        """
        self._append(fragments, {image.entry for image in images})
        if images:
            with _writing(self.uri):
                merge = self._images.merge_insert("path").when_matched_update_all().when_not_matched_insert_all()
                merge.execute(_images_table(images))
        self._drop(_OBJECTS, replaced)

    def add_all(self, databases: Sequence["ObjectDatabase"], progress: Progress | None = None) -> None:
        """Add all images and objects of other databases, all objects in one commit, in bounded memory.

        Args:
            databases: of other images, with vectors of the same dimension.
            progress: called with the number of objects.

        Raises:
            DatabaseError: a database lacks objects of its images.
            OSError: this database is not writable, or the disk is full.
        """
        import pyarrow as pa

        # Open tables keep their versions, while other processes may write.
        tables = [(database.uri, database._images, database._objects) for database in databases]
        counts = [images.to_table(["entry", "objects"]) for _, images, _ in tables]
        expected = [int(each["objects"].to_numpy().sum()) for each in counts]
        found = [0] * len(tables)

        def objects() -> Iterator[Any]:
            for number, (_, _, table) in enumerate(tables):
                for batch in _rows_of(table, counts[number]["entry"].to_numpy(), self.info.dim):
                    yield batch
                    found[number] += len(batch)
                    if progress is not None:
                        progress("objects", sum(found), sum(expected))

        table = self._objects
        if sum(expected):
            rows = pa.RecordBatchReader.from_batches(table.schema, objects())
            with _writing(self.uri):
                fragments = _lance().fragment.write_fragments(rows, table, mode="append")
            for (uri, _, _), one, other in zip(tables, found, expected, strict=True):
                if one != other:
                    raise DatabaseError(
                        f"{uri} contains {one} of the {other} objects of its images: rebuild it with cribo index"
                    )
            with _writing(self.uri):
                append = _lance().LanceOperation.Append(fragments)
                _lance().LanceDataset.commit(table, append, read_version=table.version)
        for _, images, _ in tables:
            with _writing(self.uri):
                read = images.scanner(batch_size=_IMAGES_PER_BATCH).to_reader()
                _lance().write_dataset(read, _path(self.uri, _IMAGES), mode="append")

    def _append(self, fragments: Sequence[str], entries: set[int]) -> None:
        """Add those fragments to the table of objects that are not part of it."""
        table = self._objects
        stored = {file.path for each in table.get_fragments() for file in each.metadata.files}
        waiting: dict[str, tuple[Any, list[int]]] = {}
        for text in fragments:
            content = json.loads(text)
            if others := set(content["entries"]) - entries:
                raise InputError(f"fragments contain objects of {len(others)} images that are not committed with them")
            fragment = _lance().FragmentMetadata.from_json(json.dumps(content["fragment"]))
            path = fragment.files[0].path
            if path not in stored:
                waiting[path] = fragment, content["entries"]
        # `compact` moves committed objects to other files; their images have rows, which are written after them.
        committed = self._stored_entries([entry for _, own in waiting.values() for entry in own])
        waiting = {path: (fragment, own) for path, (fragment, own) in waiting.items() if committed.isdisjoint(own)}
        if not waiting:
            return
        files = _lance().file.LanceFileSession(f"{_path(self.uri, _OBJECTS)}/data")
        with ThreadPoolExecutor(_REQUESTS) as pool:
            exist = self._read(lambda: list(pool.map(files.contains, waiting)))
        if missing := [path for path, there in zip(waiting, exist, strict=True) if not there]:
            raise DatabaseError(
                f"{len(missing)} of {len(waiting)} files to commit to {self.uri} no longer exist, such as "
                f"{missing[0]}: compacting the database removed them; index their images again"
            )
        append = _lance().LanceOperation.Append([fragment for fragment, _ in waiting.values()])
        with _writing(self.uri):  # repeats the commit after those of other processes
            _lance().LanceDataset.commit(table, append, read_version=table.version)

    def _stored_entries(self, entries: Sequence[int]) -> set[int]:
        """Return those entries that are in rows of `images`."""
        found = self._read(lambda: self._images.to_table(["entry"], filter=_among("entry", entries)))
        return set(found["entry"].to_pylist())

    def drop_images(self, images: Sequence[IndexedImage]) -> None:
        """Remove images and their objects."""
        entries = [image.entry for image in images]
        self._drop(_IMAGES, entries)
        self._drop(_OBJECTS, entries)

    def describe(self, **changes: Any) -> None:
        """Change fields of `info`, such as the folder of the images."""
        self.info = dataclasses.replace(self.info, **changes)
        self.root = Path(self.info.root)
        with _writing(self.uri):
            _write_info(self.uri, self.info)

    def repair(self) -> None:
        """Remove objects without an image, left by a killed writer; no other process may write at the same time."""
        images, objects = (
            self._read(lambda name=name: self._latest(name).to_table(columns=["entry"]))["entry"].to_numpy()
            for name in (_IMAGES, _OBJECTS)
        )
        self._drop(_OBJECTS, np.setdiff1d(objects, images).tolist())

    def compact(self, *, drop_versions: bool = False) -> None:
        """Merge small files, remove old versions and update the indices.

        Args:
            drop_versions: remove versions of the last week, too, and on a disk also files left by killed writers; no
                other process may write at the same time.
        """
        age = timedelta(0) if drop_versions else _KEPT_VERSIONS
        for name in (_OBJECTS, _IMAGES):
            with _writing(self.uri):
                table = self._latest(name)
                table.optimize.compact_files()
                table.optimize.optimize_indices()
                table.cleanup_old_versions(age, delete_unverified=drop_versions and not is_remote(self.uri))
        for name, column in ((_IMAGES, "path"), (_IMAGES, "entry"), (_OBJECTS, "entry")):
            with _writing(self.uri):
                table = self._latest(name)
                if table.count_rows() and f"{column}_idx" not in _indices(table):
                    table.create_scalar_index(column, "BTREE")

    def has_index(self) -> bool:
        """Whether there is a vector index."""
        return _INDEX in self._read(lambda: _indices(self._objects))

    def build_index(self, progress: Progress | None = None) -> None:
        """Build or rebuild the vector index; objects that are added later are searched exactly.

        The index stores about a bit per dimension of a vector, if their number is divisible by eight, and otherwise the
        vectors themselves.
        """
        kind: dict[str, Any] = (
            {"index_type": "IVF_RQ", "num_bits": 1} if self.info.dim % 8 == 0 else {"index_type": "IVF_FLAT"}
        )

        def show(event: Any) -> None:
            if progress is not None and event.stage in _STAGES and event.total:
                done = event.total if event.event == "complete" else event.completed
                progress(_STAGES[event.stage], done, event.total)

        with _writing(self.uri):
            self._objects.create_index(
                "vector",
                name=_INDEX,
                metric="cosine",
                replace=True,
                target_partition_size=_PARTITION,
                progress_callback=show,
                **kind,
            )

    # ------------------------------------------------------------------ internals

    def _drop(self, name: str, entries: Sequence[int]) -> None:
        if entries:
            with _writing(self.uri):
                self._latest(name).delete(_among("entry", entries))

    def _read(self, ask: Callable[[], T]) -> T:
        """Run a query; it fails if a writer removes the version being read at the same time."""
        try:
            return ask()
        except (RuntimeError, ValueError, OSError) as error:
            raise DatabaseError(
                f"cannot read {self.uri}: {_reason(error)}; try again, or rebuild the database with cribo index --db "
                "ELSEWHERE"
            ) from error

    def _checked(self, vectors: Float[np.ndarray, "q d"], k: int) -> Float[np.ndarray, "q d"]:
        vectors = np.asarray(vectors, dtype=np.float32)
        if vectors.ndim != 2 or vectors.shape[1] != self.info.dim:
            raise InputError(f"vectors must have the shape (Q, {self.info.dim}), got {vectors.shape}")
        at_least(1).check(k=k)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        if not np.isfinite(vectors).all() or not lengths.all():
            raise InputError("vectors must be finite and of non-zero length, because they are compared by cosine")
        return vectors / lengths

    def _nearest(
        self, vectors: Float[np.ndarray, "q d"], limit: int, path: str | None, *, exact: bool
    ) -> list[list[dict[str, Any]]]:
        """Return the nearest rows of each vector; a pattern is matched only approximately."""

        nearest = {
            "column": "vector",
            "q": vectors,
            "k": limit,
            "metric": "cosine",
            "nprobes": _PROBES,
            "refine_factor": _REFINE,  # compares this multiple of the objects by their stored vectors
            "use_index": not exact and path is None,  # the probed partitions may contain too few matching images
        }
        like = None if path is None else f"image LIKE {_quoted(_like(path))}"
        columns = [*_OBJECT_COLUMNS, "_distance"]
        ask = lambda: self._objects.to_table(columns, filter=like, nearest=nearest, prefilter=True)  # noqa: E731
        rows = self._read(ask).to_pylist()
        found: list[list[dict[str, Any]]] = [[] for _ in vectors]
        for row in rows:
            found[row.get("query_index", 0)].append(row)
        for several in found:
            several.sort(key=lambda row: (row["_distance"], row["image"], row["number"]))
        return found

    def _images_where(self, condition: str | None) -> list[IndexedImage]:
        columns = list(IndexedImage._fields)
        rows = self._read(lambda: self._images.to_table(columns, filter=condition))
        return [IndexedImage(*values) for values in zip(*(rows[name].to_pylist() for name in columns), strict=True)]


_REQUESTS = 16  # concurrent requests to object storage
_BATCH_BYTES, _READ_AHEAD = 8 << 20, 8  # of vectors that are copied; Lance would read 2 GiB ahead
_IMAGES_PER_BATCH = 8192

# Average number of objects per partition of the index, number of partitions compared with a query, and number of
# objects compared exactly, relative to those returned; chosen by benchmarks/database.py.
_PARTITION, _PROBES, _REFINE = 4096, 80, 10
# Stages of building the index, of several seconds for a million objects.
_STAGES = {
    "train_ivf": "vector index: clustering",
    "shuffle": "vector index: objects",
    "merge_partitions": "vector index: clusters",
}
SIDES = ("grid_height", "grid_width", "height", "width", "x0", "y0", "x1", "y1")
_OBJECT_COLUMNS = ("entry", "image", "number", "mask", *SIDES, "area")


def new_entry() -> int:
    """Return a unique entry number for a state of a file: 62 random bits."""
    return secrets.randbits(62)


def holds_database(uri: str | os.PathLike[str]) -> bool:
    """Whether a folder or URL contains a database of objects, in any format.

    Raises:
        ImportError: Lance is not installed.
    """
    place = as_uri(uri)
    return (is_remote(place) or Path(place).is_dir()) and _opened(place, _ABOUT) is not None


def require_free(uri: str | os.PathLike[str]) -> None:
    """Check that a folder is empty except for leftovers of an interrupted `create`.

    URLs are not checked.

    Raises:
        DatabaseError: the place is a file, or a folder with other contents.
    """
    place = as_uri(uri)
    if is_remote(place) or not Path(place).exists():
        return
    if not Path(place).is_dir():
        raise DatabaseError(f"{place} is a file, not a folder: use another --db")
    ours = {f"{name}.lance" for name in (_OBJECTS, _IMAGES, _ABOUT)}
    others = [path.name for path in Path(place).iterdir() if path.name not in ours and not path.name.startswith(".")]
    if others:
        raise DatabaseError(f"{place} contains {others[0]!r} and was not created by cribo index: use another --db")


def is_remote(uri: str) -> bool:
    """Whether a location is a URL of object storage."""
    return "://" in uri


def as_uri(uri: str | os.PathLike[str]) -> str:
    """Expand `~` in the path of a folder; return a URL unchanged."""
    text = os.fspath(uri)
    return text if is_remote(text) else str(Path(text).expanduser())


def _lance() -> Any:
    return load_lance("object search")


def _path(place: str, table: str) -> str:
    return f"{place.rstrip('/')}/{table}.lance"


def _opened(place: str, name: str, session: Any = None) -> Any:
    """Return a table; None if there is none, or only the folder that an interrupted creation leaves."""
    if not is_remote(place) and Path(place).is_file():
        raise DatabaseError(f"{place} is a file, not a database: give the folder that cribo index wrote")
    try:
        return _lance().dataset(_path(place, name), session=session)
    except (RuntimeError, ValueError, OSError) as error:
        if "was not found" in str(error):  # also for a table without any version
            return None
        # Object storage: missing bucket, no connection, or no permission.
        raise ConnectionError(f"cannot open {place}: {_reason(error)}: check the URL and your credentials") from error


@contextmanager
def _writing(place: str) -> Iterator[None]:
    """Convert Lance's errors for a full disk or a lost connection to OSError."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        raise OSError(f"cannot write to {place}: {_reason(error)}; earlier writes are kept") from error


def _overwrite(place: str, name: str, rows: Any) -> None:
    """Write a table, replacing the rows of an existing one."""
    _lance().write_dataset(rows, _path(place, name), mode="overwrite")


def _indices(table: Any) -> list[str]:
    return [index.name for index in table.describe_indices()]


def _reason(error: Exception) -> str:
    """Return the storage's error message without source locations."""
    message = re.search("<Message>(.*?)</Message>", str(error))
    return message[1] if message else textwrap.shorten(str(error).partition("\n")[0], 200)


def _read_info(place: str, about: Any) -> DatabaseInfo:
    try:
        content: Mapping[str, Any] = parse_json(about.to_table()["json"][0].as_py())
        version = content["format"]
        if version != _FORMAT:
            raise DatabaseError(
                f"{place} has format {version}, but this version of cribo reads format {_FORMAT}: rebuild it with "
                "cribo index"
            )
        names = [field.name for field in dataclasses.fields(DatabaseInfo)]
        values = {name: content[name] for name in names if name in content}
        blocks = None if content.get("blocks") is None else tuple(content["blocks"])
        unread = None if content.get("unread") is None else (content["unread"][0], content["unread"][1])
        of_earlier_versions = {} if content.get("range") is None else {"range": content["range"]}
        changed = {
            "blocks": blocks,
            "unread": unread,
            "pixels": Reading(**content.get("pixels", of_earlier_versions)).given,
            "settings": ObjectSettings(**content["settings"]),
        }
        return DatabaseInfo(**{**values, **changed})
    except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        foreign = f"{place} contains a table {_ABOUT!r} that cribo did not create: use another --db"
        raise DatabaseError(foreign) from error


def _write_info(place: str, info: DatabaseInfo) -> None:
    import pyarrow as pa

    text = json.dumps({"format": _FORMAT, **masked(dataclasses.asdict(info))})
    _overwrite(place, _ABOUT, pa.table({"json": [text]}))


def _like(pattern: str) -> str:
    """Return an SQL LIKE pattern that matches a superset of a shell-style pattern."""
    return re.sub(r"\[.+?\]|[?\\]", "_", pattern).replace("*", "%")


def _among(column: str, values: Sequence[int]) -> str:
    """Return the condition that a column has one of some values."""
    return f"{column} IN ({', '.join(map(str, values))})" if values else "false"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# ------------------------------------------------------------------ rows


def _rows_of(objects: Any, entries: Int[np.ndarray, " n"], dim: int) -> Iterator[Any]:
    """Yield the objects of the images with some entries, in batches."""
    import pyarrow as pa

    known = np.append(np.sort(entries), np.iinfo(np.int64).max)
    rows = max(1, _BATCH_BYTES // (4 * dim))
    for batch in objects.to_batches(batch_size=rows, io_buffer_size=_READ_AHEAD * _BATCH_BYTES):
        own = batch["entry"].to_numpy()
        yield batch.filter(pa.array(known[np.searchsorted(known, own)] == own))


def _objects_schema(dim: int) -> Any:
    import pyarrow as pa

    whole, small = pa.int64(), pa.int32()
    return pa.schema(
        [
            ("entry", whole),
            ("image", pa.string()),
            ("number", small),
            ("vector", pa.list_(pa.float32(), dim)),
            ("mask", pa.binary()),
            *((name, small) for name in SIDES),
            ("area", whole),
        ]
    )


def _images_schema() -> Any:
    import pyarrow as pa

    kinds = {str: pa.string(), int: pa.int64()}
    return pa.schema([(name, kinds[kind]) for name, kind in IndexedImage.__annotations__.items()])


def _images_table(images: Sequence[IndexedImage]) -> Any:
    import pyarrow as pa

    return pa.Table.from_pylist([image._asdict() for image in images], schema=_images_schema())


def _objects_table(objects: Sequence[tuple[IndexedImage, ImageObject]], dim: int) -> Any:
    import pyarrow as pa

    vectors = [np.asarray(each.vector, dtype=np.float32) for _, each in objects]
    if wrong := [vector.shape for vector in vectors if vector.shape != (dim,)]:
        raise InputError(f"vectors of objects must have the shape ({dim},), got {wrong[0]}")
    columns: dict[str, Any] = {
        "entry": [image.entry for image, _ in objects],
        "image": [image.path for image, _ in objects],
        "number": [each.number for _, each in objects],
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(vectors)), dim),
        "mask": [each.mask.counts for _, each in objects],
        "area": [each.area for _, each in objects],
    }
    sides = [(*each.mask.grid, *each.mask.image, *each.box) for _, each in objects]
    columns |= dict(zip(SIDES, zip(*sides, strict=True), strict=True))
    return pa.table(columns, schema=_objects_schema(dim))


def _matrix(vectors: Any) -> Float[np.ndarray, "n d"]:
    """Return a column of vectors as a matrix."""
    return vectors.flatten().to_numpy().reshape(len(vectors), -1)


def _object_from(fields: Mapping[str, Any]) -> ImageObject:
    return ImageObject(
        number=fields["number"],
        vector=np.asarray(fields.get("vector", ()), dtype=np.float32),
        mask=GridMask(
            (fields["grid_height"], fields["grid_width"]), fields["mask"], (fields["height"], fields["width"])
        ),
        box=(fields["x0"], fields["y0"], fields["x1"], fields["y1"]),
        area=fields["area"],
    )
