"""Training data: pairs of views, each image decoded once, everything random keyed by (seed, epoch, image)."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from cribo.data.images import DataError, ImageSource, OrderedSource, PreparedSource, ReducingSource
from cribo.data.journal import Journal
from cribo.data.randomness import keyed_generator
from cribo.data.reading import UnreadableImage, passing_error
from cribo.method import (
    Crops,
    Photometric,
    ViewRecipe,
    cut_views,
    draw_initial_tokens,
    patch_coordinates,
    sample_crops,
    sample_photometric,
)
from cribo.method.views import largest_reduction, reduced_crops

# What a keyed draw is for, so that no two purposes share a stream.
_VIEWS, _ORDER, _REPLACEMENT = 0, 1, 2
_REPLACEMENT_ATTEMPTS = 100

RETRY_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds between attempts to read an image from a file system that fails: about a minute together."""


@dataclass(frozen=True)
class Unreadable:
    """An image that could not be used, and why."""

    name: str
    reason: str


@dataclass
class ViewPairs:
    """A batch of view pairs as it leaves the workers.

    Attributes:
        views: (B, 2, 3, H, W) 8-bit.
        coordinates: (B, 2, N, 2) patch centres (x, y) in pixels of the source image.
        initial_tokens: (B, K) tokens of 2N that start the clusters.
        drop_path_noise: (B, 2, sites) uniform numbers for the student's stochastic depth.
        images: (B,) index of each image in its collection.
        photometric: parameters of the 2B views, image after image; they stay on the host.
        unreadable: images that had to be replaced by another.
    """

    views: UInt8[Tensor, "b 2 3 h w"]
    coordinates: Float[Tensor, "b 2 n 2"]
    initial_tokens: Int[Tensor, "b k"]
    drop_path_noise: Float[Tensor, "b 2 sites"]
    images: Int[Tensor, " b"]
    photometric: Photometric
    unreadable: list[Unreadable]

    def __len__(self) -> int:
        return self.images.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool | None = None) -> "ViewPairs":
        """The batch with its tensors on `device`, apart from the photometric parameters.

        Unless `non_blocking` says otherwise, nobody waits for a copy from page-locked memory to a GPU: what the
        GPU is asked to do next comes after it anyway. (Lightning asks for that with bare tensors alone.)
        """
        to_gpu = torch.device(device).type == "cuda"

        def move(tensor: Tensor) -> Tensor:
            waitless = to_gpu and tensor.is_pinned() if non_blocking is None else non_blocking
            return tensor.to(device, non_blocking=waitless)

        return self._map(move)

    def pin_memory(self) -> "ViewPairs":
        """The batch in page-locked memory; called by the loader."""
        return self._map(lambda tensor: tensor.pin_memory())

    def split(self, parts: int) -> "list[ViewPairs]":
        """`parts` batches of equal size, in order.

        Raises:
            ValueError: the batch does not divide.
        """
        if len(self) % parts:
            raise ValueError(f"a batch of {len(self)} images does not divide into {parts} parts")
        size = len(self) // parts
        return [self.narrow(start, start + size) for start in range(0, len(self), size)]

    def narrow(self, start: int, end: int) -> "ViewPairs":
        """The pairs from `start` to before `end`; what was unreadable is reported with the first."""
        return ViewPairs(
            views=self.views[start:end],
            coordinates=self.coordinates[start:end],
            initial_tokens=self.initial_tokens[start:end],
            drop_path_noise=self.drop_path_noise[start:end],
            images=self.images[start:end],
            photometric=self.photometric.select(slice(2 * start, 2 * end)),
            unreadable=self.unreadable if start == 0 else [],
        )

    def _map(self, function: Callable[[Tensor], Tensor]) -> "ViewPairs":
        tensors = ("views", "coordinates", "initial_tokens", "drop_path_noise", "images")
        return replace(self, **{name: function(getattr(self, name)) for name in tensors})


@dataclass(frozen=True)
class _Draws:
    """What is drawn for one image beside its crops."""

    photometric: Photometric
    initial_tokens: Int[Tensor, " k"]
    drop_path_noise: Float[Tensor, "2 sites"]


