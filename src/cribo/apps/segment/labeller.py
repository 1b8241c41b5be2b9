"""The unit of work of `cribo segment`: from a batch of encoded images to label maps."""

import io
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from cribo.apps.segment.large import LabelledLargeImage, label_large
from cribo.base.colours import Colour
from cribo.base.devices import resolve_device
from cribo.base.errors import InputError, UnreadableImage
from cribo.data.config import Reading
from cribo.data.labelled.inputs import DecodedImage, open_valid
from cribo.data.labelled.label_maps import write_labels
from cribo.data.reading import ImageContent, read_image
from cribo.data.windows import LargeImage, read_or_open
from cribo.features.config import BackboneSource, portable_source
from cribo.features.memory.memory import Segmentation, SegmentationMemory
from cribo.features.memory.pixels import write_confidence
from cribo.features.stream import ImageFunction, Pixels, Streamed
from cribo.features.windows import with_large


class LabelledImage(NamedTuple):
    """An image with its labels.

    Attributes:
        image: its pixels.
        found: its labels and their confidence.
    """

    image: UInt8[Tensor, "c h w"]
    found: Segmentation

    @property
    def nbytes(self) -> int:
        """Size of the pixels and labels in bytes."""
        return self.image.nbytes + self.found.labels.nbytes + self.found.confidence.nbytes


class PixelLabeller(ImageFunction[Pixels, LabelledImage | LabelledLargeImage]):
    """Labels the pixels of images, in collections or batches of rows.

    A batch has one row for each image: `image`; `labels`, a palette PNG of class indices, 255 for no class;
    `confidence`, a grey PNG of 255 times the probability that the label is right; `mean_confidence`, 0 to 1; `height`
    and `width`; and `error`. For images above the limit of pixels, labels and confidence are tiled TIFFs.
    """

    @property
    @abstractmethod
    def palette(self) -> list[Colour]:
        """Colour of each class."""

    def rows(self, image: Streamed[LabelledImage | LabelledLargeImage]) -> dict[str, np.ndarray]:
        """Return the row of an image.

        If it is unreadable, `labels` and `confidence` are empty, `height` and `width` are 0, and `mean_confidence` is
        NaN.
        """
        labels, confidence, height, width, mean = io.BytesIO(), io.BytesIO(), 0, 0, np.nan
        if isinstance(image.result, LabelledLargeImage):
            image.result.labels.write(labels, self.palette)
            image.result.confidence.write(confidence)
            (height, width), mean = image.result.labels.size, image.result.mean_confidence
        elif image.result is not None:
            found = image.result.found
            write_labels(found.labels, self.palette, labels)
            write_confidence(found.confidence, confidence)
            (height, width), mean = found.labels.shape, float(found.confidence.mean())
        return {
            "image": np.array([image.name]),
            "labels": np.array([labels.getvalue()], dtype=np.object_),
            "confidence": np.array([confidence.getvalue()], dtype=np.object_),
            "mean_confidence": np.array([mean], dtype=np.float32),
            "height": np.array([height], dtype=np.int32),
            "width": np.array([width], dtype=np.int32),
            "error": np.array([image.reason]),
        }


class Labeller(PixelLabeller[DecodedImage | LargeImage]):
    """Labels images with a memory; can be sent to other processes. For batches, see `PixelLabeller`.

    Args:
        memory: file of a `SegmentationMemory`, as `cribo segment --memory` writes it; or a memory, which stays in this
            process.
        backbone: source of the backbone with which the memory was created; required for a file.
        changes: settings, by name, that replace those of the file, except those of the features.
        batch_size: number of images or windows of equal size to encode at once.
        workers: number of threads that read images. [half of the cores]
        device: such as cuda:0. [the first GPU of the process, else the CPU]
        whole: refuse images above the limit of pixels, as instances require, instead of labelling them in windows.

    Raises:
        InputError: a memory file is given without its backbone.

    Example:
        >>> label = Labeller("mine.safetensors", "runs/mine")  # doctest: +SKIP
        >>> dataset.map_batches(label, batch_size=64)  # Ray Data  # doctest: +SKIP
        >>> sorted(label({"image": np.array(["street.jpg"])}))  # doctest: +SKIP
        ['confidence', 'error', 'height', 'image', 'labels', 'mean_confidence', 'width']
    """

    def __init__(
        self,
        memory: str | os.PathLike[str] | SegmentationMemory,
        backbone: BackboneSource | str | None = None,
        *,
        changes: Mapping[str, Any] | None = None,
        batch_size: int = 8,
        workers: int | None = None,
        device: str | None = None,
        whole: bool = False,
    ) -> None:
        super().__init__(batch_size, workers)
        self._whole = whole
        self._file: str | None = None
        if isinstance(memory, SegmentationMemory):
            self.memory = memory
            return
        if backbone is None:
            raise InputError(f"a memory file requires its backbone: give the one with which {memory!s} was created")
        self._file = os.path.abspath(memory)  # noqa: PTH100 (also for the working folder of another process)
        self._backbone = portable_source(backbone)
        self._changes, self._device = dict(changes or {}), device

    def __getstate__(self) -> dict[str, Any]:
        if self._file is None:
            raise InputError("a memory stays in its process: save it, and give the Labeller its file")
        return {name: value for name, value in vars(self).items() if name != "memory"}

    @cached_property
    def memory(self) -> SegmentationMemory:
        """The memory, with its backbone; raises the errors of `SegmentationMemory.load`."""
        options = {"device": resolve_device(self._device), "batch_size": self.batch_size}
        assert self._file is not None
        return SegmentationMemory.load(self._file, self._backbone, changes=self._changes, **options)

    @property
    def reading(self) -> Reading:
        """How the images of a batch of rows are read: as the examples were."""
        return self.memory.settings.reading

    def open(self) -> None:
        """Open memory and backbone."""
        _ = self.memory

    @property
    def palette(self) -> list[Colour]:
        """Colour of each class."""
        return self.memory.palette

    def prepare(self, file: ImageContent, reading: Reading) -> DecodedImage | LargeImage:
        """Decode an image; one above the limit of pixels is read when it is labelled, unless classes are split."""
        read = read_image(file, reading=reading) if self._whole else read_or_open(file, reading)
        return read if isinstance(read, LargeImage) else DecodedImage(read, open_valid(file, reading))

    def compute(
        self, images: Sequence[DecodedImage | LargeImage]
    ) -> Iterator[LabelledImage | LabelledLargeImage | UnreadableImage]:
        """Return images with their labels; or the error of a large image that cannot be decoded."""

        def together(small: list[DecodedImage]) -> Iterator[LabelledImage]:
            found = self.memory.segment_all(small) if small else ()
            return (LabelledImage(image.pixels, each) for image, each in zip(small, found, strict=True))

        return with_large(images, together, partial(label_large, self.memory))
