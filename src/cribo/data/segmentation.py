"""Images with a class for each pixel: what dense evaluation and segmentation read."""

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from cribo.data.images import (
    DataError,
    ImageSource,
    MissingData,
    PackedNames,
    list_files,
    open_images,
    require,
)
from cribo.data.reading import MAX_PIXELS, image_size, open_header

IGNORE_INDEX = 255
"""Label of pixels that count neither as memory nor in a score."""


class LabelledImages(ImageSource, Protocol):
    """An ImageSource in which every image has a class for each pixel."""

    @property
    def classes(self) -> Sequence[str]:
        """The names of the classes; label c is `classes[c]`."""
        ...

    @property
    def ignore_index(self) -> int:
        """The label of pixels without class."""
        ...

    def labels(self, index: int) -> UInt8[Tensor, "h w"]:
        """The class of each pixel of image `index`, or `ignore_index`; of the same size as the image."""
        ...


class LabelledFolder:
    """Images in one folder, label maps in another, paired by their path without extension.

    `images_dir` is any folder for `open_images`; `labels_dir` holds, for `a/b.jpg`, the file `a/b.png`: a
    grey or palette PNG whose values are class indices, 255 for pixels without class. (Of a palette PNG the
    indices are read; its colours do not matter.) Label maps without an image are left alone. `classes` are
    the names of the classes or a text file with one name per line; when None they are numbered, up to the
    highest label, for which all label maps are read once, when `classes` is first used.

    Raises MissingData if a folder or a label map is not there, DataError if there is no image, if two images
    share a label map, or if the classes are not 1 to 255 different names.

    >>> val = LabelledFolder("camvid/images/val", "camvid/labels/val", "camvid/classes.txt")  # doctest: +SKIP
    >>> val.load(0).shape, val.labels(0).shape, val.classes[8]  # doctest: +SKIP
    (torch.Size([3, 360, 480]), torch.Size([360, 480]), 'car')
    """

    ignore_index: int = IGNORE_INDEX

    def __init__(
        self,
        images_dir: str | os.PathLike[str],
        labels_dir: str | os.PathLike[str],
        classes: Sequence[str] | str | os.PathLike[str] | None = None,
        *,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.images = open_images(images_dir, max_pixels=max_pixels)
        labels_folder = Path(labels_dir).expanduser()
        require(labels_folder)
        self.labels_dir = os.fspath(labels_folder)
        self._labels = PackedNames(self._pair())
        self._classes = None if classes is None else _class_names(classes)

    def _pair(self) -> list[str]:
        maps = {_stem(name): name for name in list_files(self.labels_dir, [".png"])}
        owner: dict[str, str] = {}
        paired = []
        for image in map(self.images.name, range(len(self.images))):
            stem = _stem(image)
            if stem not in maps:
                raise MissingData(f"the image {image} has no labels: there is no {stem}.png in {self.labels_dir}")
            if stem in owner:
                raise DataError(f"the images {owner[stem]} and {image} share the labels {maps[stem]}: rename one")
            owner[stem] = image
            paired.append(maps[stem])
        return paired

    @property
    def classes(self) -> list[str]:
        """The names of the classes; label c is `classes[c]`."""
        if self._classes is None:
            self._classes = self._numbered_classes()
        return self._classes

    def _numbered_classes(self) -> list[str]:
        highest = -1
        for index in range(len(self)):
            values = self.labels(index)
            values = values[values != self.ignore_index]
            if values.numel():
                highest = max(highest, int(values.max()))
        if highest < 0:
            raise DataError(f"every pixel of every label map in {self.labels_dir} is {self.ignore_index} (ignored)")
        return [str(c) for c in range(highest + 1)]

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        """The image's path below `images_dir`."""
        return self.images.name(index)

    def load(self, index: int) -> UInt8[Tensor, "3 h w"]:
        """One image, RGB, upright. Raises UnreadableImage (see `read_image`)."""
        return self.images.load(index)

    def labels(self, index: int) -> UInt8[Tensor, "h w"]:
        """The class of each pixel, 255 for none.

        Raises UnreadableImage for a broken file, DataError if the map is not of the image's size, is in
        colours instead of indices, or holds a value that is no class.
        """
        path = os.path.join(self.labels_dir, self._labels[index])
        with open_header(path, max_pixels=self.images.max_pixels) as image:
            mode, values = image.mode, np.array(image)
        if values.ndim != 2 or mode == "F":
            raise DataError(f"{path}: labels must be class indices in a grey or palette PNG, got colours (mode {mode})")
        size = image_size(self.images.path(index))
        if values.shape != size:
            raise DataError(
                f"{path}: labels must have the size of their image {self.name(index)}, "
                f"{size[1]} x {size[0]}, got {values.shape[1]} x {values.shape[0]}"
            )
        self._check_values(values, path)
        return torch.from_numpy(values.astype(np.uint8))

    def _check_values(self, values: np.ndarray, path: str) -> None:
        limit = self.ignore_index if self._classes is None else len(self._classes)
        wrong = values[(values < 0) | ((values >= limit) & (values != self.ignore_index))]
        if wrong.size:
            raise DataError(
                f"{path}: labels must be in 0..{limit - 1} ({limit} classes) or {self.ignore_index} "
                f"(ignored), got {int(wrong[0])} at {wrong.size} of {values.size} pixels"
            )


def open_labelled(root: str | os.PathLike[str], split: str, *, max_pixels: int = MAX_PIXELS) -> LabelledFolder:
    """The layout `root/images/<split>`, `root/labels/<split>` and, if there is one, `root/classes.txt`.

    Raises what LabelledFolder raises.

    >>> train, val = open_labelled("camvid", "train"), open_labelled("camvid", "val")  # doctest: +SKIP
    """
    root = Path(root).expanduser()
    classes = root / "classes.txt"
    return LabelledFolder(
        root / "images" / split,
        root / "labels" / split,
        classes if classes.exists() else None,
        max_pixels=max_pixels,
    )


def _class_names(classes: Sequence[str] | str | os.PathLike[str]) -> list[str]:
    if isinstance(classes, str | os.PathLike):
        path = Path(classes).expanduser()
        require(path)
        names = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        origin = str(path)
    else:
        names, origin = list(classes), "classes"
    if not 1 <= len(names) <= IGNORE_INDEX:
        raise DataError(f"{origin} must name 1 to {IGNORE_INDEX} classes, got {len(names)}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{origin} must name each class once, got {twice!r} {names.count(twice)} times")
    return names


def _stem(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))
