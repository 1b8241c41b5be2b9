"""The images of a database of objects, by number: names from a browser are never paths."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.data.reading import UnreadableImage, read_reduced
from cribo.explorer.uploads import Refused
from cribo.object_search import ImageObject, IndexedImage, ObjectDatabase


class ShownObject(NamedTuple):
    """An object that was found.

    Attributes:
        similarity: cosine with what was asked for.
        name: of its image.
        object: what it is.
    """

    similarity: float
    name: str
    object: ImageObject


class Collection:
    """Images with their objects: those that there were when the page was started.

    Args:
        database: of the objects.
        max_pixels: larger images are not decoded.

    Raises:
        ValueError: it holds no image with an object.
    """

    def __init__(self, database: ObjectDatabase, *, max_pixels: int) -> None:
        self.database = database
        self.max_pixels = max_pixels
        self._images = [image for image in database.images() if image.objects]
        if not self._images:
            raise ValueError(
                f"{database.uri} holds no objects: index images with cribo index --images DIR --db {database.uri}"
            )

    def __len__(self) -> int:
        """How many images there are."""
        return len(self._images)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {image.path: number for number, image in enumerate(self._images)}

    def image(self, number: int) -> IndexedImage:
        """An image by its number.

        Raises:
            Refused: there is none of this number.
        """
        if not 0 <= number < len(self):
            raise Refused(f"The collection has images 0 to {len(self) - 1}, and no image {number}.")
        return self._images[number]

    def name(self, number: int) -> str:
        """What an image is called: its path below the folder of the collection."""
        return self.image(number).path

    def number(self, name: str) -> int | None:
        """The number of an image by its name; None if it is not in the collection."""
        return self._numbers.get(name)

    def objects(self, number: int) -> list[ImageObject]:
        """The objects of an image, the largest first."""
        return self.database.objects_of(self.name(number))

    def load(self, number: int, longest: int) -> UInt8[Tensor, "3 h w"]:
        """An image, decoded at no more than twice the size at which it is shown, where that saves work.

        Args:
            number: of the image.
            longest: side at which it is shown, in pixels.

        Raises:
            Refused: it is gone, has changed since it was indexed, leads out of the folder, or cannot be read.
        """
        image = self.image(number)
        root = self.database.root.resolve()
        path = (root / image.path).resolve()
        if not path.is_relative_to(root):
            raise Refused(f"{image.path} leads out of the folder of the collection, and is not shown.")
        if trouble := self._trouble(number):
            said = "is not in its folder any more" if trouble == "missing" else "has changed since it was indexed"
            raise Refused(f"{image.path} {said}: bring the database up to date with cribo index.")

        def reduction(height: int, width: int) -> int:
            return next((factor for factor in (8, 4, 2) if max(height, width) >= 2 * factor * longest), 1)

        try:
            return read_reduced(path, reduction, max_pixels=self.max_pixels)[0]
        except UnreadableImage as error:
            raise Refused(f"{image.path} cannot be read: {error.reason}.") from error

    def _trouble(self, number: int) -> str:
        """How an image's file differs from what was indexed, at the start or since: as `ObjectDatabase.is_changed`."""
        trouble = self.database.is_changed(self._images[number])
        if trouble and (row := self.database.image(self.name(number))) is not None:
            trouble = self.database.is_changed(row)
            if not trouble:
                self._images[number] = row
        return trouble

    def nearest(self, vector: Float[np.ndarray, " d"], count: int, *, without: int | None) -> Sequence[ShownObject]:
        """The objects that are most like a vector.

        Args:
            vector: of an object.
            count: how many.
            without: an image whose objects are left out.
        """
        excluded = None if without is None else self.name(without)
        found = self.database.search(vector[None], count, exclude_image=excluded)[0]
        return [ShownObject(each.similarity, each.image, each.object) for each in found]
