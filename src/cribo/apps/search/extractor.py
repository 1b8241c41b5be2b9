"""The unit of work of `cribo index`: from a batch of encoded images to their objects."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from cribo.apps.search.database import SIDES
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.reading import EncodedImage, TooManyPixels
from cribo.data.sources.collection import rows_of
from cribo.features.config import BackboneSource, ObjectSettings
from cribo.features.encoder import Encoder, map_by_size
from cribo.features.object_extraction import PreparedImage, extract_prepared, read_prepared
from cribo.features.objects import ImageObject
from cribo.features.spread.parts import ImagePart
from cribo.features.stream import Streamed, stream

READ_AHEAD = 4  # batches; images of equal size among them are encoded together
_PLACES = (*SIDES, "area")
_Found = tuple[tuple[int, int], tuple[ImageObject, ...]]  # (height, width), and objects


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
        at_once = READ_AHEAD * self.batch_size
        with closing(stream(parts, self._prepare, self._extract, at_once=at_once, workers=self.workers)) as found:
            for _, images in found:
                yield [_extracted(each) for each in images]

    def _prepare(self, file: EncodedImage, reading: Reading) -> PreparedImage:
        return read_prepared(file, self.encoder, self.settings, reading=reading)

    def _extract(self, images: Sequence[PreparedImage]) -> list[_Found]:
        """Return size and objects of images, without the features of their patches, which are large."""

        def extract(batch: list[PreparedImage]) -> list[_Found]:
            found = extract_prepared(self.encoder, batch, self.settings)
            return [((each.height, each.width), each.objects) for each in found]

        return map_by_size(extract, images, lambda image: tuple(image.pixels.shape), lambda _: self.batch_size)


def _extracted(image: Streamed[_Found]) -> ExtractedImage:
    if image.result is not None:
        return ExtractedImage(image.name, image.sha256, *image.result)
    # Images with too many pixels are tried again: the user can raise the limit.
    passing = isinstance(image.error, OSError | TooManyPixels)
    return ExtractedImage(image.name, image.sha256, error=image.reason, passing=passing, unchanged=image.unchanged)
