"""Image files into tar shards, as WebDataset lays them out: what `cribo shard` does."""

import csv
import io
import os
import posixpath
import shutil
import tarfile
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from cribo.console import Progress
from cribo.data.images import DataError, ImageFiles
from cribo.data.randomness import keyed_generator
from cribo.data.reading import EncodedImage, UnreadableImage, read_image, read_reduced
from cribo.data.storage import SUFFIX, LocalShards
from cribo.data.tars import INDEX, build_index, escaped
from cribo.errors import Stopped
from cribo.files import FolderError, sync

SKIPPED = "skipped.csv"
"""The file in a folder of shards that lists the images that were left out, with the reasons."""

JPEG_QUALITY = 95

# What the order of the images is drawn for.
_WRITING_ORDER = 4
_AHEAD = 8  # images that each thread may be ahead of the writing
_LEAST_BYTES = 4096


class TooManySkipped(Stopped):
    """More images than allowed could not be read."""


@dataclass(frozen=True)
class WrittenShards:
    """What `write_shards` has left.

    Attributes:
        folder: of the shards.
        shards: number of them.
        images: in them.
        size_bytes: of them.
        skipped: name and reason of each image that was left out.
    """

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
    threads: int | None = None,
    progress: Progress | None = None,
) -> WrittenShards:
    """Write image files to tar shards, with their index.

    The images come in one drawn order, the same each time, so that a shard is a sample of the collection and not
    a piece of it. Their files are copied as they are, once they are known to be readable; with `size` those whose
    shorter side is longer become upright JPEGs of that side. `out` appears when it is complete.

    Args:
        source: the image files.
        out: folder to make.
        size: of the shorter side in pixels, at most; the files themselves when not given.
        shard_bytes: of a shard, about: its last image may go beyond.
        max_unreadable: share of the images that may be unreadable; those are left out and listed in `SKIPPED`.
        threads: that read and decode; as many as there are cores when not given.
        progress: is told what is done, how much of it, and how much there is.

    Raises:
        FolderError: `out` exists, or its folder cannot be written to.
        DataError: a value is out of range, or no image can be read.
        TooManyUnreadable: nothing is left of what was written.

    >>> written = write_shards(open_images("photographs"), "shards", size=512)  # doctest: +SKIP
    """
    _check(size, shard_bytes, max_unreadable)
    out = Path(out).expanduser()
    if out.exists() or out.is_symlink():
        raise FolderError(f"{out} exists already: name another folder, or remove it")
    part = out.with_name(f".{out.name}.{uuid.uuid4().hex}.part")
    try:
        part.mkdir(parents=True)
    except OSError as error:
        raise FolderError(f"cannot write to {out.parent}: {error.strerror}; name another folder") from error
    try:
        skipped = _write_all(
            source,
            part,
            size=size,
            shard_bytes=shard_bytes,
            most_skipped=max_unreadable * len(source),
            threads=threads or os.cpu_count() or 1,
            progress=progress or (lambda what, done, total: None),
        )
        index = build_index(LocalShards(part))
        index.write(part / INDEX)
        _write_skipped(part / SKIPPED, skipped)
        sync(part)
        if out.exists():
            raise FolderError(f"{out} exists by now: name another folder, or remove it")
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return WrittenShards(out, len(index.shards), len(index), sum(index.sizes), skipped)


def _check(size: int | None, shard_bytes: int, max_unreadable: float) -> None:
    if size is not None and size < 2:
        raise DataError(f"size must be >= 2 pixels, got {size}")
    if shard_bytes < _LEAST_BYTES:
        raise DataError(f"shard_bytes must be >= {_LEAST_BYTES}, got {shard_bytes}")
    if not 0 <= max_unreadable <= 1:
        raise DataError(f"max_unreadable must be between 0 and 1, got {max_unreadable}")


def _write_all(
    source: ImageFiles,
    folder: Path,
    *,
    size: int | None,
    shard_bytes: int,
    most_skipped: float,
    threads: int,
    progress: Progress,
) -> list[tuple[str, str]]:
    """Write all shards; name and reason of each image that was left out."""
    skipped: list[tuple[str, str]] = []
    what = "writing shards"
    progress(what, 0, len(source))
    with _Shards(folder, shard_bytes) as shards:
        for done, (index, encoded) in enumerate(_encoded(source, size, threads), start=1):
            if isinstance(encoded, UnreadableImage):
                skipped.append((escaped(source.name(index)), encoded.reason))
                if len(skipped) > most_skipped:
                    raise TooManySkipped(_too_many(skipped, len(source)))
            else:
                content, extension = encoded
                shards.add(member_name(source.name(index), index, extension), content)
            progress(what, done, len(source))
    if len(skipped) == len(source):
        raise DataError(f"none of the {len(source)} images of {source.folder} can be read: {': '.join(skipped[0])}")
    return skipped


