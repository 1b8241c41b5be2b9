"""The unit of work of `cribo index`: from a batch of encoded images to their objects."""

import hashlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from cribo.apps.search.database import SIDES
from cribo.base.devices import resolve_threads
from cribo.base.errors import UnreadableImage
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.reading import EncodedImage, TooManyPixels
from cribo.data.sources.collection import rows_of
from cribo.features.config import BackboneSource, ObjectSettings
from cribo.features.encoder import Encoder, map_by_size
from cribo.features.object_extraction import PreparedImage, extract_prepared, read_prepared
from cribo.features.objects import ImageObject
from cribo.features.prefetching import prefetch_parts
from cribo.features.spread.parts import ImagePart

READ_AHEAD = 4  # batches; images of equal size among them are encoded together
_PLACES = (*SIDES, "area")


@dataclass(frozen=True)
class ExtractedImage:
    """The objects of an image.

    Attributes:
        name: name of the image.
        sha256: hash of its content; "" if it could not be read.
        size: (height, width) in pixels; (0, 0) for an unreadable or unchanged image.
        objects: its objects, in descending order of area.
        error: reason why it is unreadable; "" if it is readable.
        passing: whether the error may be temporary.
        unchanged: whether the content is that of the stored results, so that it was not extracted.
    """

    name: str
    sha256: str
    size: tuple[int, int] = (0, 0)
    objects: tuple[ImageObject, ...] = ()
    error: str = ""
    passing: bool = False
    unchanged: bool = False


class _Read(NamedTuple):
    """An image ready for the encoder, or the result if it is not extracted."""

    name: str
    sha256: str
    prepared: PreparedImage | None
    result: ExtractedImage | None = None

    @property
    def size(self) -> tuple[int, ...]:
        """Shape of the pixels; () without pixels."""
        return () if self.prepared is None else tuple(self.prepared.pixels.shape)


class ObjectExtractor:
    """Finds the objects of batches of images; can be sent to other processes, where it opens the backbone.

    Args:
        backbone: source of the backbone; or an encoder.
        blocks: 1-based indices of the blocks whose features are concatenated. [the last]
        settings: settings that define objects.
        reading: how images are read.
        batch_size: number of images of equal size to encode at once.
        workers: number of threads that read images. [half of the cores]
        device: such as cuda:0. [the first GPU of the process, else the CPU]

    Example:
        >>> extract = ObjectExtractor("mean-colour", device="cpu")
        >>> dataset.map_batches(extract, batch_size=256)  # Ray Data  # doctest: +SKIP
        >>> sorted(extract({"image": np.array(["street.jpg"])}))  # doctest: +SKIP
        ['area', 'error', 'grid_height', 'grid_width', 'height', 'image', 'mask', 'number', 'vector', ...]
    """

    def __init__(
        self,
        backbone: BackboneSource | str | Encoder,
        *,
        blocks: Sequence[int] | None = None,
        settings: ObjectSettings | None = None,
        reading: Reading = DEFAULT_READING,
        batch_size: int = 16,
        workers: int | None = None,
        device: str | None = None,
    ) -> None:
        given = isinstance(backbone, Encoder)
        self.encoder = backbone if given else Encoder(backbone, blocks=blocks, device=device)
        self.settings = settings or ObjectSettings()
        self.reading = reading
        self.batch_size, self.workers = batch_size, workers

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Find the objects of a batch of rows, as in `map_batches` of Ray Data.

        Args:
            batch: `image`, names of images, and `bytes`, the contents of their files; without it, the names are paths
                or URLs.

        Returns:
            One row for each object, in the order of the images: `image`; `number`, in descending order of area;
            `vector` (N, D), of unit length; `mask`, COCO's run lengths over the grid of patches; `grid_height`,
            `grid_width`, `height`, `width`, the box `x0`, `y0`, `x1`, `y1`, and `area`, in pixels; and `error`. An
            image that cannot be read has one row with the reason in `error`, number -1 and NaN in `vector`.

        Raises:
            DataError: the batch has no column `image`.
        """
        rows: list[dict[str, Any]] = []
        nothing = {"number": -1, "vector": np.full(self.encoder.dim, np.nan, dtype=np.float32), "mask": b""}
        [images] = self.stream([ImagePart(rows_of(batch, reading=self.reading))])
        for image in images:
            if image.error:
                rows.append({"image": image.name, **nothing, **dict.fromkeys(_PLACES, 0), "error": image.error})
            for each in image.objects:
                places = dict(zip(_PLACES, (*each.mask.grid, *each.mask.image, *each.box, each.area), strict=True))
                own = {"number": each.number, "vector": each.vector, "mask": each.mask.counts}
                rows.append({"image": image.name, **own, **places, "error": ""})
        kinds = {"image": np.str_, "error": np.str_, "mask": np.object_, "vector": np.float32}
        names = ["image", *nothing, *_PLACES, "error"]
        columns = {name: np.array([row[name] for row in rows], dtype=kinds.get(name, np.int64)) for name in names}
        return {**columns, "vector": columns["vector"].reshape(-1, self.encoder.dim)}

    def stream(self, parts: Iterable[ImagePart]) -> Generator[list[ExtractedImage], None, None]:
        """Yield the images of each part, in order, with their objects; read images of the next parts meanwhile."""
        self.encoder.open()  # before the threads use it
        read = prefetch_parts(
            self._read,
            parts,
            threads=resolve_threads(self.workers),
            ahead=READ_AHEAD * self.batch_size,
            nbytes=lambda one: getattr(one.prepared, "nbytes", 0),
        )
        with closing(read):
            for _, images in read:
                results: list[ExtractedImage] = []
                while group := list(islice(images, READ_AHEAD * self.batch_size)):
                    results += self._extract(group)
                yield results

    def _extract(self, group: Sequence[_Read]) -> list[ExtractedImage]:
        """Return the objects of images that were read, without the features of their patches, which are large."""

        def extract(batch: list[_Read]) -> Iterable[ExtractedImage]:
            if batch[0].result is not None:  # they have no pixels
                return [image.result for image in batch if image.result is not None]
            prepared = [image.prepared for image in batch if image.prepared is not None]
            found = extract_prepared(self.encoder, prepared, self.settings)
            return [
                ExtractedImage(image.name, image.sha256, (objects.height, objects.width), objects.objects)
                for image, objects in zip(batch, found, strict=True)
            ]

        return map_by_size(extract, group, lambda image: image.size, lambda _: self.batch_size)

    def _read(self, part: ImagePart, index: int) -> _Read:
        name = part.images.name(index)
        try:
            content = part.images.read(index).content
        except UnreadableImage as error:
            return _not_extracted(ExtractedImage(name, "", error=error.reason))
        except OSError as error:
            return _not_extracted(ExtractedImage(name, "", error=error.strerror or str(error), passing=True))
        sha256 = hashlib.sha256(content).hexdigest()
        if part.is_unchanged(index, sha256):
            return _not_extracted(ExtractedImage(name, sha256, unchanged=True))
        try:
            image = EncodedImage(name, content)
            prepared = read_prepared(image, self.encoder, self.settings, reading=self.reading)
        except UnreadableImage as error:
            # Images with too many pixels are tried again: the user can raise the limit.
            passing = isinstance(error, TooManyPixels)
            return _not_extracted(ExtractedImage(name, sha256, error=error.reason, passing=passing))
        return _Read(name, sha256, prepared)


def _not_extracted(result: ExtractedImage) -> _Read:
    return _Read(result.name, result.sha256, None, result)
