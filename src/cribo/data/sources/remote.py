"""Images in object storage: files below a URL, and lists that contain URLs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cribo.base.errors import DataError
from cribo.base.redaction import without_secrets
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.reading import EXTENSIONS, EncodedImage, FileState
from cribo.data.sources.images import (
    EncodedImages,
    PackedNames,
    ascending,
    is_url,
    require_files,
    require_inside,
)
from cribo.data.sources.storage import file_state, list_folder, list_tree, read_file, with_sizes

if TYPE_CHECKING:
    from jaxtyping import Int64


class RemoteImages(EncodedImages):
    """Image files in object storage as an ImageCollection; created by `open_remote` and `open_mixed_list`.

    Args:
        root: URL or folder of the names that are relative.
        names: URLs, or paths relative to `root`.
        states: size in bytes and modification time in nanoseconds of each image, as listed; None requests the state
            of an image when it is needed.
        reading: as for `read_image`.
    """

    def __init__(
        self,
        root: str,
        names: Iterable[str],
        states: Int64[np.ndarray, "n 2"] | None = None,
        *,
        reading: Reading = DEFAULT_READING,
    ) -> None:
        super().__init__(reading)
        self.root = root
        self.names = PackedNames(names)
        self._states = states

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """Return the path of an image relative to the root, or its URL without secrets."""
        return without_secrets(self.names[index])

    def read(self, index: int) -> EncodedImage:
        """Read an image; raises OSError if it is gone, and ShardError if the storage failed repeatedly."""
        name = self.names[index]
        return EncodedImage(without_secrets(name), read_file(located(self.root, name)))

    def state(self, index: int) -> FileState:
        """Return size and modification time of an image when it was listed, or now if it was not."""
        if self._states is None:
            return file_state(located(self.root, self.names[index]))
        return FileState(*self._states[index].tolist())

    def part(self, indices: Sequence[int]) -> RemoteImages:
        """Return some of the images, given ascending indices."""
        chosen = ascending(indices, len(self))
        names = (self.names[index] for index in chosen.tolist())
        states = None if self._states is None else self._states[chosen]
        return RemoteImages(self.root, names, states, reading=self.reading)


def open_remote(url: str, *, reading: Reading = DEFAULT_READING) -> RemoteImages:
    """Open all images below a URL that fsspec understands, such as s3://bucket/prefix.

    Hidden files are skipped, and names are sorted, as `open_images` does.

    Raises:
        DataError: there are no images.
        ShardError: the storage failed repeatedly.
    """
    files, folders = list_folder(url)
    if folders:
        files = list_tree(url)
    images = {name: state for name, state in files.items() if name.lower().endswith(EXTENSIONS)}
    if not images:
        raise DataError(f"no images in {url}: looked for {' '.join(EXTENSIONS)}, found {len(files)} other files")
    images = with_sizes(url, images)
    names = sorted(images, key=lambda name: name.split("/"))
    states = np.array([images[name] for name in names], dtype=np.int64)
    return RemoteImages(url.rstrip("/"), names, states, reading=reading)


def open_mixed_list(
    path: Path, listed: Sequence[tuple[int, str]], *, reading: Reading = DEFAULT_READING, inside: bool = False
) -> RemoteImages:
    """Open the images of a list that contains URLs and may contain paths (see `open_images`).

    URLs are not requested before they are read.

    Args:
        path: path of the list, for messages and for relative paths.
        listed: numbers of its lines, and what they name.
        reading: as for `read_image`.
        inside: as for `open_images`; URLs are outside.

    Raises:
        DataError: an image violates `inside`.
        MissingData: a file does not exist.
    """
    if inside:
        require_inside(path.parent, ((f"line {line} of {path}", name) for line, name in listed))
    require_files(path, [name for _, name in listed if not is_url(name)])
    return RemoteImages(str(path.parent.absolute()), (name for _, name in listed), reading=reading)


def located(root: str, name: str) -> str:
    """Return the path or URL of a file, which may be relative to a folder or URL.

    >>> located("s3://pictures", "street/a.jpg"), located("/lists", "s3://pictures/a.jpg"), located("/lists", "/a.jpg")
    ('s3://pictures/street/a.jpg', 's3://pictures/a.jpg', '/a.jpg')
    """
    if is_url(name) or Path(name).is_absolute():
        return name
    return f"{root.rstrip('/')}/{name}"
