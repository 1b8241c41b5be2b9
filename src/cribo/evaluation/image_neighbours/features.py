"""One feature for each image of a set, computed once and kept on disk."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from cribo.console import Progress
from cribo.data import UnreadableImage
from cribo.data.classification import ClassifiedFiles
from cribo.evaluation.cache import DTYPES, FeatureCache, require_room
from cribo.evaluation.machine import Machine
from cribo.retrieval.choices import FeaturePrecision
from cribo.retrieval.encoders import ImageEncoder
from cribo.retrieval.search import in_blocks

_BLOCK = 1024  # images whose features share a file; what is lost at most where an extraction is cut short
_BATCHES_AHEAD = 2  # for each device


@dataclass(frozen=True)
class SquareCrop:
    """How an image becomes what is encoded: its shorter side is resized, and a square is cut from its centre.

    Attributes:
        resize: pixels of the shorter side; bicubic, anti-aliased.
        crop: pixels of the square's sides.
    """

    resize: int = 256
    crop: int = 224

    def __call__(self, image: UInt8[Tensor, "3 h w"]) -> UInt8[Tensor, "3 crop crop"]:
        """The pixels to encode."""
        small = TF.resize(image, [self.resize], interpolation=InterpolationMode.BICUBIC, antialias=True)
        return TF.center_crop(small, [self.crop, self.crop])

    @property
    def key(self) -> str:
        """What of it decides the pixels, beside the image."""
        return f"resize {self.resize} crop {self.crop}"


class ImageFeatures:
    """Features of images, in the order of the images, as the keys of a search (`search.Keys`).

    Args:
        parts: rows of unit length, or the files of the cache that hold them.
        length: rows of all parts.
        dim: D.
    """

    def __init__(self, parts: Sequence[Float[Tensor, "m d"] | Path], length: int, dim: int) -> None:
        self._parts = parts
        self._length = length
        self.dim = dim

    def __len__(self) -> int:
        return self._length

    def blocks(self, rows: int) -> Iterator[Float[Tensor, "m d"]]:
        """All rows in order, at most `rows` at once, in the precision they are kept in."""
        read = (part if isinstance(part, Tensor) else torch.from_numpy(np.load(part)) for part in self._parts)
        return in_blocks(read, rows)


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
    """Encode images, except those whose features the cache holds.

    Features are kept in files of 1024 images, named by the encoder, the preparation, name, size and date of the images,
    and what the first of them holds: to read more than a million images again only to know whether they are the same
    would take as long as many a network. An extraction that was cut short goes on where it stopped, to 1024 images.

    Args:
        encoders: one for each device of the machine, on that device; batches go round.
        images: whose features.
        preparation: how they are resized.
        machine: where it is computed.
        precision: in which they are kept.
        progress: is told how far it is.
        what: the name of it all in `progress`.

    Raises:
        UnreadableImage: an image that cannot be used.
        ValueError: the features do not fit in memory (without a cache) or on the disk (with one), or are not finite.
    """
    blocks = [range(start, min(start + _BLOCK, len(images))) for start in range(0, len(images), _BLOCK)]
    cache = machine.cache
    parts: list[Tensor | Path | None] = [None] * len(blocks)
    if cache is not None:
        parts = [_path(cache, images, block, preparation, precision) for block in blocks]
    missing = [number for number, part in enumerate(parts) if not _is_kept(part, len(blocks[number]), cache)]
    wanted = [index for number in missing for index in blocks[number]]
    require_room(len(wanted) * encoders[0].dim * DTYPES[precision].itemsize, cache)
    if len(wanted) < len(images):
        what = f"{what} ({len(images) - len(wanted):,} are there)"
    loader = DataLoader(
        _Prepared(images, wanted, preparation),
        batch_size=machine.batch_size,
        collate_fn=_stacked,
        num_workers=machine.workers,
        prefetch_factor=4 if machine.workers else None,
    )
    rows = _checked(_encoded(encoders, machine.devices, loader), images, wanted, partial(_report, progress, what))
    # Only the last block is shorter than the others, and whatever is missing comes in order.
    for number, part in zip(missing, in_blocks(rows, _BLOCK), strict=True):
        parts[number] = _keep(part.to(DTYPES[precision]), parts[number], cache)
    return ImageFeatures([part for part in parts if part is not None], len(images), encoders[0].dim)


def _path(
    cache: FeatureCache, images: ClassifiedFiles, block: range, preparation: SquareCrop, precision: FeaturePrecision
) -> Path:
    """Where the features of a block of images stand."""
    digest = hashlib.sha256()
    for index in block:
        path = Path(images.path(index))
        try:
            status = path.stat()
            if index == block[0]:
                # Archives may give all files one date, and uncompressed images are of one size: train/cat/1.bmp and
                # val/cat/1.bmp differ in what they hold alone.
                digest.update(path.read_bytes())
        except OSError as error:
            raise UnreadableImage(path, error.strerror or str(error)) from error
        digest.update(
            f"{images.name(index)}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape")
        )
    return cache.path(digest.hexdigest(), preparation.key, precision)


def _is_kept(part: Tensor | Path | None, images: int, cache: FeatureCache | None) -> bool:
    if cache is None or not isinstance(part, Path):
        return False
    rows = cache.read(part)
    return rows is not None and len(rows) == images


def _keep(rows: Float[Tensor, "m d"], path: Tensor | Path | None, cache: FeatureCache | None) -> Tensor | Path:
    """Put features where they stay."""
    if cache is None or not isinstance(path, Path):
        return rows
    cache.write(path, rows.numpy())
    return path


def _report(progress: Progress | None, what: str, done: int, total: int) -> None:
    if progress is not None:
        progress(what, done, total)


class _Prepared(Dataset["UInt8[np.ndarray, '3 h w'] | Exception"]):
    """Reads and resizes, in the workers.

    What is wrong with an image is handed over like the image itself: an error that is raised in a worker would
    arrive as a text of its traceback.
    """

    def __init__(self, images: ClassifiedFiles, indices: Sequence[int], preparation: SquareCrop) -> None:
        self.images = images
        self.indices = np.asarray(indices)  # no Python objects, which each worker would copy
        self.preparation = preparation

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> UInt8[np.ndarray, "3 h w"] | Exception:
        try:
            # In one layout, whether it goes through a worker's pipe or not: sums depend on it in their last bits.
            return self.preparation(self.images.load(int(self.indices[number]))).contiguous().numpy()
        except UnreadableImage as error:
            return error


def _stacked(prepared: Sequence[UInt8[np.ndarray, "3 h w"] | Exception]) -> UInt8[np.ndarray, "b 3 h w"] | Exception:
    """A batch, or the first thing that is wrong with one of its images."""
    wrong = next((part for part in prepared if isinstance(part, Exception)), None)
    return np.stack([part for part in prepared if not isinstance(part, Exception)]) if wrong is None else wrong


def _encoded(
    encoders: Sequence[ImageEncoder],
    devices: Sequence[str],
    batches: Iterable[UInt8[np.ndarray, "b 3 h w"] | Exception],
) -> Iterator[Float[Tensor, "b d"]]:
    """Features of unit length, batch by batch; each device has a thread, and every batch goes to the next one."""
    ahead: deque[Future[Tensor]] = deque()
    with ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in encoders]
        for number, batch in enumerate(batches):
            if isinstance(batch, Exception):
                raise batch
            place = number % len(encoders)
            ahead.append(threads[place].submit(_encode, encoders[place], devices[place], batch))
            if len(ahead) > _BATCHES_AHEAD * len(encoders):
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


@torch.no_grad()  # which holds in one thread only
def _encode(encoder: ImageEncoder, device: str, batch: UInt8[np.ndarray, "b 3 h w"]) -> Float[Tensor, "b d"]:
    return F.normalize(encoder.features(torch.from_numpy(batch), device), dim=1).cpu()


def _checked(
    batches: Iterable[Float[Tensor, "b d"]],
    images: ClassifiedFiles,
    indices: Sequence[int],
    report: Callable[[int, int], None],
) -> Iterator[Float[Tensor, "b d"]]:
    """The same batches; numbers that are not finite are said with the image they are of."""
    done = 0
    for rows in batches:
        wrong = (~rows.isfinite().all(dim=1)).nonzero()
        if len(wrong):
            name = images.name(indices[done + int(wrong[0])])
            raise ValueError(f"the backbone gives features of {name} that are not finite: its weights cannot be used")
        done += len(rows)
        report(done, len(indices))
        yield rows
