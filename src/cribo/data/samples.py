"""Training samples and batches; all randomness is keyed by (seed, epoch, image).

The objective defines the samples (`SampleTransform`), such as two views, many crops, a masked image, or the frames of a
clip.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torch.utils.data import Dataset, Sampler, default_collate, get_worker_info

from cribo.base.errors import DataError, InputError, UnreadableImage
from cribo.base.wording import counted
from cribo.data.channels import DIM_IMAGES
from cribo.data.randomness import keyed_generator
from cribo.data.reading import temporary_errno
from cribo.data.sources.clips import Clips
from cribo.data.sources.images import ImageSource, OrderedSource, ReducingSource

# Keys that separate the streams of random draws.
_SAMPLE, _ORDER, _REPLACEMENT = 0, 1, 2
_REPLACEMENT_ATTEMPTS = 100

RETRY_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds between attempts to read an image from a failing file system: about a minute in total."""

Sample = Mapping[str, Any]
"""The sample of an image: tensors and named tuples of tensors, by name."""


class LazyImage:
    """An image of a collection, decoded on demand.

    Reading raises UnreadableImage with the image's name in the collection.

    Args:
        source: the collection.
        index: index of the image in it.
    """

    def __init__(self, source: ImageSource, index: int) -> None:
        self.source = source
        self.index = index

    @property
    def name(self) -> str:
        """Name of the image in the collection."""
        return self.source.name(self.index)

    def other(self, index: int) -> "LazyImage":
        """Return another image of the collection, such as a neighbour.

        Raises:
            IndexError: the collection has no image of this index.
        """
        if not 0 <= index < len(self.source):
            raise IndexError(f"index must be in 0..{len(self.source) - 1}, got {index}")
        return LazyImage(self.source, index)

    @property
    def frames(self) -> "list[LazyImage]":
        """The frames of this clip, in order.

        Raises:
            DataError: the collection has no clips.
        """
        if not isinstance(self.source, Clips):
            raise DataError(f"{self.name} is an image, not a clip: set clip_frames in the objective")
        return [LazyImage(self.source.images, frame) for frame in self.source.frames(self.index)]

    def load(self) -> UInt8[Tensor, "c h w"]:
        """Load the full-size image as RGB."""
        with _named_errors(self.name):
            return self.source.load(self.index)

    def load_reduced(self, reduction: Callable[[int, int], int]) -> tuple[UInt8[Tensor, "c h w"], int]:
        """Load the image at a fraction of its size if that is faster; return it and the factor: 8, 4, 2 or 1.

        Args:
            reduction: called once with height and width of the full-size image; returns the largest allowed factor.
        """
        if isinstance(self.source, ReducingSource):
            with _named_errors(self.name):
                return self.source.load_reduced(self.index, reduction)
        image = self.load()
        reduction(image.shape[1], image.shape[2])
        return image, 1

    def labels(self) -> UInt8[Tensor, "h w"]:
        """Load the class index of every pixel, 255 for none.

        Raises:
            DataError: the collection has no labels.
        """
        read = getattr(self.source, "labels", None)
        if read is None:
            raise DataError(f"the collection of {self.name} has no labels: use synthetic scenes, or name their folder")
        return read(self.index)


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Raise errors of reading an image with its name in the collection."""
    try:
        yield
    except UnreadableImage as error:
        raise UnreadableImage(name, error.reason) from error.__cause__
    except OSError as error:
        raise UnreadableImage(name, str(error) or type(error).__name__) from error


class SampleTransform(Protocol):
    """Creates the sample of an image, in a worker of the loader.

    Tensors must have the same shape for every image: they are stacked to (B, ...) and moved to the device. Named tuples
    of tensors are stacked field by field and stay on the host, for parameters that are read there, such as
    `Photometric`. All random numbers must come from the generator.
    """

    def __call__(self, image: LazyImage, generator: torch.Generator) -> Sample:
        """Create the sample of one image in one epoch."""
        ...


@dataclass(frozen=True)
class Unreadable:
    """Name of an unreadable image, and the reason."""

    name: str
    reason: str


@dataclass
class Batch:
    """The samples of B images.

    Attributes:
        samples: stacked samples by name: tensors (B, ...) and named tuples of them. `batch["views"]` is short for
            `batch.samples["views"]`.
        images: (B,) index of each image in the collection.
        unreadable: images that were replaced by others.
        retried: number of retried reads.
        dim: names and largest values of images that look dark, if a worker process has read them.
    """

    samples: dict[str, Any]
    images: Int[Tensor, " b"]
    unreadable: list[Unreadable]
    retried: int = 0
    dim: list[tuple[str, int]] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.samples[name]

    def __len__(self) -> int:
        return self.images.shape[0]

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with its tensors on `device`, copied asynchronously from page-locked memory.

        Named tuples are not moved.
        """
        to_gpu = torch.device(device).type == "cuda"
        return self._map(lambda tensor: tensor.to(device, non_blocking=to_gpu and tensor.is_pinned()))

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory; called by the loader."""
        return self._map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Note that a stream reads the batch, which another stream copied to the GPU."""
        for tensor in (self.images, *self.samples.values()):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                tensor.record_stream(stream)

    def split(self, parts: int) -> "list[Batch]":
        """Split the batch into `parts` batches of equal size, in order.

        Raises:
            ValueError: the batch size is not a multiple of `parts`.
        """
        if len(self) % parts:
            raise InputError(f"the batch size must be a multiple of {parts} parts, got {len(self)}")
        size = len(self) // parts
        return [self.narrow(start, start + size) for start in range(0, len(self), size)]

    def narrow(self, start: int, end: int) -> "Batch":
        """Return the samples in [start, end); unreadable images are reported with the first part."""

        def cut(value: Any) -> Any:
            return value[start:end] if isinstance(value, Tensor) else type(value)(*(part[start:end] for part in value))

        return Batch(
            samples={name: cut(value) for name, value in self.samples.items()},
            images=self.images[start:end],
            unreadable=self.unreadable if start == 0 else [],
            retried=self.retried if start == 0 else 0,
        )

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        samples = {name: function(x) if isinstance(x, Tensor) else x for name, x in self.samples.items()}
        return replace(self, samples=samples, images=function(self.images))


