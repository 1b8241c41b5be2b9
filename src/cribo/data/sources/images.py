"""Collections of image files: folders of any depth, and text files that list images."""

from __future__ import annotations

import errno
import logging
import os
import posixpath
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from cribo.base.errors import DataError, InputError, MissingData, MissingPackage, UnreadableImage
from cribo.base.files import absolute_path, read_lines, require
from cribo.base.wording import counted, enumerated, is_utf8, printable
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.reading import (
    EXTENSIONS,
    NOT_UTF8,
    UNREAD_EXTENSIONS,
    FileState,
    ImageContent,
    image_content,
    image_size,
    kind_of_name,
    open_picture,
    page_name,
    read_image,
    read_reduced,
    require_utf8,
    stored_page,
)
from cribo.data.windows import LargeImage, read_or_open

if TYPE_CHECKING:
    from jaxtyping import Int, Int64, UInt8
    from torch import Tensor

log = logging.getLogger("cribo")

_HEADER_READERS = 8  # threads


class ImageSource(Protocol):
    """An indexed collection of images, the input of pretraining.

    Any object with these three methods is an image source:

    >>> class Frames:
    ...     def __len__(self): return 100
    ...     def load(self, index): return torch.full((3, 64, 64), index, dtype=torch.uint8)
    ...     def name(self, index): return f"frame {index}"
    """

    def __len__(self) -> int:
        """Number of images."""
        ...

    def load(self, index: int) -> UInt8[Tensor, "c h w"]:
        """Load an image as RGB; raises UnreadableImage for a broken one, which training skips and reports."""
        ...

    def name(self, index: int) -> str:
        """Return the name of an image in reports and messages, which must be the same in every run."""
        ...


@runtime_checkable
class ReducingSource(ImageSource, Protocol):
    """An ImageSource that can decode images at a fraction of their size, which is faster.

    Pretraining calls `load_reduced` if available, and `load` otherwise.
    """

    def load_reduced(self, index: int, reduction: Callable[[int, int], int]) -> tuple[UInt8[Tensor, "c h w"], int]:
        """Load an image reduced by at most the factor that `reduction` returns; return the image and its factor.

        The factor is 8, 4, 2 or 1. `reduction` must be called exactly once, with height and width of the full-size
        image. Raises UnreadableImage for a broken image.
        """
        ...


@runtime_checkable
class OrderedSource(ImageSource, Protocol):
    """An ImageSource that defines the order of each epoch, for storage without fast random access.

    For other sources, the order is a uniformly random permutation.
    """

    def epoch_order(self, seed: int, epoch: int) -> Int[Tensor, " n"]:
        """Return a permutation of all indices that depends only on the arguments and the collection."""
        ...


class PackedNames:
    """An immutable sequence of strings in two flat arrays: the bytes of all strings, and the end of each.

    A list of a million strings takes about 100 MB in the parent process and, since every access writes a reference
    count, is copied page by page into each forked worker. Arrays contain no Python objects, so workers share them.
    """

    def __init__(self, names: Iterable[str]) -> None:
        text, ends = bytearray(), array("q", [0])
        for name in names:
            text += os.fsencode(name)  # also for file names that are not valid UTF-8
            ends.append(len(text))
        self._text = np.frombuffer(bytes(text), dtype=np.uint8)
        self._ends = np.frombuffer(ends.tobytes(), dtype=np.int64)

    @classmethod
    def from_arrays(cls, text: UInt8[np.ndarray, " bytes"], ends: Int64[np.ndarray, " n1"]) -> PackedNames:
        """Restore names from their `arrays`.

        Raises:
            ValueError: the arrays are inconsistent.
        """
        if len(ends) == 0 or ends[0] != 0 or ends[-1] != len(text) or (np.diff(ends) < 0).any():
            raise InputError("text and ends are not the arrays of PackedNames: ends must rise from 0 to len(text)")
        names = cls(())
        names._text, names._ends = text, ends
        return names

    @property
    def arrays(self) -> tuple[UInt8[np.ndarray, " bytes"], Int64[np.ndarray, " n1"]]:
        """The two arrays to store in a file: the bytes of all names; 0 and the end of each name."""
        return self._text, self._ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"index must be in 0..{len(self) - 1}, got {index}")
        return os.fsdecode(self._text[self._ends[index] : self._ends[index + 1]].tobytes())