class ViewPairDataset(Dataset[ViewPairs]):
    """View pairs of an image collection, asked for by (epoch, image).

    An unreadable image is replaced by another one drawn in its place, and reported with the batch. Where reading
    fails for a reason that may pass (see `passing_error`), it is tried again first. A source that can (see
    `ReducingSource`) decodes an image reduced by as much as its two crops allow (`largest_reduction`).

    Args:
        source: the images.
        recipe: how views are drawn.
        grid: (h, w) patches of a view.
        num_objects: K, initial tokens to draw; 0 for none.
        drop_path_sites: uniform numbers to draw per view.
        seed: of the run.
        retry_delays: seconds to wait after each failed attempt; one more attempt follows the last of them.

    Attributes:
        journal: is told what is read.
        excluded: images that are not read any more, by index, and why.
    """

    def __init__(
        self,
        source: ImageSource,
        recipe: ViewRecipe,
        *,
        grid: tuple[int, int],
        num_objects: int,
        drop_path_sites: int,
        seed: int,
        retry_delays: Sequence[float] = RETRY_DELAYS,
    ) -> None:
        self.source = source
        self.recipe = recipe
        self.grid = grid
        self.num_objects = num_objects
        self.drop_path_sites = drop_path_sites
        self.seed = seed
        self.retry_delays = tuple(retry_delays)
        self.journal = Journal(0)
        self.excluded: dict[int, str] = {}
        self._in_vain: set[int] = set()
        self._reducing = source if isinstance(source, ReducingSource) else None
        self._prepared = source if isinstance(source, PreparedSource) else None

    def __len__(self) -> int:
        return len(self.source)

    def watched(self, journal: Journal) -> "ViewPairDataset":
        """The same pairs, told to a journal of their own; what one excludes the other does not."""
        watched = copy.copy(self)
        watched.journal, watched.excluded, watched._in_vain = journal, dict(self.excluded), set()
        return watched

    def __getitem__(self, key: tuple[int, int]) -> ViewPairs:
        """The view pair of one image in one epoch, as a batch of one.

        Raises:
            DataError: neither the image nor any of a hundred drawn in its place can be read.
        """
        return self.__getitems__([key])

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> ViewPairs:
        """The view pairs of several images, as one batch; what a loader asks for.

        Raises:
            DataError: as for one.
        """
        if self._prepared is not None:
            self._prepared.prepare([index for _, index in keys])
        size = self.recipe.size
        views = torch.empty((len(keys), 2, 3, size, size), dtype=torch.uint8)
        unreadable: list[Unreadable] = []
        images, crops, draws = [], [], []
        for key, pair in zip(keys, views, strict=True):
            index, cut, drawn = self._readable(*key, pair, unreadable)
            images.append(index)
            crops.append(cut)
            draws.append(drawn)
        boxes, flips = torch.stack([c.boxes for c in crops]), torch.stack([c.flips for c in crops])
        return ViewPairs(
            views=views,
            coordinates=patch_coordinates(boxes, flips, self.grid),
            initial_tokens=torch.stack([drawn.initial_tokens for drawn in draws]),
            drop_path_noise=torch.stack([drawn.drop_path_noise for drawn in draws]),
            images=torch.tensor(images),
            photometric=Photometric.cat([drawn.photometric for drawn in draws]),
            unreadable=unreadable,
        )

    def _readable(
        self, epoch: int, wanted: int, pair: UInt8[Tensor, "2 3 s s"], unreadable: list[Unreadable]
    ) -> tuple[int, Crops, _Draws]:
        """The image itself, or the first one drawn in its place that can be read."""
        before = len(unreadable)
        replacement = keyed_generator(self.seed, _REPLACEMENT, epoch, wanted)
        index = wanted
        for _ in range(_REPLACEMENT_ATTEMPTS):
            try:
                return index, *self._patiently(epoch, index, pair)
            except UnreadableImage as error:
                unreadable.append(Unreadable(self.source.name(index), error.reason))
                index = int(torch.randint(len(self.source), (1,), generator=replacement))
        raise DataError(
            f"{self.source.name(wanted)}: {unreadable[before].reason}; nor could any of {_REPLACEMENT_ATTEMPTS - 1} "
            "others drawn in its place be read"
        )

    def _patiently(self, epoch: int, index: int, pair: UInt8[Tensor, "2 3 s s"]) -> tuple[Crops, _Draws]:
        """As `_cut`, tried again for a while if the image cannot be read but may be readable later."""
        if index in self.excluded:
            raise UnreadableImage(self.source.name(index), self.excluded[index])
        # A bad sector answers as a lost server does: what was waited for in vain once gets one attempt from then on.
        for delay in (*(() if index in self._in_vain else self.retry_delays), None):
            self.journal.begin(index)
            try:
                return self._cut(epoch, index, pair)
            except (UnreadableImage, OSError) as error:
                number = passing_error(error)
                if number is not None and delay is not None:
                    self.journal.retry(index, number)
                    wait = delay
                else:
                    if number is not None:
                        self._in_vain.add(index)
                    if isinstance(error, UnreadableImage):
                        raise
                    raise UnreadableImage(self.source.name(index), str(error) or type(error).__name__) from error
            finally:
                self.journal.end()
            time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _cut(self, epoch: int, index: int, pair: UInt8[Tensor, "2 3 s s"]) -> tuple[Crops, _Draws]:
        """Write both views of an image to `pair`; what was cut, in pixels of the whole image, and all other draws."""
        generator = keyed_generator(self.seed, _VIEWS, epoch, index)
        image, reduction, crops = self._load(index, generator)
        inside = reduced_crops(crops, reduction)
        pair.copy_(cut_views(image, inside, self.recipe.size))
        photometric = sample_photometric(self.recipe, generator=generator)
        tokens = 2 * self.grid[0] * self.grid[1]
        initial = (
            draw_initial_tokens(tokens, self.num_objects, generator=generator)
            if self.num_objects
            else torch.zeros(0, dtype=torch.long)
        )
        noise = torch.rand((2, self.drop_path_sites), generator=generator)
        return Crops(inside.boxes * reduction, inside.flips), _Draws(photometric, initial, noise)

    def _load(self, index: int, generator: torch.Generator) -> tuple[UInt8[Tensor, "3 h w"], int, Crops]:
        """An image, by how much it is reduced, and the crops of the whole one, which say by how much it may be."""
        recipe = self.recipe
        if self._reducing is None:
            image = self.source.load(index)
            return image, 1, sample_crops(image.shape[1], image.shape[2], recipe, generator=generator)
        drawn: list[Crops] = []

        def reduction(height: int, width: int) -> int:
            drawn.append(sample_crops(height, width, recipe, generator=generator))
            return largest_reduction(drawn[0], recipe.size)

        image, reduced = self._reducing.load_reduced(index, reduction)
        return image, reduced, drawn[0]