class SampleDataset(Dataset[Batch]):
    """The samples of an image collection, indexed by (epoch, image).

    An unreadable image is replaced by a randomly drawn one, and reported with the batch. Errors that may be temporary
    (see `temporary_errno`) are retried first, after each of `retry_delays` in seconds.
    """

    def __init__(
        self,
        source: ImageSource,
        transform: SampleTransform,
        *,
        seed: int,
        retry_delays: Sequence[float] = RETRY_DELAYS,
    ) -> None:
        self.source = source
        self.transform = transform
        self.seed = seed
        self.retry_delays = tuple(retry_delays)
        self._given_up: set[str] = set()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        """Return the sample of one image in one epoch, as a batch of one.

        Raises:
            DataError: neither the image nor any of 99 replacements can be read, or samples cannot be stacked.
        """
        return self.__getitems__([key])

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Batch:
        """Return the samples of several images as one batch; called by loaders.

        Raises:
            DataError: as for `__getitem__`.
        """
        batch = Batch({}, torch.zeros(0, dtype=torch.long), [])
        samples = [self._readable(*key, batch) for key in keys]
        batch.images = torch.tensor([index for index, _ in samples])
        batch.samples = self._stacked(samples)
        if get_worker_info() is not None:
            batch.dim = DIM_IMAGES.take()
        return batch

    def _stacked(self, samples: Sequence[tuple[int, Sample]]) -> dict[str, Any]:
        (first_index, first), *_ = samples
        advice = f"fix the objective's sample transform {type(self.transform).__name__}"
        expected: dict[str, Any] = {}
        for index, sample in samples:
            try:
                found = _shapes(sample)
            except TypeError as error:
                raise DataError(f"{error} for {self.source.name(index)}; {advice}") from error
            expected = expected or found
            if found != expected:
                name = next(n for n in {**expected, **found} if found.get(n) != expected.get(n))
                of, first_of = (shapes.get(name, "missing") for shapes in (found, expected))
                raise DataError(
                    f"samples of one batch must have the same names and shapes: {name!r} is {of} for "
                    f"{self.source.name(index)} and {first_of} for {self.source.name(first_index)}; {advice}"
                )
        return {name: default_collate([sample[name] for _, sample in samples]) for name in first}

    def _readable(self, epoch: int, wanted: int, batch: Batch) -> tuple[int, Sample]:
        """Return index and sample of the image, or of its first readable random replacement."""
        before = len(batch.unreadable)
        replacement = keyed_generator(self.seed, _REPLACEMENT, epoch, wanted)
        index = wanted
        for _ in range(_REPLACEMENT_ATTEMPTS):
            try:
                return index, self._with_retries(epoch, index, batch)
            except UnreadableImage as error:
                batch.unreadable.append(Unreadable(error.path, error.reason))
                index = int(torch.randint(len(self.source), (1,), generator=replacement))
        raise DataError(
            f"{self.source.name(wanted)}: {batch.unreadable[before].reason}; none of "
            f"{_REPLACEMENT_ATTEMPTS - 1} random replacements could be read either"
        )

    def _with_retries(self, epoch: int, index: int, batch: Batch) -> Sample:
        """Return the sample of an image, retrying if an error may be temporary."""
        for delay in (*self.retry_delays, None):
            try:
                return self._transformed(epoch, index)
            except UnreadableImage as error:
                # Bad sectors and lost servers raise the same errno, so retry each image in one series only.
                if temporary_errno(error) is None or error.path in self._given_up:
                    raise
                if delay is None:
                    self._given_up.add(error.path)
                    raise
            batch.retried += 1
            time.sleep(delay)
        raise AssertionError("the last attempt returns or raises")

    def _transformed(self, epoch: int, index: int) -> Sample:
        image = LazyImage(self.source, index)
        try:
            return self.transform(image, keyed_generator(self.seed, _SAMPLE, epoch, index))
        except OSError as error:  # of a file that the transform itself reads
            raise UnreadableImage(image.name, str(error) or type(error).__name__) from error


