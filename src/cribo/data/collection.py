"""Collections of encoded images: files, members of tar shards, rows of Parquet files, objects below a URL."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cribo.data.images import ImageSource
from cribo.data.reading import EncodedImage


class FileState(NamedTuple):
    """Size in bytes and modification time, in nanoseconds since 1970, of an image, or of the file that contains it."""

    size_bytes: int
    mtime_ns: int


class ImageCollection(ImageSource, Protocol):
    """Encoded images with names, which can be divided, pickled and opened in another process."""

    def read(self, index: int) -> EncodedImage:
        """Read the bytes of an image.

        Raises:
            OSError: the file or the storage cannot be read; it may be temporary.
            UnreadableImage: there are no bytes to read.
        """
        ...

    def state(self, index: int) -> FileState:
        """Return size and modification time, which change with the image; raises OSError if the file is gone."""
        ...

    def part(self, indices: Sequence[int]) -> "ImageCollection":
        """Return the collection of some of the images. Its pickle is small, and opening it lists no folders."""
        ...
