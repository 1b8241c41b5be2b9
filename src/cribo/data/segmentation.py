"""Images with a class for each pixel, for dense evaluation and segmentation."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Int16, UInt8
from torch import Tensor

from cribo.data.images import (
    EXTENSIONS,
    DataError,
    ImageFiles,
    ImageSource,
    MissingData,
    list_files,
    open_images,
    require,
)
from cribo.data.limits import MAX_PIXELS
from cribo.data.reading import image_size, open_header
from cribo.errors import InputError

IGNORE_INDEX = 255
"""Label of pixels that memories and scores ignore."""

Colour = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""


class LabelledImages(ImageSource, Protocol):
    """An ImageSource in which every image has a class for each pixel."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes; label c is `classes[c]`."""
        ...

    @property
    def ignore_index(self) -> int:
        """The label of ignored pixels."""
        ...

    @property
    def palette(self) -> Sequence[Colour]:
        """The colour of each class in pictures."""
        ...

    def labels(self, index: int) -> UInt8[Tensor, "h w"]:
        """Return the class of each pixel of an image, or `ignore_index`, at the size of the image."""
        ...


def colour_map(count: int) -> list[Colour]:
    """Return the first `count` colours of Pascal VOC's colour map, which starts with black.

    The bits of a class index are assigned to red, green and blue in turn, from the highest bit of each down, so that
    similar indices get different colours.

    Raises ValueError if `count` is not in 0..256.

    >>> colour_map(3)
    [(0, 0, 0), (128, 0, 0), (0, 128, 0)]
    """
    if not 0 <= count <= 256:
        raise InputError(f"count must be in 0..256 (there are 256 colours), got {count}")

    def channel(number: int, first_bit: int) -> int:
        return sum((number >> (3 * step + first_bit) & 1) << (7 - step) for step in range(3))

    return [(channel(c, 0), channel(c, 1), channel(c, 2)) for c in range(count)]


@dataclass(frozen=True)
class LabelValues:
    """Meaning of the values in the label maps of a set.

    Attributes:
        classes: the value of each class, in the order of the classes; all different, 0 to 255.
        ignored: the values of ignored pixels.
    """

    classes: tuple[int, ...]
    ignored: tuple[int, ...] = (IGNORE_INDEX,)

    @cached_property
    def table(self) -> Int16[np.ndarray, "256"]:
        """The class of each value, `IGNORE_INDEX` for ignored values, -1 for all others."""
        table = np.full(256, -1, dtype=np.int16)
        table[list(self.ignored)] = IGNORE_INDEX
        table[list(self.classes)] = np.arange(len(self.classes))
        return table

    def __str__(self) -> str:
        return f"in {_ranges(self.classes)} ({len(self.classes)} classes) or {_ranges(self.ignored)} (ignored)"


def class_indices(count: int) -> LabelValues:
    """Return values that are class indices, with 255 for ignored pixels."""
    return LabelValues(tuple(range(count)))


class LabelledFiles(ImageFiles):
    """Image files, each with a label map in a file.

    A label map is a grey or palette PNG. (The indices of a palette PNG are read; its colours are ignored.)

    Args:
        images: the images.
        label_folder: base of the paths of the label maps.
        label_names: path of the label map of each image.
        classes: names of the classes; if empty, they are numbered up to the highest label, which requires reading all
            label maps once.
        palette: a colour for each class; those of `colour_map` by default.
        values: meaning of the values in the label maps; class indices by default.
    """

    ignore_index: int = IGNORE_INDEX

    def __init__(
        self,
        images: ImageFiles,
        label_folder: str | os.PathLike[str],
        label_names: Iterable[str],
        *,
        classes: Sequence[str] = (),
        palette: Sequence[Colour] | None = None,
        values: LabelValues | None = None,
    ) -> None:
        super().__init__(images.folder, images.names, max_pixels=images.max_pixels)
        self._label_files = ImageFiles(label_folder, label_names)
        self._classes = list(classes)
        self._palette = palette
        self._values = values or class_indices(len(classes) or IGNORE_INDEX)

    @property
    def classes(self) -> list[str]:
        """The names of the classes; label c is `classes[c]`."""
        if not self._classes:
            known = (labels[labels != IGNORE_INDEX] for labels in map(self.labels, range(len(self))))
            highest = max((int(labels.max()) for labels in known if labels.numel()), default=-1)
            if highest < 0:
                folder = self._label_files.folder
                raise DataError(f"every pixel of every label map in {folder} is {IGNORE_INDEX} (ignored)")
            self._classes = [str(number) for number in range(highest + 1)]
        return self._classes

    @property
    def palette(self) -> Sequence[Colour]:
        """The colour of each class in pictures."""
        return colour_map(len(self.classes)) if self._palette is None else self._palette

    def label_path(self, index: int) -> str:
        """Return the path of an image's label map."""
        return self._label_files.path(index)

    def labels(self, index: int) -> UInt8[Tensor, "h w"]:
        """Return the class of each pixel, 255 for ignored pixels.

        Raises UnreadableImage for a broken file; DataError if the map does not have the size of the image, contains
        colours instead of indices, or a value that is neither a class nor ignored.
        """
        path = self.label_path(index)
        with open_header(path, max_pixels=self.max_pixels) as image:
            mode, values = image.mode, np.array(image)
        if values.ndim != 2 or mode == "F":
            raise DataError(
                f"{path}: labels must be class indices in a grey or palette PNG, got colours (mode {mode}): "
                "replace colours by class indices"
            )
        self.require_size(index, values.shape, f"{path}: labels")
        narrow = values.astype(np.uint8)  # maps may also have 1 or 16 bits per pixel
        labels = self._values.table.take(narrow)
        wrong = (labels < 0) | (narrow != values)
        if wrong.any():
            raise DataError(
                f"{path}: labels must be {self._values}, "
                f"got {int(values[wrong][0])} at {int(wrong.sum())} of {values.size} pixels"
            )
        return torch.from_numpy(labels.astype(np.uint8))


