"""Extraction of one feature per image, with a disk cache."""

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

from cribo.base.console import Progress, no_progress
from cribo.base.errors import InputError, UnreadableImage
from cribo.data.batches import Batches
from cribo.data.labelled.classification import ClassifiedFiles
from cribo.features.cache import DTYPES, FeatureCache, Machine, in_blocks, require_room, store, stored
from cribo.features.config import FeaturePrecision
from cribo.features.encoder import Encoder

_BLOCK = 1024  # number of images per cache file; at most this many are lost by an interruption
_BATCHES_AHEAD = 2  # number of prefetched batches per device


@dataclass(frozen=True)
class SquareCrop:
    """Preprocessing of images: resize the shorter side, and crop a square from the centre.

    Attributes:
        resize: shorter side in pixels; bicubic with anti-aliasing.
        crop: side of the square in pixels.
    """

    resize: int = 256
    crop: int = 224

    def __call__(self, image: UInt8[Tensor, "c h w"]) -> UInt8[Tensor, "c crop crop"]:
        """Return the preprocessed image."""
        small = TF.resize(image, [self.resize], interpolation=InterpolationMode.BICUBIC, antialias=True)
        return TF.center_crop(small, [self.crop, self.crop])

    @property
    def key(self) -> str:
        """Cache key of the preprocessing."""
        return f"resize {self.resize} crop {self.crop}"


class ImageFeatures:
    """Features of images in order, as the keys of a search (`search.Keys`).

    Args:
        parts: blocks of rows of unit length, or the paths of their cache files.
        length: total number of rows.
        dim: D, number of channels.
    """

    def __init__(self, parts: Sequence[Float[Tensor, "m d"] | Path], length: int, dim: int) -> None:
        self._parts, self._length, self.dim = parts, length, dim

    def __len__(self) -> int:
        return self._length

    def blocks(self, rows: int) -> Iterator[Float[Tensor, "m d"]]:
        """Yield all rows in order, in blocks of at most `rows`, in their stored precision."""
        return in_blocks(map(stored, self._parts), rows)


@torch.no_grad()
def extract_global(
    encoders: Sequence[Encoder],
    images: ClassifiedFiles,
    preparation: SquareCrop,
    *,
    machine: Machine,
    precision: FeaturePrecision = "float32",
    progress: Progress = no_progress,
    what: str = "features",
) -> ImageFeatures:
    """Encode images that are not cached yet.

    Cache files contain 1024 images each. Their key consists of the encoder, the preparation, the name, size and
    modification time of each image, and the content of the first image, since hashing a million images would take as
    long as encoding them. An interrupted extraction loses at most 1024 images.

    Args:
        encoders: one encoder per device of the machine, on that device (`encoders_on`); batches are distributed
            round-robin.
        images: images to encode.
        preparation: preprocessing of the images.
        machine: resources of the search.
        precision: precision of the stored features.
        progress: progress callback.
        what: name of this phase in `progress`.

    Raises:
        UnreadableImage: an image is unreadable.
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
    dim = encoders[0].backbone.embed_dim
    require_room(len(wanted) * dim * dtype.itemsize, cache)
    if len(wanted) < len(images):
        what = f"{what} ({len(images) - len(wanted):,} cached)"
    loader = Batches(
        _Prepared(images, np.asarray(wanted), preparation),
        np.stack,
        batch_size=machine.batch_size,
        workers=machine.workers,
    )

    def report(done: int) -> None:
        progress(what, done, len(wanted))

    rows = _checked(_encoded(encoders, loader), images, wanted, report)
    # Valid because the missing blocks are in order, and only the last block is shorter.
    for number, part in zip(missing, in_blocks(rows, _BLOCK), strict=True):
        parts[number] = store(part.to(dtype), paths[number], cache)
    return ImageFeatures([part for part in parts if part is not None], len(images), dim)


def _path(
    cache: FeatureCache, images: ClassifiedFiles, block: range, preparation: SquareCrop, precision: FeaturePrecision
) -> Path:
    """Return the cache file of a block of images."""
    digest = hashlib.sha256(images.reading.key)
    for index in block:
        path = Path(images.path(index))
        try:
            status = path.stat()
            if index == block[0]:
                # Files of an archive may have equal times, and uncompressed images equal sizes: train/cat/1.bmp and
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
class _Prepared(Dataset[UInt8[np.ndarray, "c h w"]]):
    """Data set that reads and preprocesses images in the workers."""

    images: ClassifiedFiles
    indices: np.ndarray  # an array, since Python objects are copied to each worker
    preparation: SquareCrop

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> UInt8[np.ndarray, "c h w"]:
        # Contiguous, since rounding in sums depends on the memory layout.
        return self.preparation(self.images.load(int(self.indices[number]))).contiguous().numpy()


def _encoded(
    encoders: Sequence[Encoder], batches: Iterable[UInt8[np.ndarray, "b c h w"]]
) -> Iterator[Float[Tensor, "b d"]]:
    """Yield features of unit length by batch, with one thread per device and round-robin distribution."""
    ahead: deque[Future[Tensor]] = deque()
    with ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in encoders]
        for number, batch in enumerate(batches):
            place = number % len(encoders)
            ahead.append(threads[place].submit(_encode, encoders[place], batch))
            if len(ahead) > _BATCHES_AHEAD * len(encoders):
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _encode(encoder: Encoder, batch: UInt8[np.ndarray, "b c h w"]) -> Float[Tensor, "b d"]:
    return F.normalize(encoder.global_tokens(torch.from_numpy(batch)), dim=1).cpu()


def _checked(
    batches: Iterable[Float[Tensor, "b d"]],
    images: ClassifiedFiles,
    indices: Sequence[int],
    report: Callable[[int], None],
) -> Iterator[Float[Tensor, "b d"]]:
    """Yield the same batches, raising InputError with the name of the image if features are not finite."""
    done = 0
    for rows in batches:
        wrong = (~rows.isfinite().all(dim=1)).nonzero()
        if len(wrong):
            name = images.name(indices[done + int(wrong[0])])
            raise InputError(f"the features of the backbone for {name} are not finite: its weights are unusable")
        done += len(rows)
        report(done)
        yield rows
