"""The unit of work of `cribo index`: from a batch of encoded images to their objects."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cribo.apps.search.database import SIDES
from cribo.base.errors import UnreadableImage
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.reading import ImageContent
from cribo.data.windows import LargeImage
from cribo.features.config import BackboneSource, ObjectSettings
from cribo.features.encoder import Encoder, map_by_size
from cribo.features.large_features import large_objects
from cribo.features.object_extraction import PreparedImage, extract_prepared, read_prepared_or_open
from cribo.features.objects import ImageObject
from cribo.features.stream import ImageFunction, Streamed
from cribo.features.windows import with_large

READ_AHEAD = 4  # batches; images of equal size among them are encoded together
_PLACES = (*SIDES, "area")


class Found(NamedTuple):
    """The objects of an image.

    Attributes:
        size: (height, width) in pixels.
        objects: its objects, in descending order of area.
    """

    size: tuple[int, int]
    objects: tuple[ImageObject, ...]


class ObjectExtractor(ImageFunction[PreparedImage | LargeImage, Found]):
    """Finds the objects of images, in collections or batches of rows; can be sent to other processes.

    A batch has one row for each object, in the order of the images: `image`; `number`, in descending order of area;
    `vector` (N, D), of unit length; `mask`, COCO's run lengths over the grid of patches; `grid_height`, `grid_width`,
    `height`, `width`, the box `x0`, `y0`, `x1`, `y1`, and `area`, in pixels; and `error`.

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
        super().__init__(batch_size, workers, at_once=READ_AHEAD * batch_size, reading=reading)
        given = isinstance(backbone, Encoder)
        self.encoder = backbone if given else Encoder(backbone, blocks=blocks, device=device, in_chans=reading.in_chans)
        self.settings = settings or ObjectSettings()

    def open(self) -> None:
        """Open the backbone."""
        self.encoder.open()

    def prepare(self, file: ImageContent, reading: Reading) -> PreparedImage | LargeImage:
        """Decode and resize an image; one above the limit of pixels is read when its objects are found."""
        return read_prepared_or_open(file, self.encoder, self.settings, reading=reading)

    def compute(self, images: Sequence[PreparedImage | LargeImage]) -> Iterator[Found | UnreadableImage]:
        """Return the size and the objects of images; the features of their patches are dropped, as they are large."""

        def extract(batch: list[PreparedImage]) -> list[Found]:
            return [
                Found((each.height, each.width), each.objects)
                for each in extract_prepared(self.encoder, batch, self.settings)
            ]

        def together(images: list[PreparedImage]) -> list[Found]:
            return map_by_size(extract, images, lambda image: tuple(image.pixels.shape), lambda _: self.batch_size)

        def alone(image: LargeImage) -> Found:
            return Found(image.size, large_objects(self.encoder, image, self.settings, self.batch_size))

        return with_large(images, together, alone)

    def rows(self, image: Streamed[Found]) -> dict[str, np.ndarray]:
        """Return a row for each object; the row of an unreadable image has the number -1 and NaN in `vector`."""
        rows = [(-1, np.full(self.encoder.dim, np.nan), b"", *[0] * len(_PLACES))]
        if image.result is not None:
            rows = [
                (each.number, each.vector, each.mask.counts, *each.mask.grid, *each.mask.image, *each.box, each.area)
                for each in image.result.objects
            ]
        number, vector, mask, *places = zip(*rows, strict=True) if rows else [()] * (3 + len(_PLACES))
        return {
            "image": np.full(len(rows), image.name),
            "number": np.array(number, dtype=np.int64),
            "vector": np.array(vector, dtype=np.float32).reshape(-1, self.encoder.dim),
            "mask": np.array(mask, dtype=np.object_),
            **{name: np.array(own, dtype=np.int64) for name, own in zip(_PLACES, places, strict=True)},
            "error": np.full(len(rows), image.reason),
        }
