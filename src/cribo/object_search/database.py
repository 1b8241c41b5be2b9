"""The objects of a collection in LanceDB: which images there are, which objects they have, which are nearest.

Three tables in a folder, or below a URL of object storage. `about` says what the database was built with; it is made
last, so that a database is there whole or not at all. `images` has one row for each image file, with a number of its
own for each state of the file that was indexed, and `objects` the objects with the number of their image. Objects are
written before the row of their image, and removed after it: those whose number no row names are not there for any
reader, whenever the writing stopped.
"""

import dataclasses
import json
import os
import re
import secrets
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int64

from cribo.arguments import ConfigError
from cribo.data.images import DataError, require
from cribo.errors import InputError, MissingPackage
from cribo.object_search.extraction import GridMask, ImageObject
from cribo.object_search.settings import ObjectSettings
from cribo.retrieval.encoders import PatchEncoder
from cribo.retrieval.source import BackboneSource

_FORMAT = 1
_ABOUT, _IMAGES, _OBJECTS = "about", "images", "objects"
_INDEX = "vector_idx"
_NAMES_AT_ONCE = 1000  # in one condition of a query
_KEPT_VERSIONS = timedelta(days=7)
_OLD_VERSIONS = timedelta(hours=1)  # kept where others may be reading them or writing

T = TypeVar("T")


class DatabaseError(DataError):
    """A place that holds no database of objects, or one that cannot be used as asked; the message says what to do."""


@dataclass(frozen=True)
class DatabaseInfo:
    """What a database was built with.

    Attributes:
        identity: of the encoder: network, weights, normalisation and layers.
        backbone: what `open_encoder` says about it.
        config: of the backbone, to open it again (`BackboneSource`).
        dim: D, of an object's vector.
        settings: what counts as an object.
        root: the folder of the images, absolute; their paths are relative to it.
        images: what was indexed: that folder, or a text file in it that lists images.
        blocks: numbers of the blocks that give features; None for the last ones (`config.layers`).
    """

    identity: str
    backbone: dict[str, Any]
    config: dict[str, Any]
    dim: int
    settings: ObjectSettings
    root: str
    images: str = ""
    blocks: tuple[int, ...] | None = None

    @property
    def backbone_name(self) -> str:
        """What to call the backbone."""
        return str(self.backbone["name"])

    @property
    def backbone_config(self) -> BackboneSource:
        """The backbone, to be opened again without running code of its file.

        Whether to trust a file is for whoever runs this to say, not for a database, which may be somebody else's.
        """
        return BackboneSource(**{**self.config, "trust": False})


