"""The images to label, and the names of their results."""

import os
import posixpath
from pathlib import Path

from cribo.base.errors import DataError
from cribo.base.files import matching_files
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.reading import EXTENSIONS
from cribo.data.sources.collection import ImageCollection, open_collection, without_repeats
from cribo.data.sources.images import ImageFiles, by_pages, is_url, named_below_one_folder


def open_targets(
    source: str,
    *,
    column: str | None = None,
    apart_from: Path | None = None,
    reading: Reading = DEFAULT_READING,
) -> ImageCollection:
    """Find the images to label: a folder, a glob, one image, a list, tar shards, Parquet files, or a URL.

    Args:
        source: such as `frames`, `frames/**/*.jpg`, `list.txt`, `frame.jpg` or `s3://bucket/frames`.
        column: of Parquet files, the column of the images.
        apart_from: a folder to exclude, such as the output folder.
        reading: how images are read.

    Returns:
        The images. Files are named relative to one folder; for a list, it is the folder of the list if that contains
        all images, else their common folder.

    Raises:
        DataError: there are no images, or two images whose results would have the same name.
    """
    path = Path(source).expanduser()
    if is_url(source):
        images = open_collection(source, column=column, reading=reading)
    elif path.is_file() and path.suffix.lower() in EXTENSIONS:
        images = by_pages(ImageFiles(path.parent, [path.name], reading=reading))
    elif not path.exists() and any(sign in source for sign in "*?["):
        folder, names = _of_glob(path)
        if not names:
            raise DataError(f"no images match {source}: searched {folder.absolute()} for {' '.join(EXTENSIONS)}")
        images = by_pages(ImageFiles(folder, names, reading=reading))
    else:
        images = open_collection(path, column=column, reading=reading)
    if isinstance(images, ImageFiles):
        images = named_below_one_folder(images)
        if apart_from is not None:
            own = apart_from.absolute()
            folder, names = Path(images.folder), images.names
            apart = [k for k, name in enumerate(names) if own not in (folder / name).absolute().parents]
            if not apart:
                raise DataError(f"all images of {source} are in {apart_from}, the output folder: choose another --out")
            images = images.part(apart)
    images = without_repeats(images)
    named: dict[str, str] = {}
    for name in map(images.name, range(len(images))):
        if (other := named.setdefault(result_name(name), name)) != name:
            raise DataError(
                f"the results of {other} and {name} would have the same name, {result_name(name)}: rename one, or "
                "label them in two calls with different --out"
            )
    return images


def result_name(image: str) -> str:
    """Return the name of an image without its extension, as in the names of its results.

    It is a path below the output folder, also for images that are named by URLs, absolute paths or paths with `..`.

    Example:
        >>> [result_name(name) for name in ("a/1.jpg", "/data/1.jpg", "s3://bucket/1.jpg", "0.tar/../../1.jpg")]
        ['a/1', 'data/1', 's3/bucket/1', '0.tar/1']
    """
    first, *others = posixpath.splitext(image)[0].split("/")
    return "/".join(part for part in (first.removesuffix(":"), *others) if part not in ("", ".", ".."))


def place_of(images: ImageCollection, source: str) -> str:
    """Return the absolute path or the URL of the images of a source, to compare it with that of earlier results."""
    place = images.folder if isinstance(images, ImageFiles) else source
    return place if is_url(place) else os.path.realpath(place)


def _of_glob(pattern: Path) -> tuple[Path, list[str]]:
    """Return the folder above the first wildcard, and the matching images relative to it."""
    folder, found = matching_files(pattern)
    return folder, [path.relative_to(folder).as_posix() for path in found if path.suffix.lower() in EXTENSIONS]
