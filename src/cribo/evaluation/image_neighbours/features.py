"""One feature for each image of a set, computed once and cached on disk."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from cribo.console import Progress
from cribo.data import UnreadableImage
from cribo.data.classification import ClassifiedFiles
from cribo.errors import InputError
from cribo.evaluation.cache import DTYPES, FeatureCache, Machine, require_room, store, stored
from cribo.evaluation.loading import Batches
from cribo.retrieval.choices import FeaturePrecision
from cribo.retrieval.encoders import ImageEncoder
from cribo.retrieval.search import in_blocks

_BLOCK = 1024  # images whose features share a file; at most this many are lost by an interruption
_BATCHES_AHEAD = 2  # for each device


@dataclass(frozen=True)
class SquareCrop:
    """How an image is prepared: its shorter side is resized, and a square is cut from its centre.

    Attributes:
        resize: pixels of the shorter side; bicubic, anti-aliased.
        crop: pixels of the square's sides.
    """

    resize: int = 256
    crop: int = 224

    def __call__(self, image: UInt8[Tensor, "3 h w"]) -> UInt8[Tensor, "3 crop crop"]:
        """Return the pixels to encode."""
        small = TF.resize(image, [self.resize], interpolation=InterpolationMode.BICUBIC, antialias=True)
        return TF.center_crop(small, [self.crop, self.crop])

    @property
    def key(self) -> str:
        """Everything that decides the pixels, apart from the image."""
        return f"resize {self.resize} crop {self.crop}"


class ImageFeatures:
    """Features of images, in the order of the images, as the keys of a search (`search.Keys`).

    Args:
        parts: rows of unit length, or the files of the cache that hold them.
        length: rows of all parts.
        dim: D.
    """

    def __init__(self, parts: Sequence[Float[Tensor, "m d"] | Path], length: int, dim: int) -> None:
        self._parts, self._length, self.dim = parts, length, dim

    def __len__(self) -> int:
        return self._length

    def blocks(self, rows: int) -> Iterator[Float[Tensor, "m d"]]:
        """All rows in order, at most `rows` at once, in the precision they are stored in."""
        return in_blocks(map(stored, self._parts), rows)


@torch.no_grad()
def extract_global(
    encoders: Sequence[ImageEncoder],
    images: ClassifiedFiles,
    preparation: SquareCrop,
    *,
    machine: Machine,
    precision: FeaturePrecision = "float32",
    progress: Progress | None = None,
    what: str = "features",
) -> ImageFeatures:
    """Encode images, except those whose features are cached.

    The cache has files of 1024 images, identified by the encoder, the preparation, the name, size and date of each
    image, and the content of the first: reading a million images only to hash them would take as long as many a
    network. An interrupted extraction continues, except for up to 1024 images.

    Args:
        encoders: one for each device of the machine, on that device; batches go round.
        images: to encode.
        preparation: how they are resized.
        machine: resources of the search.
        precision: in which features are stored.
        progress: progress callback.
        what: name of this phase in `progress`.

    Raises:
        UnreadableImage: an image that cannot be used.
        ValueError: the features do not fit in memory (without a cache) or on the disk (with one), or are not finite.
    """
    blocks = [range(start, min(start + _BLOCK, len(images))) for start in range(0, len(images), _BLOCK)]
    cache, dtype = machine.cache, DTYPES[precision]
    paths = [None if cache is None else _path(cache, images, block, preparation, precision) for block in blocks]
    parts: list[Tensor | Path | None] = [
        path if _is_stored(path, len(block), cache) else None for path, block in zip(paths, blocks, strict=True)
    ]
    missing = [number for number, part in enumerate(parts) if part is None]
    wanted = [index for number in missing for index in blocks[number]]
    require_room(len(wanted) * encoders[0].dim * dtype.itemsize, cache)
    if len(wanted) < len(images):
        what = f"{what} ({len(images) - len(wanted):,} cached)"
    loader = Batches(
        _Prepared(images, np.asarray(wanted), preparation),
        np.stack,
        batch_size=machine.batch_size,
        num_workers=machine.workers,
        prefetch_factor=4 if machine.workers else None,
    )

    def report(done: int) -> None:
        if progress is not None:
            progress(what, done, len(wanted))

    rows = _checked(_encoded(encoders, machine.devices, loader), images, wanted, report)
    # Only the last block is shorter than the others, and the missing ones come in order.
    for number, part in zip(missing, in_blocks(rows, _BLOCK), strict=True):
        parts[number] = store(part.to(dtype), paths[number], cache)
    return ImageFeatures([part for part in parts if part is not None], len(images), encoders[0].dim)


def _path(
    cache: FeatureCache, images: ClassifiedFiles, block: range, preparation: SquareCrop, precision: FeaturePrecision
) -> Path:
    """Return the file for the features of a block of images."""
    digest = hashlib.sha256()
    for index in block:
        path = Path(images.path(index))
        try:
            status = path.stat()
            if index == block[0]:
                # Archives may give all files one date, and uncompressed images have one size: train/cat/1.bmp and
                # val/cat/1.bmp may differ only in their content.
                digest.update(path.read_bytes())
        except OSError as error:
            raise UnreadableImage(path, error.strerror or str(error)) from error
        digest.update(
            f"{images.name(index)}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape")
        )
    return cache.path(digest.hexdigest(), preparation.key, precision)


def _is_stored(path: Path | None, images: int, cache: FeatureCache | None) -> bool:
    rows = None if cache is None or path is None else cache.read(path)
    return rows is not None and len(rows) == images


@dataclass
class _Prepared(Dataset[UInt8[np.ndarray, "3 h w"]]):
    """Reads and resizes, in the workers."""

    images: ClassifiedFiles
    indices: np.ndarray  # no Python objects, which each worker would copy
    preparation: SquareCrop

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> UInt8[np.ndarray, "3 h w"]:
        # In one memory layout, with workers or without: the last bits of sums depend on it.
        return self.preparation(self.images.load(int(self.indices[number]))).contiguous().numpy()


def _encoded(
    encoders: Sequence[ImageEncoder], devices: Sequence[str], batches: Iterable[UInt8[np.ndarray, "b 3 h w"]]
) -> Iterator[Float[Tensor, "b d"]]:
    """Features of unit length, batch by batch; each device has a thread, and batches go round."""
    ahead: deque[Future[Tensor]] = deque()
    with ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in encoders]
        for number, batch in enumerate(batches):
            place = number % len(encoders)
            ahead.append(threads[place].submit(_encode, encoders[place], devices[place], batch))
            if len(ahead) > _BATCHES_AHEAD * len(encoders):
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


@torch.no_grad()  # here, because it is set for each thread separately
def _encode(encoder: ImageEncoder, device: str, batch: UInt8[np.ndarray, "b 3 h w"]) -> Float[Tensor, "b d"]:
    return F.normalize(encoder.features(torch.from_numpy(batch), device), dim=1).cpu()


def _checked(
    batches: Iterable[Float[Tensor, "b d"]],
    images: ClassifiedFiles,
    indices: Sequence[int],
    report: Callable[[int], None],
) -> Iterator[Float[Tensor, "b d"]]:
    """The same batches; raises an error with the name of the image if features are not finite."""
    done = 0
    for rows in batches:
        wrong = (~rows.isfinite().all(dim=1)).nonzero()
        if len(wrong):
            name = images.name(indices[done + int(wrong[0])])
            raise InputError(f"the backbone gives features of {name} that are not finite: its weights cannot be used")
        done += len(rows)
        report(done)
        yield rows