def _too_many(skipped: list[tuple[str, str]], total: int) -> str:
    last = "; ".join(f"{name}: {reason}" for name, reason in skipped[-3:])
    return (
        f"{len(skipped)} of {total} images cannot be read, more than max_unreadable allows; the last ones are {last}. "
        "Mend or remove them, or raise max_unreadable; nothing was written"
    )


Encoded = tuple[bytes, str]
"""The bytes of an image file, and its extension with the dot."""


def _encoded(source: ImageFiles, size: int | None, threads: int) -> Iterator[tuple[int, Encoded | UnreadableImage]]:
    """All images in the order of writing, read ahead by threads: decoders let go of Python's lock."""
    order = torch.randperm(len(source), generator=keyed_generator(0, _WRITING_ORDER)).tolist()
    waiting: deque[tuple[int, Future[Encoded | UnreadableImage]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for index in order:
                waiting.append((index, pool.submit(_read, source, index, size)))
                if len(waiting) >= _AHEAD * threads:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _read(source: ImageFiles, index: int, size: int | None) -> Encoded | UnreadableImage:
    path = source.path(index)
    try:
        image = EncodedImage(path, Path(path).read_bytes())
        as_it_is = image.content, posixpath.splitext(path)[1]
        if size is None:
            read_image(image, max_pixels=source.max_pixels)  # much that is broken is found by decoding alone
            return as_it_is
        whole = (0, 0)

        def reduction(height: int, width: int) -> int:
            nonlocal whole
            whole = height, width
            # Twice the size is left to the better filter below.
            return next((by for by in (8, 4, 2) if min(height, width) // by >= 2 * size), 1)

        pixels, _ = read_reduced(image, reduction, max_pixels=source.max_pixels)
        return as_it_is if min(whole) <= size else _shrunk(pixels, whole, size)
    except UnreadableImage as error:
        return error
    except OSError as error:
        return UnreadableImage(path, error.strerror or str(error))


def _shrunk(pixels: UInt8[Tensor, "3 h w"], whole: tuple[int, int], size: int) -> Encoded:
    height, width = (max(size, round(side * size / min(whole))) for side in whole)
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    file = io.BytesIO()
    image.resize((width, height), Image.Resampling.LANCZOS).save(file, format="JPEG", quality=JPEG_QUALITY)
    return file.getvalue(), ".jpg"


def member_name(name: str, index: int, extension: str) -> str:
    """What an image file is called in a shard.

    Its path below the source's folder, with dots inside the file's name written as %2E, since WebDataset takes
    what follows the first one for the kind of file; a number in place of the path, where that leads elsewhere.

    Args:
        name: of the file in its source.
        index: of the file in its source.
        extension: of what is written, with the dot.

    >>> member_name("class.1/a.b.png", 7, ".png"), member_name("a.png", 7, ".jpg"), member_name("../a.png", 7, ".png")
    ('class.1/a%2Eb.png', 'a%2Epng.jpg', '000000007/a.png')
    """
    folder, base = posixpath.split(name)
    stem, own = posixpath.splitext(base)
    if own.lower() != extension.lower() and not {own.lower(), extension.lower()} <= {".jpg", ".jpeg", ".jpe", ".jfif"}:
        stem = base  # else a.png and a.jpg would become one
    stem = stem.replace(".", "%2E")
    # os.sep and drives, too: a list may have been written on another system
    parts = folder.replace("\\", "/").split("/")
    leads_elsewhere = posixpath.isabs(name) or ".." in parts or ":" in parts[0]
    kept = f"{index:09d}" if leads_elsewhere else folder
    return f"{kept}/{stem}{extension}" if kept else f"{stem}{extension}"


class _Shards:
    """Writes members to one tar file after the other."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.folder = folder
        self.shard_bytes = shard_bytes
        self._number = 0
        self._open: tuple[BinaryIO, tarfile.TarFile] | None = None

    def add(self, name: str, content: bytes) -> None:
        """Write one member, to a new shard if the last one is full."""
        if self._open is None:
            path = self.folder / f"images-{self._number:06d}{SUFFIX}"
            file = path.open("xb")
            # GNU's format takes names of any length and any bytes.
            self._open = file, tarfile.TarFile(fileobj=file, mode="w", format=tarfile.GNU_FORMAT)
            self._number += 1
        file, tar = self._open
        member = tarfile.TarInfo(name)  # no owner, no time: the same images give the same bytes
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
        if file.tell() >= self.shard_bytes:
            self._close()

    def _close(self) -> None:
        if self._open is not None:
            file, tar = self._open
            self._open = None
            with file:
                tar.close()
                file.flush()
                os.fsync(file.fileno())

    def __enter__(self) -> "_Shards":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


def _write_skipped(path: Path, skipped: Sequence[tuple[str, str]]) -> None:
    if skipped:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("image", "reason"))
            writer.writerows(sorted(skipped))
