"""Division of a collection into parts, the units that are written, repeated after a failure, and reported."""

from collections.abc import Sequence
from dataclasses import dataclass

from cribo.data.sources.collection import ImageCollection

_LEAST_PARTS = 64
_LEAST_IMAGES = 16


@dataclass(frozen=True)
class ImagePart:
    """A part of a collection.

    Attributes:
        images: the images.
        stored: SHA-256 of the content of each image for which there are results, or "": an image with this content
            needs no work. Empty if there are no results.
    """

    images: ImageCollection
    stored: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.images)

    def __str__(self) -> str:
        return f"the images {self.images.name(0)} to {self.images.name(len(self) - 1)}"

    def is_unchanged(self, index: int, sha256: str) -> bool:
        """Whether there are results for an image with this content."""
        return bool(self.stored) and self.stored[index] == sha256


def part_size(images: int, *, most: int) -> int:
    """Return the number of images per part.

    An interruption loses a part, so parts are small; each costs a file and a message, so they are not smaller than a
    64th of the collection, or than 16 images. The size does not depend on workers and batches, so that work can be
    continued with others.

    Args:
        images: size of the collection.
        most: maximum.

    Example:
        >>> [part_size(images, most=512) for images in (100, 3539, 10**6)]
        [16, 55, 512]
    """
    return min(most, max(_LEAST_IMAGES, images // _LEAST_PARTS))
