"""From the images of a collection to the results of a function, in order: the loop of every unit of work."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from cribo.base.devices import resolve_threads
from cribo.base.errors import UnreadableImage
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.reading import ImageContent
from cribo.data.sources.collection import rows_of
from cribo.features.prefetching import BUDGET, prefetch_parts
from cribo.features.spread.parts import ImagePart


class _Pixels(Protocol):
    @property
    def nbytes(self) -> int: ...


Pixels = TypeVar("Pixels", bound=_Pixels)
Result = TypeVar("Result")
Part = TypeVar("Part", bound=ImagePart)


@dataclass(frozen=True)
class Streamed(Generic[Result]):
    """An image with its result, or the reason why it has none.

    Attributes:
        name: name of the image.
        sha256: hash of its content; "" if the file cannot be read.
        result: what the function returned; None if the image is unreadable or unchanged.
        error: why it is unreadable; None if it is readable. An OSError may be temporary.
    """

    name: str
    sha256: str = ""
    result: Result | None = None
    error: UnreadableImage | OSError | None = None

    @property
    def unchanged(self) -> bool:
        """Whether the content is that of stored results (`ImagePart`), so that nothing was computed."""
        return self.result is None and self.error is None

    @property
    def reason(self) -> str:
        """Why it is unreadable, as text; "" if it is readable."""
        if isinstance(self.error, UnreadableImage):
            return self.error.reason
        return "" if self.error is None else self.error.strerror or str(self.error)


class _Read(NamedTuple):
    """An image that was read and prepared, or the reason why it cannot be; an unchanged image has neither."""

    name: str
    sha256: str
    pixels: _Pixels | None = None
    error: UnreadableImage | OSError | None = None


class ImageFunction(ABC, Generic[Pixels, Result]):
    """A function of images, for collections (`stream`) and for batches of rows (a call).

    It can be sent to other processes, where it opens its backbone on first use. Subclasses define how an image is
    prepared, its result, and the rows of the result.

    Args:
        batch_size: number of images of equal size to encode at once.
        workers: number of threads that read images. [half of the cores]
        at_once: number of images for which `compute` is called at once; fewer if they are large. [batch_size]
        reading: how the images of a batch of rows are read.
    """

    def __init__(
        self, batch_size: int, workers: int | None, *, at_once: int | None = None, reading: Reading = DEFAULT_READING
    ) -> None:
        self.batch_size, self.workers = batch_size, workers
        self._at_once, self._reading = at_once or batch_size, reading

    @property
    def reading(self) -> Reading:
        """How the images of a batch of rows are read."""
        return self._reading

    @abstractmethod
    def open(self) -> None:
        """Open the backbone, before threads use it."""

    @abstractmethod
    def prepare(self, file: ImageContent, reading: Reading) -> Pixels:
        """Decode the content of a file, in a thread; raise UnreadableImage if it is no image."""

    @abstractmethod
    def compute(self, images: Sequence[Pixels]) -> Iterable[Result | UnreadableImage]:
        """Return the result of each image; or an error, for a large image that is decoded here."""

    @abstractmethod
    def rows(self, image: Streamed[Result]) -> dict[str, np.ndarray]:
        """Return the rows of an image as columns; an unreadable image has one row."""

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Compute the rows of a batch of images, as in `map_batches` of Ray Data.

        Args:
            batch: `image`, names of images, and `bytes`, the contents of their files; without it, the names are paths
                or URLs.

        Returns:
            The rows of all images, in their order. An image that cannot be read has one row, with the reason in
            `error`; in other rows, `error` is "".

        Raises:
            DataError: the batch has no column `image`.
        """
        part = ImagePart(rows_of(batch, reading=self.reading))
        found = [self.rows(image) for _, images in self.stream([part]) for image in images]
        none = {name: values[:0] for name, values in self.rows(Streamed("")).items()}  # of an empty batch
        return {name: np.concatenate([values, *(rows[name] for rows in found)]) for name, values in none.items()}

    def stream(self, parts: Iterable[Part]) -> Generator[tuple[Part, Iterator[Streamed[Result]]], None, None]:
        """Yield each part of a collection with its images, in order; consume them before the next part.

        Images of the next parts are read meanwhile, within a limit on their number and size.
        """
        self.open()
        threads = resolve_threads(self.workers)
        ahead = 2 * (threads + self._at_once)
        with closing(prefetch_parts(self._read, parts, threads=threads, ahead=ahead, nbytes=_nbytes)) as reading:
            for part, images in reading:
                yield part, self._computed(images)

    def _read(self, part: ImagePart, index: int) -> _Read:
        name, sha256 = part.images.name(index), ""
        try:
            file = part.images.read(index)
            sha256 = file.sha256
            if part.is_unchanged(index, sha256):
                return _Read(name, sha256)
            return _Read(name, sha256, self.prepare(file, part.images.reading))
        except (UnreadableImage, OSError) as error:
            return _Read(name, sha256, error=error)

    def _computed(self, images: Iterator[_Read]) -> Iterator[Streamed[Result]]:
        for group in _groups(images, self._at_once):
            pixels = [each.pixels for each in group if each.pixels is not None]
            results = iter(self.compute(pixels) if pixels else ())  # pyright: ignore[reportArgumentType]
            for each in group:
                result = None if each.pixels is None else next(results)
                if isinstance(result, UnreadableImage):
                    yield Streamed(each.name, each.sha256, error=result)
                else:
                    yield Streamed(each.name, each.sha256, result, each.error)


def _nbytes(image: _Read) -> int:
    return 0 if image.pixels is None else image.pixels.nbytes


def _groups(images: Iterator[_Read], most: int) -> Iterator[list[_Read]]:
    """Yield groups of `most` images; a group of large images is smaller, and the last one may be."""
    group: list[_Read] = []
    for each in images:
        group.append(each)
        if len(group) == most or sum(map(_nbytes, group)) >= BUDGET:
            yield group
            group = []
    if group:
        yield group