def _shapes(sample: Sample) -> dict[str, Any]:
    """Return the shape of each tensor, and the shapes of the fields of each named tuple."""
    shapes: dict[str, Any] = {}
    for name, value in sample.items():
        if isinstance(value, Tensor):
            shapes[name] = tuple(value.shape)
        elif hasattr(value, "_fields") and all(isinstance(part, Tensor) for part in value):
            shapes[name] = [tuple(part.shape) for part in value]
        else:
            kind = type(value).__name__
            raise TypeError(f"a sample must contain tensors or named tuples of tensors: {name!r} is of type {kind}")
    return shapes


def epoch_order(images: ImageSource | int, seed: int, epoch: int) -> Int[Tensor, " n"]:
    """Return all indices of a collection, or of this number of images, in the order of an epoch.

    This is the collection's own order (see `OrderedSource`), or a random permutation.
    """
    if isinstance(images, OrderedSource):
        return images.epoch_order(seed, epoch)
    count = images if isinstance(images, int) else len(images)
    return torch.randperm(count, generator=keyed_generator(seed, _ORDER, epoch))


class StepBatchSampler(Sampler[list[tuple[int, int]]]):
    """Sampler of the batches of one epoch from the current step on, as lists of (epoch, image).

    The order of an epoch is a permutation keyed by (seed, epoch), or the collection's own (see `OrderedSource`);
    images beyond the last full batch are skipped in that epoch. The position in the data depends only on the step, so
    a run can resume on any number of devices without loader state.

    Args:
        images: the collection, or its number of images.
        batch_size: number of images per optimiser step, over all devices.
        seed: seed of the run.
        position: returns the next optimiser step; called when an epoch starts.
        rank: rank of this process.
        world_size: number of processes, which share each batch.

    Raises:
        ValueError: fewer images than one batch, or a batch size that is not a multiple of `world_size`.
    """

    def __init__(
        self,
        images: ImageSource | int,
        batch_size: int,
        seed: int,
        *,
        position: Callable[[], int],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        num_images = images if isinstance(images, int) else len(images)
        if num_images < batch_size:
            raise InputError(
                f"the data has {counted(num_images, 'image')}, fewer than one batch of {batch_size}: lower batch_size"
            )
        if batch_size % world_size:
            raise InputError(f"optim.batch_size must be a multiple of the {world_size} processes, got {batch_size}")
        self.images = images
        self.num_images = num_images
        self.batch_size = batch_size
        self.seed = seed
        self.position = position
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return self.num_images // self.batch_size

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Iterate over this rank's part of the batches from the current step to the end of its epoch."""
        return self.batches_from(self.position())

    def batches_from(self, step: int) -> Iterator[list[tuple[int, int]]]:
        """Iterate over this rank's part of the batches from a step to the end of its epoch."""
        epoch, first = divmod(step, len(self))
        order = epoch_order(self.images, self.seed, epoch)
        share = self.batch_size // self.world_size
        for number in range(first, len(self)):
            start = number * self.batch_size + self.rank * share
            yield [(epoch, image) for image in order[start : start + share].tolist()]