class LabelledFolder(LabelledFiles):
    """Images in one folder, label maps in another, paired by their path without extension.

    `images_dir` is any folder for `open_images`; for `a/b.jpg`, `labels_dir` must contain `a/b.png`, a grey or
    palette PNG whose values are class indices, 255 for ignored pixels. Label maps without an image are
    skipped. `classes` are the names of the classes or a text file with one name per line; if None, classes are
    numbered up to the highest label, which requires reading all label maps when `classes` is first used. Their
    colours are those of `colour_map`.

    Raises MissingData if a folder or a label map does not exist; DataError if there are no images, if two images
    share a label map, or if the classes are not 1 to 255 different names.

    >>> val = LabelledFolder("camvid/images/val", "camvid/labels/val", "camvid/classes.txt")  # doctest: +SKIP
    >>> val.load(0).shape, val.labels(0).shape, val.classes[8]  # doctest: +SKIP
    (torch.Size([3, 360, 480]), torch.Size([360, 480]), 'car')
    """

    def __init__(
        self,
        images_dir: str | os.PathLike[str],
        labels_dir: str | os.PathLike[str],
        classes: Sequence[str] | str | os.PathLike[str] | None = None,
        *,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        images = open_images(images_dir, max_pixels=max_pixels)
        folder = Path(labels_dir).expanduser()
        require(folder)
        stems = by_stem(images.names, EXTENSIONS)
        maps = by_stem(list_files(folder, [".png"]), [".png"])
        for stem, name in stems.items():
            if stem not in maps:
                raise missing_labels(name, folder / f"{stem}.png")
        names = [] if classes is None else class_names(classes)
        super().__init__(images, folder, (maps[stem] for stem in stems), classes=names)


class UnlabelledFiles(ImageFiles):
    """Image files as `LabelledImages` of which no pixel has a class, for protocols with other ground truth."""

    classes: Sequence[str] = ("unlabelled",)
    palette: Sequence[Colour] = ((0, 0, 0),)
    ignore_index: int = IGNORE_INDEX

    def labels(self, index: int) -> UInt8[Tensor, "h w"]:
        """No class for any pixel."""
        return torch.full(image_size(self.path(index)), IGNORE_INDEX, dtype=torch.uint8)


class LabelledSubset:
    """A subset of labelled images, in the given order.

    Args:
        images: the labelled images; `ignore_index` defaults to 255 and `palette` to `colour_map`.
        indices: indices of the images to use.

    Raises:
        IndexError: an index does not exist.
    """

    def __init__(self, images: LabelledImages, indices: Iterable[int]) -> None:
        self.images = images
        self.indices = tuple(indices)
        wrong = next((index for index in self.indices if not 0 <= index < len(images)), None)
        if wrong is not None:
            raise IndexError(f"indices must be in 0..{len(images) - 1}, got {wrong}")
        self.classes = images.classes
        self.ignore_index: int = getattr(images, "ignore_index", IGNORE_INDEX)
        self.palette: Sequence[Colour] = getattr(images, "palette", None) or colour_map(len(self.classes))

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, index: int) -> str:
        """Return the name of an image."""
        return self.images.name(self.indices[index])

    def load(self, index: int) -> UInt8[Tensor, "3 h w"]:
        """Load an image as RGB."""
        return self.images.load(self.indices[index])

    def labels(self, index: int) -> UInt8[Tensor, "h w"]:
        """Return the class of each pixel."""
        return self.images.labels(self.indices[index])


def by_stem(names: Iterable[str], endings: Sequence[str]) -> dict[str, str]:
    """Map the part of each name before its ending to the name; names with other endings are skipped.

    The order is kept, and endings are case-insensitive. Raises DataError if two names share a stem.

    >>> by_stem(["b/1.jpg", "b/2.JPG", "b/3.txt"], [".jpg", ".png"])
    {'b/1': 'b/1.jpg', 'b/2': 'b/2.JPG'}
    """
    endings = tuple(ending.lower() for ending in endings)
    stems: dict[str, str] = {}
    for name in names:
        lower = name.lower()
        if not lower.endswith(endings):
            continue
        stem = name[: -max(len(ending) for ending in endings if lower.endswith(ending))]
        if stem in stems:
            raise DataError(f"the images {stems[stem]} and {name} share the labels {stem}.png: rename one")
        stems[stem] = name
    return stems


def missing_labels(image: str, labels: Path) -> MissingData:
    """Return the error for an image without a label map."""
    return MissingData(f"the image {image} has no labels: there is no {labels.name} in {labels.parent}")


def class_names(classes: Sequence[str] | str | os.PathLike[str]) -> list[str]:
    """Return class names, given directly or in a text file with one name per line.

    Raises MissingData if the file does not exist, DataError if there are not 1 to 255 different names.
    """
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


def _ranges(values: Iterable[int]) -> str:
    """Format numbers as ranges: `0..3, 7, 255`."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
