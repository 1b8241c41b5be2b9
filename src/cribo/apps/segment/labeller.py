"""The unit of work of `cribo segment`: from a batch of encoded images to label maps."""

import io
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from cribo.apps.segment.memory import Segmentation, SegmentationMemory
from cribo.apps.segment.pixels import write_confidence, write_labels
from cribo.base.devices import resolve_device
from cribo.base.errors import InputError
from cribo.data.config import Reading
from cribo.data.reading import EncodedImage, read_image
from cribo.data.sources.collection import rows_of
from cribo.features.config import BackboneSource, portable_source
from cribo.features.spread.parts import ImagePart
from cribo.features.stream import Streamed, stream


@dataclass(frozen=True)
class LabelledImage:
    """An image with its labels, or the reason why it has none.

    Attributes:
        name: name of the image.
        sha256: hash of its content; "" if it could not be read.
        image: its pixels.
        found: its labels and their confidence; None if it is unreadable or unchanged.
        error: reason why it is unreadable; "" if it is readable.
        unchanged: whether the content is that of the stored results, so that it was not labelled.
    """

    name: str
    sha256: str = ""
    image: UInt8[Tensor, "3 h w"] | None = None
    found: Segmentation | None = None
    error: str = ""
    unchanged: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the pixels and labels in bytes."""
        found = () if self.found is None else (self.found.labels, self.found.confidence)
        return sum(part.nbytes for part in (self.image, *found) if part is not None)


_Labelled = tuple[UInt8[Tensor, "3 h w"], Segmentation]


class Labeller:
    """Labels batches of images; can be sent to other processes, where it opens memory and backbone on first use.

    Args:
        memory: file of a `SegmentationMemory`, as `cribo segment --memory` writes it; or a memory, which stays in this
            process.
        backbone: source of the backbone with which the memory was created; required for a file.
        changes: settings, by name, that replace those of the file, except those of the features.
        batch_size: number of images or windows of equal size to encode at once.
        workers: number of threads that read images. [half of the cores]
        device: such as cuda:0. [the first GPU of the process, else the CPU]

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
    ) -> None:
        self.batch_size, self.workers = batch_size, workers
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

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Label a batch of rows, as in `map_batches` of Ray Data.

        Args:
            batch: `image`, names of images, and `bytes`, the contents of their files; without it, the names are paths
                or URLs.

        Returns:
            One row for each image: `image`; `labels`, a palette PNG of class indices, 255 for no class; `confidence`, a
            grey PNG of 255 times the probability that the label is right; `mean_confidence`, 0 to 1; `height` and
            `width`; and `error`. For an image that cannot be read, `error` is the reason, and the others are empty, 0
            and NaN; for other images, `error` is "".

        Raises:
            DataError: the batch has no column `image`.
        """
        columns: dict[str, list[Any]] = {name: [] for name in _KINDS}
        for each in (
            each
            for _, images in self.stream([ImagePart(rows_of(batch, reading=Reading(range=self.memory.settings.range)))])
            for each in images
        ):
            labels, confidence = io.BytesIO(), io.BytesIO()
            if each.found is not None:
                write_labels(each.found.labels, self.memory.palette, labels)
                write_confidence(each.found.confidence, confidence)
            height, width = (0, 0) if each.found is None else each.found.labels.shape
            mean = np.nan if each.found is None else float(each.found.confidence.mean())
            row = (each.name, labels.getvalue(), confidence.getvalue(), mean, height, width, each.error)
            for values, value in zip(columns.values(), row, strict=True):
                values.append(value)
        return {name: np.array(values, dtype=_KINDS[name]) for name, values in columns.items()}

    def stream(self, parts: Iterable[ImagePart]) -> Generator[tuple[ImagePart, Iterator[LabelledImage]], None, None]:
        """Yield each part with its images, in order, which must be consumed before the next part.

        Images of the next parts are read meanwhile.
        """
        memory = self.memory

        def label(images: Sequence[UInt8[Tensor, "3 h w"]]) -> Iterable[_Labelled]:
            return zip(images, memory.segment_all(images), strict=True)

        with closing(stream(parts, _read, label, at_once=self.batch_size, workers=self.workers)) as found:
            for part, images in found:
                yield part, map(_labelled_image, images)


_KINDS = {
    "image": np.str_,
    "labels": np.object_,
    "confidence": np.object_,
    "mean_confidence": np.float32,
    "height": np.int32,
    "width": np.int32,
    "error": np.str_,
}


def _read(file: EncodedImage, reading: Reading) -> UInt8[Tensor, "3 h w"]:
    return read_image(file, reading=reading)


def _labelled_image(each: Streamed[_Labelled]) -> LabelledImage:
    image, found = each.result or (None, None)
    return LabelledImage(each.name, each.sha256, image, found, each.reason, each.unchanged)
