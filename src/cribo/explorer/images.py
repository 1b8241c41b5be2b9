"""Images on the page: files below a folder, addressed by number so that requests never contain paths, and uploads."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Bool, UInt8
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from cribo.base.errors import UnreadableImage
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.labelled.crops import resize_labels
from cribo.data.labelled.inputs import open_valid
from cribo.data.reading import EncodedImage, image_size, largest_factor, read_reduced, stored_page
from cribo.data.sources.images import ImageFiles
from cribo.explorer.uploads import Refused


@dataclass(frozen=True)
class PageImage:
    """An image file, or the bytes of one.

    Attributes:
        name: path below the folder of the images, separated by `/`.
        source: the file or its bytes.
        reading: how images are read.
    """

    name: str
    source: Path | EncodedImage
    reading: Reading = DEFAULT_READING

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels.

        Raises:
            Refused: the image cannot be read.
        """
        try:
            return image_size(self.source, reading=self.reading)
        except UnreadableImage as error:
            raise self._refused(error) from error

    @property
    def is_page(self) -> bool:
        """Whether the image is one page of a stack, by its name."""
        return isinstance(self.source, Path) and stored_page(self.source)[1] is not None

    @property
    def content(self) -> bytes:
        """The bytes of the image file; of a page, those of its whole stack.

        Raises:
            Refused: the file was deleted or cannot be read.
        """
        if isinstance(self.source, EncodedImage):
            return self.source.content
        try:
            return Path(stored_page(self.source)[0]).read_bytes()
        except OSError as error:
            raise Refused(f"{self.name} cannot be read: {error.strerror}.") from error

    def read(self, longest: int) -> UInt8[Tensor, "c h w"]:
        """Read the image, reduced while decoding if its longer side then still has `longest` pixels.

        Raises:
            Refused: the image cannot be read.
        """

        def reduction(height: int, width: int) -> int:
            return largest_factor(lambda factor: max(height, width) >= factor * longest)

        try:
            return read_reduced(self.source, reduction, reading=self.reading)[0]
        except UnreadableImage as error:
            raise self._refused(error) from error

    def load(self, longest: int) -> UInt8[Tensor, "c h w"]:
        """Read the image, with its longer side reduced to at most `longest` pixels.

        Raises:
            Refused: the image cannot be read.
        """
        image = self.read(longest)
        size = bounded(image.shape[1], image.shape[2], longest)
        return image if size == tuple(image.shape[1:]) else TF.resize(image, list(size), antialias=True)

    def valid(self, size: tuple[int, int]) -> Bool[Tensor, "h w"]:
        """Return which pixels have data (`read_valid`) when the image is resized to a (height, width).

        Raises:
            Refused: the image cannot be read.
        """
        try:
            valid = open_valid(self.source, self.reading)
        except UnreadableImage as error:
            raise self._refused(error) from error
        return torch.ones(size, dtype=torch.bool) if valid is None else resize_labels(valid.byte(), size).bool()

    def _refused(self, error: UnreadableImage) -> Refused:
        return Refused(f"{self.name} cannot be read: {error.reason}.")


def bounded(height: int, width: int, longest: int) -> tuple[int, int]:
    """Return the (height, width) of an image whose longer side is reduced to at most `longest` pixels.

    Example:
        >>> bounded(1536, 3072, 768), bounded(32, 48, 768)
        ((384, 768), (32, 48))
    """
    scale = min(1.0, longest / max(height, width))
    return max(1, round(scale * height)), max(1, round(scale * width))


def image_in(folder: Path, name: str, *, reading: Reading) -> PageImage:
    """Return an image of a folder.

    Raises:
        Refused: the name is a path, or a link to a file, outside the folder.
    """
    root = folder.resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise Refused(f"{name} is a link to a file outside the folder of the collection.")
    shown = path.relative_to(root) if Path(name).is_absolute() else Path(os.path.normpath(name))
    return PageImage(shown.as_posix(), path, reading)


class FolderImages:
    """The images of a folder, as of the start of the server.

    Args:
        files: the images.
    """

    def __init__(self, files: ImageFiles) -> None:
        self._files = files

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._files)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Number of each image by its name."""
        return {name: number for number, name in enumerate(self._files.names)}

    def __getitem__(self, number: int) -> PageImage:
        """Return an image by its number.

        Raises:
            Refused: the number is out of range, or the image is outside the folder.
        """
        if not 0 <= number < len(self):
            raise Refused(f"The picture must be 0 to {len(self) - 1}, got {number}.")
        return image_in(Path(self._files.folder), self._files.name(number), reading=self._files.reading)
