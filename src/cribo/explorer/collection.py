"""The images of an object database, addressed by number, so that requests never contain paths."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.apps.search import FoundObject, ImageObject, IndexedImage, ObjectDatabase
from cribo.apps.search.database import index_command
from cribo.base.errors import InputError
from cribo.data.config import Reading
from cribo.explorer.images import image_in
from cribo.explorer.uploads import Refused


class Collection:
    """Images and their objects, as of the start of the server.

    Args:
        database: database of the objects.
        reading: how images are read.

    Raises:
        ValueError: no image in the database has an object.
    """

    def __init__(self, database: ObjectDatabase, *, reading: Reading) -> None:
        self.database = database
        self.reading = reading
        self._images = [image for image in database.images() if image.objects]
        if not self._images:
            raise InputError(f"{database.uri} contains no objects: index images with {index_command(database.uri)}")

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._images)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {image.path: number for number, image in enumerate(self._images)}

    def image(self, number: int) -> IndexedImage:
        """Return an image by its number.

        Raises:
            Refused: the number is out of range.
        """
        if not 0 <= number < len(self):
            raise Refused(f"The image must be 0 to {len(self) - 1}, got {number}.")
        return self._images[number]

    def name(self, number: int) -> str:
        """Return the name of an image, its path in the folder of the collection."""
        return self.image(number).path

    def number(self, name: str) -> int | None:
        """Return the number of an image by its name; None if it is not in the collection."""
        return self._numbers.get(name)

    def objects(self, number: int) -> list[ImageObject]:
        """Return the objects of an image, largest first."""
        return self.database.objects_of(self.name(number))

    def load(self, number: int, longest: int) -> UInt8[Tensor, "c h w"]:
        """Load an image, at a reduced size if that is at least as large as shown.

        Args:
            number: number of the image.
            longest: longer side of the shown picture in pixels.

        Raises:
            Refused: the image was deleted or changed since it was indexed, is outside the folder, or cannot be read.
        """
        name = self.name(number)
        image = image_in(self.database.root, name, reading=self.reading)
        if change := self._change(number):
            what = "has been deleted" if change == "missing" else "has changed since it was indexed"
            raise Refused(f"{name} {what}: update the database with cribo index.")
        return image.read(2 * longest)

    def _change(self, number: int) -> str:
        """Return `ObjectDatabase.is_changed` of an image, which may have been indexed again since the start."""
        change = self.database.is_changed(self._images[number])
        if change and (row := self.database.image(self.name(number))) is not None:
            change = self.database.is_changed(row)
            if not change:
                self._images[number] = row
        return change

    def nearest(self, vector: Float[np.ndarray, " d"], count: int, *, without: int | None) -> Sequence[FoundObject]:
        """Find the objects most similar to a vector.

        Args:
            vector: feature of an object or patch.
            count: number of objects.
            without: number of an image to exclude.
        """
        excluded = None if without is None else self.name(without)
        return self.database.search(vector[None], count, exclude_image=excluded)[0]
