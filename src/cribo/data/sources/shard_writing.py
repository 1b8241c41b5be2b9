"""Writing of image files to tar shards in WebDataset's layout, for `cribo shard`."""

import csv
import io
import itertools
import os
import posixpath
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from cribo.base.bounds import at_least, between
from cribo.base.console import Progress
from cribo.base.errors import ConfigError, DataError, FolderError, TooManySkipped, UnreadableImage
from cribo.base.files import write_folder_whole
from cribo.base.job import require_writable
from cribo.data.randomness import keyed_generator
from cribo.data.reading import EncodedImage, kind_of_name, largest_factor, read_image, read_reduced
from cribo.data.sources.images import ImageFiles
from cribo.data.sources.storage import SUFFIX, LocalShards
from cribo.data.sources.tars import INDEX, build_index, escaped

SKIPPED = "skipped.csv"
"""The file in a folder of shards that lists skipped images and the reasons."""

JPEG_QUALITY = 95

_WRITING_ORDER = 4  # key of the random order
_AHEAD = 16  # images read ahead per thread
_MIN_SHARD_BYTES = 4096


@dataclass(frozen=True)
class WrittenShards:
    """The result of `write_shards`; `skipped` lists the name of each skipped image and the reason."""

    folder: Path
    shards: int
    images: int
    size_bytes: int
    skipped: Sequence[tuple[str, str]]


def write_shards(
    source: ImageFiles,
    out: str | os.PathLike[str],
    *,
    size: int | None = None,
    shard_bytes: int = 64 * 2**20,
    max_unreadable: float = 0.01,
    workers: int | None = None,
    progress: Progress | None = None,
) -> WrittenShards:
    """Write image files to tar shards with an index.

    The images are shuffled with a fixed seed, so that each shard is a random sample of the collection. Readable files
    are copied unchanged; with `size`, images whose shorter side is longer are converted to upright JPEGs with that
    shorter side. `out` is created only when complete.

    Args:
        source: the image files.
        out: folder to create.
        size: maximum of the shorter side in pixels; by default, files are copied unchanged.
        shard_bytes: approximate size of a shard; the last image may exceed it.
        max_unreadable: fraction of the images that may be unreadable; these are skipped and listed in `SKIPPED`.
        workers: number of threads that read images; by default, one per core.
        progress: called with the phase, the number of processed images and their total.

    Raises:
        FolderError: `out` exists, or its parent folder is not writable.
        ConfigError: a value is out of range, or images of other than three channels are to be reduced.
        DataError: no image can be read.
        TooManySkipped: more images than allowed are unreadable; nothing is left on disk.

    >>> written = write_shards(open_images("photographs"), "shards", size=512)  # doctest: +SKIP
    """
    at_least(2).check(size=size)
    at_least(_MIN_SHARD_BYTES).check(shard_bytes=shard_bytes)
    at_least(0).check(workers=workers)
    between(0, 1).check(max_unreadable=max_unreadable)
    if size is not None and source.reading.in_chans != 3:
        raise ConfigError(
            f"images of {source.reading.in_chans} channels cannot be reduced, since JPEG has three: omit --size, so "
            "that the files are copied, or --channels"
        )
    out = Path(out).expanduser()
    if out.exists() or out.is_symlink():
        has_shards = (out / INDEX).is_file()
        raise FolderError(f"{out} already exists: choose another folder{', or remove it' if has_shards else ''}")
    require_writable(out.parent, "OUT")
    skipped: list[tuple[str, str]] = []

    def write(folder: Path) -> None:
        read = _encoded(source, size, workers if workers is not None else os.cpu_count() or 1)
        members = _readable(source, read, max_unreadable, skipped, progress or (lambda what, done, total: None))
        _write_tars(members, folder, shard_bytes)
        build_index(LocalShards(folder)).write(folder / INDEX)
        if skipped:
            with (folder / SKIPPED).open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([("image", "reason"), *sorted(skipped)])

    write_folder_whole(out, write)
    sizes = LocalShards(out).sizes
    return WrittenShards(out, len(sizes), len(source) - len(skipped), sum(sizes), skipped)


Encoded = tuple[bytes, str]
"""The bytes of an image file, and its extension with the dot."""


def _write_tars(members: Iterator[tuple[str, bytes]], folder: Path, shard_bytes: int) -> None:
    """Write members to consecutive tar files, starting a new one at `shard_bytes`."""
    for number, first in enumerate(members):
        path = folder / f"images-{number:06d}{SUFFIX}"
        # The GNU format allows names of any length with any bytes.
        with tarfile.open(path, "x", format=tarfile.GNU_FORMAT) as tar:
            for name, content in itertools.chain([first], members):
                member = tarfile.TarInfo(name)  # no owner or time, so that equal images give identical files
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
                if tar.offset >= shard_bytes:
                    break