class EncodedImages:
    """Base of collections whose images are bytes: decodes what `read` returns.

    Args:
        reading: how images are read.
    """

    def __init__(self, reading: Reading) -> None:
        self.reading = reading

    def __len__(self) -> int:
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Return the name of an image."""
        raise NotImplementedError

    def read(self, index: int) -> ImageContent:
        """Read the bytes of an image; a large file is opened where it is decoded."""
        raise NotImplementedError

    def load(self, index: int) -> UInt8[Tensor, "c h w"]:
        """Load an image as upright RGB. Raises UnreadableImage (see `read_image`)."""
        return read_image(self._encoded(index), reading=self.reading)

    def load_or_open(self, index: int) -> UInt8[Tensor, "c h w"] | LargeImage:
        """Load an image; one above the limit of pixels is returned unread (see `read_or_open`)."""
        return read_or_open(self._encoded(index), self.reading)

    def load_reduced(self, index: int, reduction: Callable[[int, int], int]) -> tuple[UInt8[Tensor, "c h w"], int]:
        """Load an image as upright RGB at a fraction of its size if that is faster (see `read_reduced`)."""
        return read_reduced(self._encoded(index), reduction, reading=self.reading)

    def _encoded(self, index: int) -> ImageContent:
        """Read an image; a missing file is an unreadable image."""
        try:
            return self.read(index)
        except FileNotFoundError as error:
            raise UnreadableImage(self.name(index), "no such file") from error
        except OSError as error:
            raise UnreadableImage(self.name(index), error.strerror or str(error)) from error


def ascending(indices: Sequence[int], length: int) -> Int64[np.ndarray, " n"]:
    """Return the indices of a part of a collection of `length` images as an array.

    Raises:
        ValueError: they do not ascend.
        IndexError: an index is out of range.
    """
    found = np.asarray(indices, dtype=np.int64)
    if (np.diff(found) <= 0).any():
        raise InputError("the indices of a part must ascend: sort them, each once")
    if len(found) and not 0 <= found[0] <= found[-1] < length:
        raise IndexError(f"indices must be in 0..{length - 1}, got {found[0]}..{found[-1]}")
    return found


class ImageFiles(EncodedImages):
    """Image files as an ImageCollection; created by `open_images`.

    `names` are paths relative to `folder` (or absolute), with `/` on every system, in the order of the indices.
    """

    def __init__(
        self, folder: str | os.PathLike[str], names: Iterable[str], *, reading: Reading = DEFAULT_READING
    ) -> None:
        super().__init__(reading)
        self.folder = os.fspath(folder)
        self.names = names if isinstance(names, PackedNames) else PackedNames(names)

    def __getstate__(self) -> dict[str, Any]:
        # Another process may have another working directory.
        return {**vars(self), "folder": os.path.abspath(self.folder)}

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """Return the path of an image below `folder`, with `/` on every system; a name that is not UTF-8 is escaped."""
        name = self.names[index]
        return name if is_utf8(name) else printable(name)

    def path(self, index: int) -> str:
        """Return the path of an image file."""
        return os.path.join(self.folder, self.names[index])

    def read(self, index: int) -> ImageContent:
        """Read an image file, unless it is large (`image_content`).

        Raises OSError, and UnreadableImage if its name is not valid UTF-8.
        """
        require_utf8(self.names[index])
        return image_content(self.names[index], self.path(index))

    def state(self, index: int) -> FileState:
        """Return size and modification time of an image file; raises OSError if it is gone or its name is not UTF-8."""
        if not is_utf8(self.names[index]):
            raise OSError(errno.EILSEQ, NOT_UTF8, self.name(index))
        status = os.stat(stored_page(self.path(index))[0])
        return FileState(status.st_size, status.st_mtime_ns)

    def part(self, indices: Sequence[int]) -> ImageFiles:
        """Return some of the files, given ascending indices."""
        names = (self.names[index] for index in ascending(indices, len(self)).tolist())
        return ImageFiles(self.folder, names, reading=self.reading)

    def load(self, index: int) -> UInt8[Tensor, "c h w"]:
        """Load an image as upright RGB. Raises UnreadableImage (see `read_image`)."""
        return read_image(self.path(index), reading=self.reading)

    def require_size(self, index: int, size: tuple[int, ...], what: str) -> None:
        """Raise DataError if `what`, such as a label map, does not have the (height, width) of an image."""
        height, width = image_size(self.path(index), reading=self.reading)
        if size != (height, width):
            scaled = f" at --pixel_size {self.reading.pixel_size:g}" if self.reading.pixel_size else ""
            raise DataError(
                f"{what} must have the size of image {self.name(index)}{scaled}, {width} x {height}, got {size[1]} x "
                f"{size[0]}"
            )

    def load_reduced(self, index: int, reduction: Callable[[int, int], int]) -> tuple[UInt8[Tensor, "c h w"], int]:
        """Load an image as upright RGB at a fraction of its size if that is faster (see `read_reduced`)."""
        return read_reduced(self.path(index), reduction, reading=self.reading)


def open_images(
    root: str | os.PathLike[str], images: str = "", *, reading: Reading = DEFAULT_READING, inside: bool = False
) -> ImageFiles:
    """Open all images below a folder, or those listed in a text file.

    `root` is a folder of any layout (flat like COCO's `train2017`, class folders like ImageNet, or deeper), of
    which `images` may name a sub-folder; or a .txt file with one path per line, absolute or relative to the
    folder of the file. Blank lines and lines that start with # are ignored. Folders are searched recursively,
    following links; hidden files and folders are skipped. Every file with one of `EXTENSIONS` is included; name
    the sub-folder with `images` if the root also contains label maps. Images of a folder are sorted by name (by
    code point, part by part) on every system; those of a list keep its order. With `inside`, images must be
    inside the folder, or the folder of the list, after links are resolved.

    Raises MissingData if a folder, a list or a listed image does not exist; DataError if there are no images,
    `root` is another type of file, or an image violates `inside`.

    >>> train = open_images("coco", "train2017")  # doctest: +SKIP
    >>> train.load(0).shape, train.name(0)  # doctest: +SKIP
    (torch.Size([3, 480, 640]), '000000000009.jpg')
    """
    path = Path(root).expanduser() / images
    require(path)
    if path.is_dir():
        files = ImageFiles(path, _image_files(path), reading=reading)
        if len(files) == 0:
            raise DataError(_nothing_found(path))
        if inside:
            require_inside(path, zip(files.names, files.names, strict=True))
        return by_pages(files)
    if path.suffix.lower() != ".txt":
        raise DataError(f"{path} is a file: give a folder of images, or a .txt file that lists one image per line")
    listed = read_list(path)
    if inside:
        require_inside(path.parent, ((f"line {line} of {path}", name) for line, name in listed))
    names = [name for _, name in listed]
    if urls := [name for name in names if is_url(name)]:
        raise DataError(f"{path} lists the URL {urls[0]}, and this command reads files: copy the images to a folder")
    require_files(path, names)
    return by_pages(ImageFiles(path.parent, names, reading=reading))


def by_pages(files: ImageFiles) -> ImageFiles:
    """Return image files with each page of a stack as an image of its own, named `stack.page003.tif`.

    Only headers are read, and only those of kinds that may have several pages (`ImageKind.pages`). With
    `reading.page`, each file remains one image; so does a file that cannot be read, which is reported where it is used.
    """
    if files.reading.page is not None or not any(map(_is_of_pages, files.names)):
        return files
    with ThreadPoolExecutor(_HEADER_READERS) as pool:
        counts = list(pool.map(lambda index: _pages(files, index), range(len(files))))
    if max(counts) == 1:
        return files
    return ImageFiles(files.folder, _page_names(files, counts), reading=files.reading)


def _is_of_pages(name: str) -> bool:
    kind = kind_of_name(name)
    return kind is not None and kind.pages == "one"


def _page_names(files: ImageFiles, counts: list[int]) -> Iterator[str]:
    for name, pages in zip(files.names, counts, strict=True):
        if pages == 1:
            yield name
        else:
            yield from (page_name(name, page, pages) for page in range(pages))


def _pages(files: ImageFiles, index: int) -> int:
    """Return the number of pages of a file, 1 for an unreadable one."""
    from cribo.data.readers.headers import may_have_pages

    path = files.path(index)
    if not _is_of_pages(path):
        return 1
    try:
        with open(path, "rb") as file:
            if not may_have_pages(file):
                return 1
        with open_picture(path, reading=replace(files.reading, page=0)) as first:
            pages = first.pages
    except (UnreadableImage, MissingPackage, OSError):
        return 1
    if pages == 1 or files.reading.channels is None:
        return pages
    try:
        with open_picture(path, reading=files.reading):  # the channels are unnamed pages
            return 1
    except UnreadableImage:
        return pages


def _image_files(folder: Path) -> Iterator[str]:
    """Iterate over the images in a folder, and log the number of those in formats that are not read."""
    unread: Counter[str] = Counter()
    for name in list_files(folder, (*EXTENSIONS, *UNREAD_EXTENSIONS)):
        if (extension := os.path.splitext(name)[1].lower()) in UNREAD_EXTENSIONS:
            unread[extension] += 1
        else:
            yield name
    if unread:
        log.warning(
            "%s in %s %s ignored (%s), since these formats cannot be read: convert them to JPEG, PNG or TIFF",
            counted(unread.total(), "image"),
            folder,
            "is" if unread.total() == 1 else "are",
            enumerated([f"{count} {extension}" for extension, count in unread.most_common()]),
        )


def named_below_one_folder(files: ImageFiles) -> ImageFiles:
    """Name images by their paths below one folder, each image once, for results that mirror these paths.

    The folder is that of the images, or, if a list contains images outside its own folder, the common folder of all
    images.

    >>> files = named_below_one_folder(ImageFiles("/lists", ["/data/a/1.jpg", "../data/b/2.jpg", "/data/b/2.jpg"]))
    >>> files.folder, list(files.names)
    ('/data', ['a/1.jpg', 'b/2.jpg'])
    """
    names = list(files.names)
    if not any(os.path.isabs(name) or ".." in name.split("/") for name in names):
        return ImageFiles(files.folder, dict.fromkeys(map(posixpath.normpath, names)), reading=files.reading)

    @lru_cache(maxsize=1024)
    def resolved(folder: str) -> str:
        return os.path.realpath(folder)  # `..` after a link leads to the parent of its target

    paths = [os.path.split(os.path.join(files.folder, name)) for name in names]
    paths = dict.fromkeys(os.path.join(resolved(folder), name) for folder, name in paths)
    folder = resolved(files.folder)
    if not all(path.startswith(os.path.join(folder, "")) for path in paths):
        folder = os.path.commonpath([os.path.dirname(path) for path in paths])
    return ImageFiles(folder, (Path(path).relative_to(folder).as_posix() for path in paths), reading=files.reading)


def require_readable(images: ImageSource, what: str, *, most: int | None = None, windows: bool = False) -> None:
    """Check that an image can be read. Images are read until the first success.

    Args:
        images: the collection.
        what: its name in the message, such as "the images in photographs".
        most: number of images to try; all by default.
        windows: whether images above the limit of pixels are read in windows (`cribo.data.windows`).

    Raises:
        DataError: none of them can be read; the message gives the first reason.
    """
    tried = len(images) if most is None else min(most, len(images))
    first: UnreadableImage | None = None
    for index in range(tried):
        try:
            if windows and isinstance(images, EncodedImages):
                images.load_or_open(index)
            else:
                images.load(index)
            return
        except UnreadableImage as error:
            first = first or error
    if tried == 1:
        raise DataError(f"the only image of {what} cannot be read: {first}")
    part = "" if tried == len(images) else "first "
    raise DataError(f"none of the {part}{tried} images of {what} can be read; the first is {first}")


def has_images(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder contains an image file at any depth."""
    return next(list_files(folder, EXTENSIONS), None) is not None


def composed(name: str) -> str:
    """Return a name in Unicode's composed form (NFC), in which names are compared.

    Archives from macOS contain é as e and an accent.
    """
    return unicodedata.normalize("NFC", name)


class FilesBelow:
    """Files below a folder by names from other systems: in any Unicode form, also with backslashes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listed: dict[Path, dict[str, Path]] = {}

    def find(self, name: str) -> str | None:
        """Return the path of a file below the folder; None if there is no such file."""
        for each in dict.fromkeys((name, name.replace("\\", "/"))):
            for path in (self._folder / each, self._in_any_form(each)):
                if os.path.isfile(path):
                    return os.path.relpath(path, self._folder) if path != self._folder / each else each
        return None

    def _in_any_form(self, name: str) -> Path:
        """Return the path with the names on disk, which may have another Unicode form."""
        here = self._folder
        for part in () if name.isascii() else name.split("/"):
            if here not in self._listed:
                there = here.iterdir() if os.path.isdir(here) else ()
                self._listed[here] = {composed(path.name): path for path in there}
            here = self._listed[here].get(composed(part), here / part)
        return here


def is_url(root: str | os.PathLike[str]) -> bool:
    """Whether `root` is a URL.

    >>> is_url("s3://bucket/prefix"), is_url("C:/images"), is_url("images")
    (True, False, False)
    """
    return "://" in os.fspath(root)


def collection_name(source: str) -> str:
    """Return a short name of a collection of images, to name folders of results after it.

    Args:
        source: what names the collection on the command line.

    Example:
        >>> [collection_name(source) for source in ("s3://bucket/street/", "frames/**/*.jpg", "lists/train.txt", "/")]
        ['street', 'frames', 'train', 'images']
    """
    place = re.split(r"[*?\[{]", source)[0]
    if place != source:  # a pattern: the folder that it begins with
        place = place.rpartition("/")[0]
    path = Path(place) if is_url(source) else Path(place).expanduser().resolve()
    name = path.name if path.is_dir() else path.stem
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "images"


def require_inside(folder: Path, names: Iterable[tuple[str, str]]) -> None:
    """Raise DataError for the first (location, name) that is a URL or resolves to a path outside the folder."""
    home = os.path.join(os.path.realpath(folder), "")
    for where, name in names:
        leads_to = name if is_url(name) else os.path.realpath(os.path.join(folder, name))
        if not leads_to.startswith(home):
            raise DataError(
                f"{where} resolves to {leads_to}, outside {folder}: remove it, or allow it with data.inside false"
            )


def list_files(folder: str | os.PathLike[str], extensions: Iterable[str]) -> Iterator[str]:
    """Iterate over the paths of all files below `folder` with one of `extensions` (lower case, with dot), in order.

    Links are followed, except those to a folder above themselves. Paths are relative to `folder`
    and use `/`. Raises DataError if a folder cannot be listed.
    """
    return _walk(os.fspath(folder), "", frozenset(extensions), ())


def list_directly(folder: Path, suffix: str) -> list[Path]:
    """List the files directly in a folder that end in `suffix`, without hidden ones, sorted by name."""
    return sorted(path for path in folder.glob(f"*{suffix}") if not path.name.startswith(".") and path.is_file())


def _walk(folder: str, prefix: str, extensions: frozenset[str], above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    status = os.stat(folder)
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    try:
        with os.scandir(folder) as entries:
            # Sorted per folder: the whole tree is never in memory.
            visible = sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"cannot list the folder {folder}: {error.strerror}") from error
    for entry in visible:
        if entry.is_dir():
            yield from _walk(entry.path, f"{prefix}{entry.name}/", extensions, (*above, here))
        # is_file() excludes named pipes, which would block when opened.
        elif os.path.splitext(entry.name)[1].lower() in extensions and entry.is_file():
            yield prefix + entry.name


def read_list(path: Path) -> list[tuple[int, str]]:
    """Return the line numbers and names in a list of images; raises DataError if it is empty or not UTF-8 text."""
    names = [(number, line) for number, line in read_lines(path, "a list of images") if not line.startswith("#")]
    if not names:
        raise DataError(f"{path} lists no images: put one path per line, relative to {path.parent} or absolute")
    return names


def require_files(path: Path, names: list[str]) -> None:
    """Raise MissingData if files in the list at `path` do not exist."""
    missing = [name for name in names if not os.path.isfile(os.path.join(path.parent, name))]
    if missing:
        verb = "does" if len(missing) == 1 else "do"
        raise MissingData(
            f"{len(missing)} of the {counted(len(names), 'image')} listed in {path} {verb} not exist, the first is "
            f"{missing[0]!r} (looked for at {absolute_path(path.parent / missing[0])})"
        )


def _nothing_found(folder: Path) -> str:
    found: Counter[str] = Counter()
    broken = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            found["hidden" if name.startswith(".") else os.path.splitext(name)[1] or "without extension"] += 1
            broken += not os.path.exists(os.path.join(parent, name))
    there = enumerated([f"{count} {kind}" for kind, count in found.most_common()]) or "no files at all"
    links = f" ({broken} of them broken links)" if broken else ""
    return f"no images in {folder}: looked for {' '.join(EXTENSIONS)}, found {there}{links}"
