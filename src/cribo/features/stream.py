"""From the images of a collection to the results of a function, in order: the loop of every unit of work."""

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from cribo.base.devices import resolve_threads
from cribo.base.errors import UnreadableImage
from cribo.data.config import Reading
from cribo.data.reading import EncodedImage
from cribo.features.prefetching import BUDGET, prefetch_parts
from cribo.features.spread.parts import ImagePart


class _Pixels(Protocol):
    @property
    def nbytes(self) -> int: ...


Pixels = TypeVar("Pixels", bound=_Pixels)
Result = TypeVar("Result")


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
        """Whether the content is that of stored results (`ImagePart`), so that the function was not called."""
        return self.result is None and self.error is None

    @property
    def reason(self) -> str:
        """Why it is unreadable, as text; "" if it is readable."""
        if isinstance(self.error, UnreadableImage):
            return self.error.reason
        return "" if self.error is None else self.error.strerror or str(self.error)


class _Read(NamedTuple):
    """An image that was read and prepared, or why it was not; without both if it is unchanged."""

    name: str
    sha256: str
    pixels: _Pixels | None = None
    error: UnreadableImage | OSError | None = None


def stream(
    parts: Iterable[ImagePart],
    prepare: Callable[[EncodedImage, Reading], Pixels],
    function: Callable[[Sequence[Pixels]], Iterable[Result]],
    *,
    at_once: int,
    workers: int | None = None,
) -> Generator[tuple[ImagePart, Iterator[Streamed[Result]]], None, None]:
    """Yield each part with its images, in order, which must be consumed before the next part.

    Images of the next parts are read meanwhile, within a limit on their number and size.

    Args:
        parts: parts of a collection.
        prepare: decodes the content of a file, in threads; raises UnreadableImage.
        function: returns the result of each image of a sequence.
        at_once: number of images for which the function is called at once; fewer if they are large.
        workers: number of threads that read. [half of the cores]
    """

    def read(part: ImagePart, index: int) -> _Read:
        name, sha256 = part.images.name(index), ""
        try:
            file = part.images.read(index)
            sha256 = hashlib.sha256(file.content).hexdigest()
            if part.is_unchanged(index, sha256):
                return _Read(name, sha256)
            return _Read(name, sha256, prepare(file, part.images.reading))
        except (UnreadableImage, OSError) as error:
            return _Read(name, sha256, error=error)

    def results(images: Iterator[_Read]) -> Iterator[Streamed[Result]]:
        for group in _groups(images, at_once):
            pixels = [each.pixels for each in group if each.pixels is not None]
            found = iter(function(pixels) if pixels else ())  # pyright: ignore[reportArgumentType]
            for each in group:
                result = None if each.pixels is None else next(found)
                yield Streamed(each.name, each.sha256, result, each.error)

    threads = resolve_threads(workers)
    reading = prefetch_parts(read, parts, threads=threads, ahead=2 * (threads + at_once), nbytes=_nbytes)
    with closing(reading):
        for part, images in reading:
            yield part, results(images)


def _nbytes(image: _Read) -> int:
    return 0 if image.pixels is None else image.pixels.nbytes


def _groups(images: Iterator[_Read], most: int) -> Iterator[list[_Read]]:
    """Group images by `most`, or fewer if they are large."""
    group: list[_Read] = []
    for each in images:
        group.append(each)
        if len(group) == most or sum(map(_nbytes, group)) >= BUDGET:
            yield group
            group = []
    if group:
        yield group
