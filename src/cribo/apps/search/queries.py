"""Queries of a search: objects of an image, or a box in it, as vectors and regions."""

import logging
import os
import posixpath
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float

from cribo.apps.search.database import IndexedImage, ObjectDatabase
from cribo.base.errors import ConfigError, DatabaseError, DataError
from cribo.base.files import require
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.reading import EncodedImage, image_size, require_utf8
from cribo.features.objects import Box, ImageObject

if TYPE_CHECKING:
    from cribo.features.encoder import Encoder

log = logging.getLogger("cribo")


@dataclass(frozen=True)
class QueryPlace:
    """Part of the image to search for; at most one attribute is set.

    By default, each object of the image is a query.

    Attributes:
        point: x, y of a pixel; the query is the object that contains it.
        box: x0, y0, x1, y1 in pixels; the query is the mean of the patches inside.
        number: number of an object.
    """

    point: tuple[int, int] | None = None
    box: Box | None = None
    number: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("point", "box", "number") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError("give at most one of --point, --box and --object; without one, all objects are queries")


@dataclass(frozen=True, eq=False)
class Region:
    """A region of a query with its bounding box in pixels; `object` is None if only a box was given."""

    name: str
    vector: Float[np.ndarray, " d"]
    box: Box
    object: ImageObject | None

    def pixels(self, height: int, width: int) -> Bool[np.ndarray, "h w"]:
        """Return the mask of the region over the pixels of its image."""
        if self.object is not None:
            return self.object.mask.pixels()
        mask = np.zeros((height, width), dtype=bool)
        mask[self.box[1] : self.box[3], self.box[0] : self.box[2]] = True
        return mask


@dataclass(frozen=True, eq=False)
class Query:
    """The regions of one image to search for.

    Attributes:
        image: the image file, or its content.
        indexed: path relative to the database's root; None if the image is not in the database.
        size: (height, width) of the image in pixels.
        regions: at least one region.
    """

    image: Path | EncodedImage
    indexed: str | None
    size: tuple[int, int]
    regions: list[Region]

    @property
    def name(self) -> str:
        """Name of the image without its folder."""
        return posixpath.basename(os.fspath(self.image))


def make_query(
    database: ObjectDatabase,
    image: str,
    place: QueryPlace,
    open_encoder: Callable[[], "Encoder"],
    *,
    reading: Reading = DEFAULT_READING,
) -> Query:
    """Create the query for an image or a part of it.

    Uses the stored objects if the image is indexed and unchanged. The backbone is needed only for other images and for
    boxes.

    Args:
        database: the database to search.
        image: a file, or the path of an indexed image relative to the database's root.
        place: part of the image to search for.
        open_encoder: returns the encoder of the database; called only if it is needed.
        reading: how the image is read.

    Raises:
        MissingData: the file does not exist.
        UnreadableImage: the file is not a readable image.
        ConfigError: `place` is outside the image or contains no object.
    """
    require_utf8(image)
    file, row = _locate(database, image)
    path = os.fspath(file)
    size = image_size(file, reading=reading)
    _check_place(place, *size)
    indexed = None if row is None else row.path
    stored = row is not None and not database.is_changed(row)
    if row is not None and not stored:
        log.warning("%s has changed since it was indexed; extracting its objects again", path)
    if indexed is not None and stored and place.box is None:
        objects = database.objects_of(indexed)
        return Query(file, indexed, size, _object_regions(objects, place, path))
    from cribo.features.object_extraction import extract_prepared, read_prepared

    encoder, settings = open_encoder(), database.info.settings
    [found] = extract_prepared(encoder, [read_prepared(file, encoder, settings, reading=reading)], settings)
    if place.box is None:
        return Query(file, indexed, size, _object_regions(list(found.objects), place, path))
    name = "box " + ",".join(map(str, place.box))
    return Query(file, indexed, size, [Region(name, found.box_vector(place.box), place.box, None)])


def _object_regions(objects: list[ImageObject], place: QueryPlace, name: str) -> list[Region]:
    return [Region(f"object {each.number}", each.vector, each.box, each) for each in _chosen(objects, place, name)]


def _locate(database: ObjectDatabase, image: str) -> tuple[Path | EncodedImage, IndexedImage | None]:
    """Return an image file, or its content, and its row in the database, if any."""
    path = Path(image).expanduser()
    if path.is_file():
        rows = (database.image(name) for name in _names(path, database.root))
        return path, next((row for row in rows if row is not None), None)
    row = database.image(image)
    if row is None:
        require(path)
        raise DataError(f"{path} is not a file: give an image")
    file = database.locate(row.path)
    if isinstance(file, Path):
        require(file)
    return file, row


def _names(path: Path, root: Path) -> list[str]:
    """Return the possible names of a file in a database: relative, absolute, links resolved or not."""
    whole = Path(os.path.abspath(path))  # noqa: PTH100 (links are followed below)
    names = [whole.as_posix()]
    for place, folder in ((whole, Path(os.path.abspath(root))), (path.resolve(), root.resolve())):  # noqa: PTH100
        if place.is_relative_to(folder):
            names.append(place.relative_to(folder).as_posix())
    return list(dict.fromkeys(reversed(names)))


def _check_place(place: QueryPlace, height: int, width: int) -> None:
    if place.point is not None:
        x, y = place.point
        if not (0 <= x < width and 0 <= y < height):
            raise ConfigError(
                f"--point must lie in the image, x in 0..{width - 1} and y in 0..{height - 1}, got {x},{y}"
            )
    if place.box is not None:
        x0, y0, x1, y1 = place.box
        if x1 <= x0 or y1 <= y0:
            raise ConfigError(f"--box must be x0,y0,x1,y1 with x0 < x1 and y0 < y1, got {x0},{y0},{x1},{y1}")
        if not (x0 >= 0 and x1 <= width and y0 >= 0 and y1 <= height):
            raise ConfigError(f"--box must lie in the image of {width} x {height} pixels, got {x0},{y0},{x1},{y1}")


def _chosen(objects: list[ImageObject], place: QueryPlace, name: str) -> list[ImageObject]:
    """Return the objects selected by `place`."""
    if not objects:
        raise DatabaseError(f"{name} has no objects: search with --box")
    if place.number is not None:
        if not 0 <= place.number < len(objects):
            raise ConfigError(f"--object must be 0 to {len(objects) - 1} for {name}, got {place.number}")
        return [objects[place.number]]
    if place.point is not None:
        x, y = place.point
        hit = [each for each in objects if each.mask.contains(x, y)]
        if not hit:
            raise ConfigError(
                f"--point {x},{y} is in no object of {name}, because the region there is smaller than min_share: "
                "choose a pixel nearby, or search with --box"
            )
        return hit
    return objects
