"""Search for the objects most similar to a query object, drawn as in the paper's matching figures."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.apps.search import FoundObject, ImageObject, extract_objects
from cribo.base.painting import outline_region
from cribo.explorer.collection import Collection
from cribo.explorer.network import SharedNetwork
from cribo.explorer.pictures import SHOWN, as_shown
from cribo.explorer.text import as_text
from cribo.explorer.uploads import Refused

PAGE = 24
"""Images per page of the collection."""

_THUMBNAIL = 192
_MATCH = 320
_FOUND_IMAGES = 64  # uploaded pictures whose objects are cached

Captioned = tuple[UInt8[np.ndarray, "h w 3"], str]


@dataclass(frozen=True, eq=False)
class QueryImage:
    """An image with objects to search for.

    Attributes:
        image: the image at the shown size.
        objects: its objects, largest first.
        number: number in the collection; None for an uploaded picture.
        name: name in messages.
    """

    image: UInt8[np.ndarray, "h w 3"]
    objects: Sequence[ImageObject]
    number: int | None
    name: str

    def object(self, number: int) -> ImageObject:
        """Return an object by its number, clamped to the valid range.

        Raises:
            Refused: the image has no objects.
        """
        if not self.objects:
            raise Refused(f"No objects were found in {self.name}.")
        return self.objects[min(max(number, 0), len(self.objects) - 1)]

    def object_at(self, x: float, y: float) -> int:
        """Return the number of the object at a point of the shown picture.

        Raises:
            Refused: there is no object at this point.
        """
        height, width = self.image.shape[:2]
        for each in self.objects:
            if each.mask.pixels((height, width))[_within(y, height), _within(x, width)]:
                return each.number
        raise Refused("There is no object at this point: click on a larger region.")


class ObjectFinder:
    """Extracts objects of collection images and uploaded pictures, and searches for similar objects.

    Args:
        collection: the collection to search.
        encoder: the encoder with which the collection was indexed.
    """

    def __init__(self, collection: Collection, encoder: SharedNetwork) -> None:
        self.collection = collection
        self.encoder = encoder
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, Sequence[ImageObject]] = OrderedDict()

    @property
    def pages(self) -> int:
        """Number of pages of thumbnails."""
        return -(-len(self.collection) // PAGE)

    def thumbnails(self, page: int) -> list[Captioned]:
        """Return the thumbnails of a page; images that cannot be read are grey."""
        first = PAGE * min(max(page, 0), self.pages - 1)
        return [self._thumbnail(number) for number in range(first, min(first + PAGE, len(self.collection)))]

    def _thumbnail(self, number: int) -> Captioned:
        caption = f"{number}: {self.collection.name(number)}"
        try:
            return as_shown(self.collection.load(number, _THUMBNAIL), _THUMBNAIL), caption
        except Refused:
            return _blank(self.collection.image(number).height, self.collection.image(number).width), caption

    def of_collection(self, number: int) -> QueryImage:
        """Return a query with an image of the collection.

        Raises:
            Refused: the image does not exist or cannot be shown.
        """
        image = as_shown(self.collection.load(number, SHOWN))
        return QueryImage(image, self.collection.objects(number), number, self.collection.name(number))

    def of_picture(self, image: UInt8[Tensor, "c h w"]) -> QueryImage:
        """Return a query with an uploaded picture."""
        key = hashlib.sha256(str(tuple(image.shape)).encode() + image.contiguous().numpy().tobytes()).digest()
        with self._lock:
            objects = self._found.get(key)
        if objects is None:
            settings = self.collection.database.info.settings
            [found] = extract_objects(self.encoder.encoder, [image], settings)
            objects = found.objects
        with self._lock:
            self._found[key] = objects
            self._found.move_to_end(key)
            while len(self._found) > _FOUND_IMAGES:
                self._found.popitem(last=False)
        return QueryImage(as_shown(image), objects, None, "your picture")

    def matches(self, query: QueryImage, number: int, count: int) -> tuple[list[Captioned], Sequence[FoundObject]]:
        """Find and draw the objects most similar to an object of a query.

        Args:
            query: the query image.
            number: number of the query object.
            count: number of objects to find.
        """
        return self.like(query.object(number).vector, count, without=query.number)

    def like(
        self, vector: Float[np.ndarray, " d"], count: int, *, without: int | None = None
    ) -> tuple[list[Captioned], Sequence[FoundObject]]:
        """Find and draw the objects most similar to a vector.

        Args:
            vector: feature of an object or patch.
            count: number of objects to find.
            without: number of an image to exclude.
        """
        found = self.collection.nearest(vector, count, without=without)
        return [self._drawn(rank, match) for rank, match in enumerate(found, start=1)], found

    def _drawn(self, rank: int, match: FoundObject) -> Captioned:
        caption = f"{rank}. {match.similarity:.2f} {match.image}"
        number = self.collection.number(match.image)
        try:
            if number is None:
                raise Refused("indexed after the server was started.")
            picture = as_shown(self.collection.load(number, _MATCH), _MATCH)
        except Refused as error:
            return _blank(*match.object.mask.image), f"{caption} - {error}"
        return outline_region(picture, match.object.mask.pixels(picture.shape[:2])), caption


def query_picture(query: QueryImage, number: int) -> UInt8[np.ndarray, "h w 3"]:
    """Outline an object in a query image, and fade the other pixels."""
    inside = query.object(number).mask.pixels(query.image.shape[:2])
    return outline_region(query.image, inside)


def query_sentence(query: QueryImage, number: int, found: Sequence[FoundObject]) -> str:
    """Describe the result of a search."""
    chosen = query.object(number)
    what = (
        f"Object {chosen.number} of {len(query.objects)} in {as_text(query.name)} (counted from 0, largest first), "
        f"{chosen.share:.0%} of the image."
    )
    if not found:
        return f"{what} No matches: the collection has no other images."
    return f"{what} The nearest object is in {as_text(found[0].image)}, cosine similarity {found[0].similarity:.2f}."


def _within(place: float, pixels: int) -> int:
    return min(max(int(place), 0), pixels - 1)


def _blank(height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
    return np.full((_THUMBNAIL, max(1, round(_THUMBNAIL * width / max(height, 1))), 3), 128, dtype=np.uint8)