class IndexedImage(NamedTuple):
    """One image file as it was when it was indexed.

    Attributes:
        path: below the root, with `/` between its parts.
        entry: the number of this state of this file; its objects bear it.
        size_bytes: of the file.
        mtime_ns: when the file was last written to, in nanoseconds since 1970.
        sha256: of the file's content.
        height: in pixels, upright; 0 if it is unreadable.
        width: as well.
        objects: how many it has.
        error: why it could not be read; empty if it could.
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
    """An object that a search has found.

    Attributes:
        similarity: cosine with the query.
        image: path of its image below the root.
        object: what it is; without its vector, which is empty.
    """

    similarity: float
    image: str
    object: ImageObject


class ObjectDatabase:
    """Objects of a collection of images, by their image and by their nearness; `open` and `create` make one.

    Readers see what has been committed when they ask, and may ask while another process writes.

    Attributes:
        uri: the folder or URL.
        info: what it was built with.
        root: the folder of the images.

    Example:
        >>> database = ObjectDatabase.open("street.db")  # doctest: +SKIP
        >>> database.search(database.objects_of("0001.png")[0].vector[None], 5)  # doctest: +SKIP
    """

    def __init__(self, uri: str, connection: Any, info: DatabaseInfo, root: Path) -> None:
        self.uri = uri
        self.info = info
        self.root = root
        self._objects = connection.open_table(_OBJECTS)
        self._images = connection.open_table(_IMAGES)

    # ------------------------------------------------------------------ opening and making

    @classmethod
    def open(cls, uri: str | os.PathLike[str], *, images: str | os.PathLike[str] | None = None) -> "ObjectDatabase":
        """Open a database to read or write.

        Args:
            uri: a folder, or a URL of object storage (s3://bucket/name).
            images: where the folder of images is now, if it is not where it was when it was indexed.

        Raises:
            DataError: there is none, or one of another format.
            ImportError: LanceDB is not installed.
        """
        place = as_uri(uri)
        if not is_remote(place):
            require(Path(place))
        connection = _connect(place)
        if not _is_made(connection, _ABOUT):
            raise DatabaseError(
                f"{place} holds no database of objects: make one with cribo index --images DIR --db {place}"
            )
        info = _read_info(place, connection)
        return cls(place, connection, info, Path(images or info.root))

    @classmethod
    def create(cls, uri: str | os.PathLike[str], info: DatabaseInfo) -> "ObjectDatabase":
        """Make an empty database.

        Raises:
            DatabaseError: there is something else, or a database already.
            ImportError: LanceDB is not installed.
        """
        place = as_uri(uri)
        connection = _connect(place)
        if _is_made(connection, _ABOUT):
            raise DatabaseError(f"{place} already contains a database: open it, or use another --db")
        require_free(place)
        # What a making that was cut short has left is empty and made again.
        tables = ((_OBJECTS, _objects_schema(info.dim)), (_IMAGES, _images_schema()))
        for name, _ in tables:
            if _is_made(connection, name) and connection.open_table(name).count_rows():
                raise DatabaseError(f"{place} contains a table {name!r} that cribo did not create: use another --db")
        for name in _tables(connection) & {_OBJECTS, _IMAGES, _ABOUT}:
            connection.drop_table(name)
        for name, schema in tables:
            connection.create_table(name, schema=schema)
        _write_info(connection, info, mode="create")
        return cls(place, connection, info, Path(info.root))

    def require_encoder(self, encoder: PatchEncoder, name: str) -> None:
        """Refuse features of another backbone, or of other blocks, than the database holds.

        Raises:
            ConfigError: it was built with others; the message names both.
        """
        if encoder.identity != self.info.identity:
            source = self.info.config["source"]
            raise ConfigError(
                f"{self.uri} was built with the backbone {self.info.backbone_name} ({source}, "
                f"{_short(self.info.identity)}), not with {name} ({_short(encoder.identity)}): vectors of different "
                f"backbones or blocks cannot be compared. Use --backbone {source} as it was then, or build another "
                "database with cribo index --db ELSEWHERE"
            )

    def require_settings(self, settings: ObjectSettings) -> None:
        """Refuse to put objects of another kind beside those that are there.

        Raises:
            ConfigError: it was built with other settings; the message names them.
        """
        theirs, ours = dataclasses.asdict(self.info.settings), dataclasses.asdict(settings)
        different = [name for name in ours if ours[name] != theirs[name]]
        if different:
            said = ", ".join(f"{name} {theirs[name]} (asked for: {ours[name]})" for name in different)
            raise ConfigError(
                f"{self.uri} was built with {said}: leave these options out to go on with it, or build another "
                "database with cribo index --db ELSEWHERE"
            )

    # ------------------------------------------------------------------ reading

    def __len__(self) -> int:
        """Number of objects."""
        counts = self._read(lambda: self._images.search().select(["objects"]).to_arrow())["objects"]
        return sum(counts.to_pylist())

    def count_images(self) -> int:
        """Number of image files, unreadable ones among them."""
        return self._read(lambda: self._images.count_rows())

    @property
    def num_rows(self) -> int:
        """Rows of the table of objects, those that nobody will read among them; quicker than the length."""
        return self._read(lambda: self._objects.count_rows())

    def images(self) -> list[IndexedImage]:
        """All images, unreadable ones among them, by path."""
        rows = self._read(lambda: self._images.search().select(list(IndexedImage._fields)).to_arrow())
        return sorted(_image_rows(rows))

    def image(self, path: str) -> IndexedImage | None:
        """An image by its path below the root; None if it is not indexed."""
        found = self._images_where(f"path = {_quoted(path)}")
        return found[0] if found else None

    def objects_of(self, image: str) -> list[ImageObject]:
        """The objects of an image, by number; none if it is not indexed or unreadable.

        Args:
            image: its path below the root.
        """
        row = self.image(image)
        if row is None:
            return []
        columns = [*_OBJECT_COLUMNS, "vector"]
        query = f"entry = {row.entry}"
        found = self._read(lambda: self._objects.search().where(query).select(columns).to_arrow())
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
        """The objects most similar to each of some vectors, by cosine, the most similar first.

        Args:
            vectors: (Q, D), of any length but 0.
            k: how many; fewer are found where there are fewer.
            exclude_image: path of an image whose objects shall not be found.
            path: pattern of the images' paths, as in a shell; `*` also matches `/`. All objects of such images are
                compared.
            one_per_image: find only the most similar object of each image.
            exact: compare with every object although there is an index.

        Raises:
            ValueError: k out of range, or vectors of another shape, zero or not finite.
            DatabaseError: there are no objects.
        """
        vectors = self._checked(vectors, k)
        own = None if exclude_image is None else self.image(exclude_image)
        excluded = -1 if own is None else own.entry
        available = self.num_rows
        if not available:
            raise DatabaseError(
                f"{self.uri} holds no objects: index images with cribo index --images DIR --db {self.uri}"
            )
        limit = min(available, k + (own.objects if own is not None else 0))
        found: list[list[FoundObject]] = [[] for _ in vectors]
        waiting = list(range(len(vectors)))
        while waiting:
            rows = self._nearest(vectors[waiting], limit, path, exact=exact)
            current = self._current_entries({row["entry"] for several in rows for row in several})
            for query, several in zip(waiting, rows, strict=True):
                shown = [row for row in several if row["entry"] in current and row["entry"] != excluded]
                shown = [row for row in shown if path is None or fnmatchcase(row["image"], path)]
                if one_per_image:
                    first: dict[str, dict[str, Any]] = {}
                    for row in shown:
                        first.setdefault(row["image"], row)
                    shown = list(first.values())
                found[query] = [_found(row) for row in shown[:k]]
            if limit == available:
                break
            waiting = [query for query in waiting if len(found[query]) < k]
            limit = min(available, 4 * limit)
        return found

    def is_changed(self, image: IndexedImage) -> str:
        """How an image's file differs from what was indexed: `missing`, `changed`, or nothing.

        By its size and time; the content is not read.
        """
        try:
            status = (self.root / image.path).stat()
        except OSError:
            return "missing"
        same = (status.st_size, status.st_mtime_ns) == (image.size_bytes, image.mtime_ns)
        return "" if same else "changed"

    def images_at(self, paths: Sequence[str]) -> dict[str, IndexedImage]:
        """Some images by their paths; those that are not indexed are left out."""
        wanted = sorted(set(paths))
        parts = (wanted[start : start + _NAMES_AT_ONCE] for start in range(0, len(wanted), _NAMES_AT_ONCE))
        rows = (self._images_where(f"path IN ({', '.join(map(_quoted, part))})") for part in parts)
        return {row.path: row for part in rows for row in part}

    def sample_vectors(self, number: int, seed: int = 0) -> Float[np.ndarray, "n d"]:
        """Vectors of some objects, drawn uniformly without repetition."""
        rows = self.num_rows
        places = np.random.default_rng(seed).choice(rows, size=min(number, rows), replace=False)
        found = self._read(lambda: self._objects.take_offsets(sorted(places.tolist())).select(["vector"]).to_arrow())
        return _vectors(found["vector"])

    def image_vectors(self) -> dict[str, Float[np.ndarray, " d"]]:
        """The mean of the vectors of each image's objects, weighted by area; images without objects are left out."""
        current = {image.entry: image.path for image in self.images() if image.objects}

        def read() -> dict[str, Float[np.ndarray, " d"]]:
            sums = {path: np.zeros(self.info.dim, dtype=np.float32) for path in current.values()}
            areas = dict.fromkeys(sums, 0)
            for batch in self._objects.search().select(["entry", "area", "vector"]).to_batches():
                vectors = batch["vector"].flatten().to_numpy().reshape(len(batch), -1)
                entries, sizes = batch["entry"].to_pylist(), batch["area"].to_pylist()
                for entry, area, vector in zip(entries, sizes, vectors, strict=True):
                    if entry in current:
                        sums[current[entry]] += area * vector
                        areas[current[entry]] += area
            return {path: total / areas[path] for path, total in sums.items()}

        return self._read(read)

    def size_bytes(self) -> int | None:
        """What it takes on disk; None for object storage."""
        if is_remote(self.uri):
            return None
        return sum(path.stat().st_size for path in Path(self.uri).rglob("*") if path.is_file())

    # ------------------------------------------------------------------ writing

    def put(self, images: Sequence[tuple[IndexedImage, Sequence[ImageObject]]], *, replaced: Sequence[int]) -> None:
        """Write images with their objects, those that are there already anew.

        Args:
            images: with entries of `new_entry`.
            replaced: entries of these images so far, whose objects go.
        """
        objects = [(image, found) for image, several in images for found in several]
        if objects:
            with self._writing():
                self._objects.add(_objects_table(objects, self.info.dim))
        self.put_rows([image for image, _ in images])
        self.drop_objects(replaced)

    def put_rows(self, images: Sequence[IndexedImage]) -> None:
        """Write rows of images, whose objects are there, over those of the same path."""
        merge = self._images.merge_insert("path").when_matched_update_all().when_not_matched_insert_all()
        with self._writing():
            merge.execute(_images_table(images))

    def drop_images(self, images: Sequence[IndexedImage]) -> None:
        """Remove images and their objects."""
        for start in range(0, len(images), _NAMES_AT_ONCE):
            part = images[start : start + _NAMES_AT_ONCE]
            with self._writing():
                self._images.delete(f"path IN ({', '.join(_quoted(image.path) for image in part)})")
        self.drop_objects([image.entry for image in images])

    def drop_objects(self, entries: Sequence[int]) -> None:
        """Remove the objects of some entries, which no row of an image names."""
        for start in range(0, len(entries), _NAMES_AT_ONCE):
            part = entries[start : start + _NAMES_AT_ONCE]
            with self._writing():
                self._objects.delete(f"entry IN ({', '.join(map(str, part))})")

    def move(self, root: str, images: str) -> None:
        """Note that the folder of the images is elsewhere now.

        Args:
            root: the folder, absolute.
            images: it, or a text file in it that lists images.
        """
        self.info = dataclasses.replace(self.info, root=root, images=images)
        self.root = Path(root)
        with self._writing():
            _write_info(_connect(self.uri), self.info, mode="overwrite")

    def mend(self) -> list[str]:
        """After a writer that was killed: remove objects without an image, and images without all of their objects.

        Returns:
            paths of images that have to be indexed again. No other process may be writing.
        """
        images = self.images()
        known = {image.entry for image in images}
        entries, counts = np.unique(self._all_entries(), return_counts=True)
        held = dict(zip(entries.tolist(), counts.tolist(), strict=True))
        self.drop_objects([entry for entry in held if entry not in known])
        broken = [image for image in images if held.get(image.entry, 0) != image.objects]
        self.drop_images(broken)
        return [image.path for image in broken]

    def tidy(self, *, alone: bool, keep_versions: bool = False) -> None:
        """Merge small files, remove old versions, add new rows to the indices, and create missing indices of the keys.

        Args:
            alone: no other process writes, so that what a killed one has left can go.
            keep_versions: keep versions of the last week.
        """
        from lancedb.index import BTree

        age = _KEPT_VERSIONS if keep_versions else timedelta(0) if alone else _OLD_VERSIONS
        for table in (self._objects, self._images):
            with self._writing(), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # it warns of what `alone` says
                table.optimize(cleanup_older_than=age, delete_unverified=alone and not keep_versions)
        for table, column in ((self._images, "path"), (self._images, "entry"), (self._objects, "entry")):
            if table.count_rows() and f"{column}_idx" not in {index.name for index in table.list_indices()}:
                with self._writing():
                    table.create_index(column, config=BTree())

    def has_index(self) -> bool:
        """Whether there is a vector index."""
        return _INDEX in {index.name for index in self._read(lambda: self._objects.list_indices())}

    def build_index(self) -> None:
        """Make the vector index, or make it anew; objects that are added later are found beside it."""
        from lancedb.index import IvfFlat

        config = IvfFlat(distance_type="cosine", target_partition_size=_PARTITION)
        with self._writing():
            self._objects.create_index("vector", config=config, name=_INDEX, replace=True)

    # ------------------------------------------------------------------ inside

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """What LanceDB says of a full disk or a lost connection, as the error that it is."""
        try:
            yield
        except RuntimeError as error:
            reason = _reason(error)
            raise OSError(f"cannot write to {self.uri}: {reason}; what was written before is kept") from error

    def _read(self, ask: Callable[[], T]) -> T:
        """What a question gives; asked again where a writer has removed the version that it was reading."""
        try:
            return ask()
        except (RuntimeError, OSError):
            try:
                self._objects.checkout_latest()
                self._images.checkout_latest()
                return ask()
            except (RuntimeError, OSError) as error:
                raise DatabaseError(
                    f"{self.uri} cannot be read: {_reason(error)}; try again, or build it anew with cribo index "
                    "--db ELSEWHERE"
                ) from error

    def _checked(self, vectors: Float[np.ndarray, "q d"], k: int) -> Float[np.ndarray, "q d"]:
        vectors = np.asarray(vectors, dtype=np.float32)
        if vectors.ndim != 2 or vectors.shape[1] != self.info.dim:
            raise InputError(f"vectors must have the shape (Q, {self.info.dim}), got {vectors.shape}")
        if k < 1:
            raise InputError(f"k must be >= 1, got {k}")
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        if not np.isfinite(vectors).all() or not lengths.all():
            raise InputError("vectors must be finite and have a length above 0, for they are compared by cosine")
        return vectors / lengths

    def _nearest(
        self, vectors: Float[np.ndarray, "q d"], limit: int, path: str | None, *, exact: bool
    ) -> list[list[dict[str, Any]]]:
        """Rows of the table nearest to each vector, of images whose paths may match a pattern."""

        def ask() -> Any:
            query = self._objects.search(vectors, vector_column_name="vector", query_type="vector")
            query = query.distance_type("cosine").limit(limit).select([*_OBJECT_COLUMNS, "_distance"])
            if path is not None:
                query = query.where(f"image LIKE {_quoted(_like(path))}", prefilter=True)
            is_exact = exact or path is not None  # an index may hold too few that match in the parts it looks into
            return (query.bypass_vector_index() if is_exact else query.nprobes(_PROBES)).to_arrow()

        rows = self._read(ask).to_pylist()
        found: list[list[dict[str, Any]]] = [[] for _ in vectors]
        for row in rows:
            found[row.get("query_index", 0)].append(row)
        for several in found:
            several.sort(key=lambda row: (row["_distance"], row["image"], row["number"]))
        return found

    def _current_entries(self, entries: set[int]) -> set[int]:
        """Those of some entries that a row of an image names."""
        wanted = sorted(entries)
        current: set[int] = set()
        for start in range(0, len(wanted), _NAMES_AT_ONCE):
            part = ", ".join(map(str, wanted[start : start + _NAMES_AT_ONCE]))
            current.update(image.entry for image in self._images_where(f"entry IN ({part})"))
        return current

    def _images_where(self, condition: str) -> list[IndexedImage]:
        columns = list(IndexedImage._fields)
        return list(_image_rows(self._read(lambda: self._images.search().where(condition).select(columns).to_arrow())))

    def _all_entries(self) -> Int64[np.ndarray, " n"]:
        return self._read(lambda: self._objects.search().select(["entry"]).to_arrow())["entry"].to_numpy()


# Objects of a partition of the index on average, and partitions that are compared with a query.
_PARTITION, _PROBES = 2048, 40
_OBJECT_COLUMNS = (
    *("entry", "image", "number", "mask", "grid_height", "grid_width", "height", "width"),
    *("x0", "y0", "x1", "y1", "area"),
)


def new_entry() -> int:
    """A number for a state of a file that no other state has: of 62 random bits."""
    return secrets.randbits(62)


def holds_database(uri: str | os.PathLike[str]) -> bool:
    """Whether there is a database of objects at a place, of whatever format.

    Raises:
        ImportError: LanceDB is not installed.
    """
    place = as_uri(uri)
    if not is_remote(place) and not Path(place).is_dir():
        _lancedb()
        return False
    return _is_made(_connect(place), _ABOUT)


def require_free(uri: str | os.PathLike[str]) -> None:
    """Refuse a folder that holds anything but what the making of a database may have left; URLs are not looked at.

    Raises:
        DatabaseError: it holds something else, or is a file.
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
    """Whether a place is a URL of object storage."""
    return "://" in uri


def as_uri(uri: str | os.PathLike[str]) -> str:
    """A folder with the home directory written out, or a URL as it is."""
    text = os.fspath(uri)
    return text if is_remote(text) else str(Path(text).expanduser())


def _lancedb() -> Any:
    try:
        import lancedb
    except ImportError as error:
        raise MissingPackage('object search needs LanceDB: pip install "cribo-ssl[search]"') from error
    return lancedb


def _connect(place: str) -> Any:
    # Every question looks for what others have committed since.
    try:
        return _lancedb().connect(place, read_consistency_interval=timedelta(0))
    except (RuntimeError, ValueError, OSError) as error:
        raise DatabaseError(f"{place} cannot be opened: {_reason(error)}: check the place, and your keys") from error


def _tables(connection: Any) -> set[str]:
    try:
        return set(connection.list_tables(limit=1000).tables)
    except (RuntimeError, OSError) as error:  # of object storage: no such bucket, no answer, no right to look
        raise ConnectionError(f"{connection.uri} cannot be read: {_reason(error)}") from error


def _is_made(connection: Any, name: str) -> bool:
    """Whether a table is there whole: it is listed as soon as its folder is."""
    if name not in _tables(connection):
        return False
    try:
        connection.open_table(name)
    except (ValueError, FileNotFoundError):  # what LanceDB says of a table without any version
        return False
    return True


def _reason(error: Exception) -> str:
    """What a storage says is wrong, without the places in its code."""
    said = re.search("<Message>(.*?)</Message>", str(error))
    return said[1] if said else textwrap.shorten(str(error).partition("\n")[0], 200)


def _read_info(place: str, connection: Any) -> DatabaseInfo:
    try:
        content: Mapping[str, Any] = json.loads(connection.open_table(_ABOUT).to_arrow()["json"][0].as_py())
        version = content["format"]
        if version != _FORMAT:
            raise DatabaseError(
                f"{place} has the format {version}, this version of cribo reads {_FORMAT}: build it anew with "
                "cribo index"
            )
        names = [field.name for field in dataclasses.fields(DatabaseInfo)]
        values = {name: content[name] for name in names if name in content}
        blocks = None if content.get("blocks") is None else tuple(content["blocks"])
        return DatabaseInfo(**{**values, "blocks": blocks, "settings": ObjectSettings(**content["settings"])})
    except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        foreign = f"{place} contains a table {_ABOUT!r} that cribo did not create: use another --db"
        raise DatabaseError(foreign) from error


def _write_info(connection: Any, info: DatabaseInfo, *, mode: Literal["create", "overwrite"]) -> None:
    import pyarrow as pa

    text = json.dumps({"format": _FORMAT, **dataclasses.asdict(info)})
    connection.create_table(_ABOUT, pa.table({"json": [text]}), mode=mode)


def _short(identity: str | None) -> str:
    return "without identity" if identity is None else identity[:12]


def _like(pattern: str) -> str:
    """A pattern of SQL that matches at least what a pattern of a shell does."""
    return re.sub(r"\[.+?\]|[?\\]", "_", pattern).replace("*", "%")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# ------------------------------------------------------------------ rows


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
            *((name, small) for name in ("grid_height", "grid_width", "height", "width", "x0", "y0", "x1", "y1")),
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


def _image_rows(table: Any) -> Iterator[IndexedImage]:
    columns = [table[name].to_pylist() for name in IndexedImage._fields]
    return (IndexedImage(*values) for values in zip(*columns, strict=True))


def _objects_table(objects: Sequence[tuple[IndexedImage, ImageObject]], dim: int) -> Any:
    import pyarrow as pa

    vectors = np.concatenate([each.vector for _, each in objects])
    columns: dict[str, Any] = {
        "entry": [image.entry for image, _ in objects],
        "image": [image.path for image, _ in objects],
        "number": [each.number for _, each in objects],
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors), dim),
        "mask": [each.mask.counts for _, each in objects],
        "area": [each.area for _, each in objects],
    }
    for place, name in enumerate(("grid_height", "grid_width")):
        columns[name] = [each.mask.grid[place] for _, each in objects]
    for place, name in enumerate(("height", "width")):
        columns[name] = [each.mask.image[place] for _, each in objects]
    for place, name in enumerate(("x0", "y0", "x1", "y1")):
        columns[name] = [each.box[place] for _, each in objects]
    return pa.table(columns, schema=_objects_schema(dim))


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


def _found(row: Mapping[str, Any]) -> FoundObject:
    return FoundObject(1.0 - row["_distance"], row["image"], _object_from(row))


def _vectors(column: Any) -> Float[np.ndarray, "n d"]:
    """A column of vectors as a matrix."""
    parts = [chunk.flatten().to_numpy().reshape(len(chunk), -1) for chunk in column.chunks]
    return np.concatenate(parts)