def _readable(
    source: ImageFiles,
    images: Iterable[tuple[int, Encoded | UnreadableImage]],
    max_unreadable: float,
    skipped: list[tuple[str, str]],
    progress: Progress,
) -> Iterator[tuple[str, bytes]]:
    """Yield the member name and content of each readable image; append the others to `skipped`."""
    what, total = "writing shards", len(source)
    progress(what, 0, total)
    for done, (index, image) in enumerate(images, start=1):
        if isinstance(image, UnreadableImage):
            skipped.append((escaped(source.name(index)), image.reason))
            if len(skipped) > max_unreadable * total:
                last = "; ".join(f"{name}: {reason}" for name, reason in skipped[-3:])
                raise TooManySkipped(
                    f"{len(skipped)} of {total} images cannot be read, more than max_unreadable allows; the last ones "
                    f"are {last}. Repair or remove them, or raise max_unreadable; nothing was written"
                )
        else:
            content, extension = image
            yield member_name(source.name(index), index, extension), content
        progress(what, done, total)
    if len(skipped) == total:
        raise DataError(f"none of the {total} images of {source.folder} can be read: {': '.join(skipped[0])}")


def _encoded(source: ImageFiles, size: int | None, workers: int) -> Iterator[tuple[int, Encoded | UnreadableImage]]:
    """Yield all images in writing order, read by threads, since decoders release the GIL."""
    threads = max(1, workers)
    order = torch.randperm(len(source), generator=keyed_generator(0, _WRITING_ORDER)).tolist()
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(order), _AHEAD * threads):
            part = order[start : start + _AHEAD * threads]
            yield from zip(part, pool.map(lambda index: _read(source, index, size), part), strict=True)


def _read(source: ImageFiles, index: int, size: int | None) -> Encoded | UnreadableImage:
    path = source.path(index)
    try:
        image = EncodedImage(path, Path(path).read_bytes())
        unchanged = image.content, posixpath.splitext(path)[1]
        if size is None:
            read_image(image, reading=source.reading)  # only decoding detects all damage
            return unchanged
        height = width = 0

        def reduction(whole_height: int, whole_width: int) -> int:
            nonlocal height, width
            height, width = whole_height, whole_width
            # Decode at no less than twice the size, then resize with the better filter below.
            return largest_factor(lambda factor: min(height, width) // factor >= 2 * size)

        pixels, _ = read_reduced(image, reduction, reading=source.reading)
        return unchanged if min(height, width) <= size else _shrunk(pixels, height, width, size)
    except UnreadableImage as error:
        return error
    except OSError as error:
        return UnreadableImage(path, error.strerror or str(error))


def _shrunk(pixels: UInt8[Tensor, "c h w"], height: int, width: int, size: int) -> Encoded:
    """Encode an image, originally of `height` x `width` pixels, as a JPEG with a shorter side of `size`."""
    height, width = (max(size, round(side * size / min(height, width))) for side in (height, width))
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    file = io.BytesIO()
    image.resize((width, height), Image.Resampling.LANCZOS).save(file, format="JPEG", quality=JPEG_QUALITY)
    return file.getvalue(), ".jpg"


def member_name(name: str, index: int, extension: str) -> str:
    """Return the name in a shard of an image whose `name` and `index` are those in the source.

    This is its path below the source folder. Dots in the file name are replaced by %2E, since WebDataset treats
    everything after the first dot as the extension. A path outside the folder is replaced by a number.

    >>> member_name("class.1/a.b.png", 7, ".png"), member_name("a.png", 7, ".jpg"), member_name("../a.png", 7, ".png")
    ('class.1/a%2Eb.png', 'a%2Epng.jpg', '000000007/a.png')
    """
    folder, base = posixpath.split(name)
    stem, own = posixpath.splitext(base)
    if own.lower() != extension.lower() and kind_of_name(base) != kind_of_name(f"{stem}{extension}"):
        stem = base  # otherwise a.png and a.jpg would get the same name
    stem = stem.replace(".", "%2E")
    # A list written on Windows may contain backslashes and drives.
    parts = folder.replace("\\", "/").split("/")
    leads_elsewhere = posixpath.isabs(name) or ".." in parts or ":" in parts[0]
    kept = f"{index:09d}" if leads_elsewhere else folder
    return f"{kept}/{stem}{extension}" if kept else f"{stem}{extension}"
