"""What is searched for: an object of an image, or a box in it, as a vector and a region to show."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from cribo.arguments import ConfigError
from cribo.data.images import DataError, require
from cribo.data.reading import read_image
from cribo.object_search.database import DatabaseError, IndexedImage, ObjectDatabase
from cribo.object_search.extraction import Box, ImageObject, extract_prepared, read_prepared
from cribo.retrieval.encoders import PatchEncoder

log = logging.getLogger("cribo")

OpenEncoder = Callable[[], tuple[PatchEncoder, str]]
"""Gives the encoder that the database was built with, and the device that it is on; called where it is needed."""


@dataclass(frozen=True)
class QueryPlace:
    """Where in the image the query is; at most one of the three, and every object of the image without any.

    Attributes:
        point: x, y of a pixel: the object that it lies in.
        box: x0, y0, x1, y1 in pixels: the mean of the patches inside.
        number: of an object.
    """

    point: tuple[int, int] | None = None
    box: Box | None = None
    number: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("point", "box", "number") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError("give one of --point, --box and --object, or none for every object of the image")


@dataclass(frozen=True, eq=False)
class Region:
    """A region that is searched for.

    Attributes:
        name: for tables and pictures.
        vector: (D,).
        box: what encloses it, in pixels.
        object: what it is, unless it is a box.
    """

    name: str
    vector: Float[np.ndarray, " d"]
    box: Box
    object: ImageObject | None

    def pixels(self, height: int, width: int) -> Bool[np.ndarray, "h w"]:
        """Which pixels of its image belong to it."""
        if self.object is not None:
            return self.object.mask.pixels()
        mask = np.zeros((height, width), dtype=bool)
        mask[self.box[1] : self.box[3], self.box[0] : self.box[2]] = True
        return mask


@dataclass(frozen=True, eq=False)
class Query:
    """Regions of one image that are searched for.

    Attributes:
        path: of the image's file.
        indexed: its path below the database's root; None for an image that is not in the database.
        pixels: the image.
        regions: at least one.
    """

    path: Path
    indexed: str | None
    pixels: UInt8[Tensor, "3 h w"]
    regions: list[Region]


def make_query(database: ObjectDatabase, image: str, place: QueryPlace, open_encoder: OpenEncoder) -> Query:
    """Find what is searched for.

    The stored objects of an image that is indexed and unchanged are used, so that no backbone is needed; it is for
    another image, and for a box.

    Args:
        database: to search in.
        image: a file, or the path of an indexed image below the database's root.
        place: where in it.
        open_encoder: gives the backbone.

    Raises:
        MissingData: there is no such file.
        UnreadableImage: it is no image.
        ConfigError: the place lies outside of the image, or no object is there.
    """
    path, row = _locate(database, image)
    pixels = read_image(path)
    height, width = pixels.shape[1:]
    _check_place(place, height, width)
    indexed = None if row is None else row.path
    stored = row is not None and not database.is_changed(row)
    if row is not None and not stored:
        log.warning("%s has changed since it was indexed: its objects are found anew", path)
    if indexed is not None and stored and place.box is None:
        objects = database.objects_of(indexed)
        return Query(path, indexed, pixels, _object_regions(objects, place, str(path)))
    encoder, device = open_encoder()
    settings = database.info.settings
    [found] = extract_prepared(encoder, [read_prepared(path, encoder, settings)], settings, device=device)
    if place.box is None:
        return Query(path, indexed, pixels, _object_regions(list(found.objects), place, str(path)))
    name = "box " + ",".join(map(str, place.box))
    return Query(path, indexed, pixels, [Region(name, found.box_vector(place.box), place.box, None)])


def _object_regions(objects: list[ImageObject], place: QueryPlace, name: str) -> list[Region]:
    return [Region(f"object {each.number}", each.vector, each.box, each) for each in _chosen(objects, place, name)]


def _locate(database: ObjectDatabase, image: str) -> tuple[Path, IndexedImage | None]:
    """The file, and the row of the database about it."""
    path = Path(image).expanduser()
    if path.is_file():
        rows = (database.image(name) for name in _names(path, database.root))
        return path, next((row for row in rows if row is not None), None)
    row = database.image(image)
    if row is None:
        require(path)
        raise DataError(f"{path} is not a file: give an image")
    require(database.root / row.path)
    return database.root / row.path, row


def _names(path: Path, root: Path) -> list[str]:
    """What a file may be called in a database: below its folder, or from a list by its whole path; links as given."""
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
    """The objects that are meant."""
    if not objects:
        raise DatabaseError(f"{name} has no objects: search with --box")
    if place.number is not None:
        if not 0 <= place.number < len(objects):
            raise ConfigError(f"--object must be 0 to {len(objects) - 1}, the objects of {name}, got {place.number}")
        return [objects[place.number]]
    if place.point is not None:
        x, y = place.point
        hit = [each for each in objects if each.mask.contains(x, y)]
        if not hit:
            raise ConfigError(
                f"no object of {name} lies at {x},{y}, only a region too small to be one: choose a pixel beside it, "
                "or search with --box"
            )
        return hit
    return objects