def collate(samples: list[ViewPairs]) -> ViewPairs:
    """Join batches of one into a batch."""

    def cat(name: str) -> Tensor:
        return torch.cat([getattr(sample, name) for sample in samples])

    return ViewPairs(
        views=cat("views"),
        coordinates=cat("coordinates"),
        initial_tokens=cat("initial_tokens"),
        drop_path_noise=cat("drop_path_noise"),
        images=cat("images"),
        photometric=Photometric.cat([sample.photometric for sample in samples]),
        unreadable=[entry for sample in samples for entry in sample.unreadable],
    )


def epoch_order(source: ImageSource, seed: int, epoch: int) -> Int[Tensor, " n"]:
    """All indices of a collection in the order of an epoch: its own (see `OrderedSource`), or a permutation."""
    if isinstance(source, OrderedSource):
        return source.epoch_order(seed, epoch)
    return _permutation(len(source), seed, epoch)


def _permutation(num_images: int, seed: int, epoch: int) -> Int[Tensor, " n"]:
    """All indices in an order drawn for an epoch, in which every order is equally likely."""
    return torch.randperm(num_images, generator=keyed_generator(seed, _ORDER, epoch))


class StepBatchSampler(Sampler[list[tuple[int, int]]]):
    """The batches of one epoch from the current step on, as lists of (epoch, image).

    The order of an epoch is a permutation keyed by (seed, epoch), the collection's own if it has one (see
    `OrderedSource`); images beyond the last full batch sit that epoch out. The place in the data is a function of
    the step alone, so resuming at a step, on any number of devices, needs no state of a loader.

    Args:
        images: the collection, or how many images it has.
        batch_size: images of one optimiser step, over all devices.
        seed: of the run.
        position: tells the optimiser step that comes next, when an epoch begins.
        rank, world_size: which part of each batch this process gets.

    Raises:
        ValueError: less than one batch of images, or a batch that the processes cannot share evenly.
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
            raise ValueError(
                f"the data has {num_images} images, fewer than one batch: "
                f"set optim.batch_size to {num_images} or less, got {batch_size}"
            )
        if batch_size % world_size:
            raise ValueError(f"optim.batch_size must be a multiple of the {world_size} processes, got {batch_size}")
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
        """Batches (of this process's share) to the end of the epoch that the current step lies in."""
        return self.batches_from(self.position())

    def batches_from(self, step: int) -> Iterator[list[tuple[int, int]]]:
        """Batches (of this process's share) from a step to the end of its epoch."""
        epoch, first = divmod(step, len(self))
        order = self._order(epoch)
        share = self.batch_size // self.world_size
        for number in range(first, len(self)):
            start = number * self.batch_size + self.rank * share
            yield [(epoch, image) for image in order[start : start + share].tolist()]

    def _order(self, epoch: int) -> Int[Tensor, " n"]:
        if isinstance(self.images, int):
            return _permutation(self.images, self.seed, epoch)
        return epoch_order(self.images, self.seed, epoch)
