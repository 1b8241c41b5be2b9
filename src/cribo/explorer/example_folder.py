"""A folder of examples that the page writes, in the layout that `cribo segment --examples` reads."""

import hashlib
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import torch
from jaxtyping import UInt8
from torch import Tensor

from cribo.base.colours import Colour, class_colours
from cribo.base.errors import InputError
from cribo.base.files import write_beside, write_text
from cribo.base.job import require_writable
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.labelled.coco import find_coco
from cribo.data.labelled.crops import resize_labels
from cribo.data.labelled.formats import find_examples
from cribo.data.labelled.inputs import open_labels
from cribo.data.labelled.label_maps import (
    CLASSES_FILE,
    IGNORE_INDEX,
    MASKS,
    LabelMap,
    LabelValues,
    read_classes,
    write_labels,
)
from cribo.data.labelled.segmentation import LabelledExamples, LabelledFiles
from cribo.data.reading import EXTENSIONS
from cribo.data.sources.images import composed, has_images, list_files
from cribo.explorer.images import PageImage
from cribo.explorer.uploads import Refused
from cribo.features.memory.storage import memory_lock


class ExistingLabels(Refused):
    """The folder contains other labels of an image."""


@dataclass
class Written:
    """Files and classes that a session has added to a folder of examples.

    Attributes:
        labels: hash of the label map that the session wrote last, by the name of the image.
        classes: names of the classes that the session added.
    """

    labels: dict[str, str] = field(default_factory=dict)
    classes: set[str] = field(default_factory=set)


class ExampleFolder:
    """A folder of examples: `images/a.jpg`, `labels/a.png` and `classes.txt`.

    Existing files are never replaced, except labels that the same session wrote, or on request. Several sessions, also
    of several servers, may write to one folder: classes are matched by name.

    Args:
        path: the folder, which need not exist.
        reading: how its images are read.

    Raises:
        InputError: the folder has another layout, or is not writable.
    """

    def __init__(self, path: Path, reading: Reading = DEFAULT_READING) -> None:
        self.path, self.reading = path.expanduser(), reading
        self._images, self._labels = self.path / "images", self.path / "labels"
        require_writable(self.path, "--examples")
        if self.path.exists():
            coco, _ = find_coco(self.path)
            if coco or (has_images(self.path) and not (self._images.is_dir() and self._labels.is_dir())):
                raise InputError(
                    f"--examples {path} has a layout that the page cannot extend; it writes images/a.jpg, labels/a.png "
                    f"and {CLASSES_FILE}: give a new folder"
                )
        self._require_indices()
        palettes = [found.palette or () for found in self._label_maps()]
        self._palette = [*max(palettes, key=len, default=())]

    def __str__(self) -> str:
        return f"“{self.path.name}”"

    @property
    def classes(self) -> list[str]:
        """Names of the classes; numbers if there are labels but no `classes.txt`."""
        file = self.path / CLASSES_FILE
        if file.is_file():
            return read_classes(file).names
        labelled = [found.labels[found.labels != IGNORE_INDEX] for found in self._label_maps()]
        highest = max((int(labels.max()) for labels in labelled if labels.numel()), default=-1)
        return [str(number) for number in range(highest + 1)]

    @property
    def palette(self) -> list[Colour]:
        """Colours of the classes: those of existing label maps, continued by `class_colours`."""
        return class_colours(self.classes, self._palette)

    def examples(self) -> LabelledExamples | None:
        """Find the examples; None if there are none.

        Raises:
            DataError: see `find_examples`.
        """
        there = self._images.is_dir() and has_images(self._images)
        return find_examples(self.path, reading=self.reading) if there else None

    def save(
        self,
        image: PageImage,
        labels: UInt8[Tensor, "h w"],
        classes: Sequence[str],
        written: Written,
        *,
        replace: bool = False,
    ) -> None:
        """Save an example; the image file is copied unchanged.

        An image of the same name but with other content gets a number: `a-2.jpg`.

        Args:
            image: the image.
            labels: the class of each pixel, at the size of the image or reduced.
            classes: names of the classes.
            written: what the session has written before; updated.
            replace: replace labels of this image that were not written by the session.

        Raises:
            ExistingLabels: there are other labels of this image, and `replace` is not set; nothing is written.
            Refused: the folder would have more than 255 classes.
            OSError: a file cannot be written; existing files are unchanged.
        """
        content = image.content
        for folder in (self._images, self._labels):
            folder.mkdir(parents=True, exist_ok=True)
        with memory_lock(self.path):
            name = self._name(image.name, content)
            image_file, label_file = self._files(name)
            if label_file.is_file() and not replace and not self._is_own(name, written):
                raise ExistingLabels(f"{self} already contains labels of {name}.")
            # Only classes up to the last one in the labels: see `_require_second_class`.
            present = [label for label in labels.unique().tolist() if label != IGNORE_INDEX]
            table = self._add_classes(classes[: 1 + max(present)], written)
            existing = open_labels(label_file).labels if label_file.is_file() else None
            encoded = io.BytesIO()
            write_labels(_enlarged(table[labels.long()], image.size, existing), self.palette, encoded)
            _write_pair(image_file, content, label_file, encoded.getvalue())
            written.labels[name] = _hash(encoded.getvalue())
            self._require_second_class()

    def remove(self, image: PageImage, written: Written) -> bool:
        """Remove an example that the session has saved; return False if it has not, or others have changed it."""
        with memory_lock(self.path):
            name = self._name(image.name, image.content)
            if not self._is_own(name, written):
                return False
            del written.labels[name]
            for file in self._files(name):
                file.unlink(missing_ok=True)
            self._require_second_class()
            return True

    def rename_class(self, old: str, new: str, written: Written) -> None:
        """Rename a class that the session has added; no-op if it is not saved yet.

        Raises:
            Refused: the class was there before, or there is another one with the new name.
        """
        with memory_lock(self.path):
            classes = self.classes
            if new in classes:
                raise Refused(f"There is a class “{new}” in {self}: choose another name.")
            if old not in classes:
                return
            if old not in written.classes:
                raise Refused(f"“{old}” is a class of {self}, and may be used by others: rename it in {CLASSES_FILE}.")
            self._write_classes([new if name == old else name for name in classes])
            written.classes.remove(old)
            written.classes.add(new)

    def _add_classes(self, classes: Sequence[str], written: Written) -> UInt8[Tensor, "256"]:
        """Add missing classes to the list of the folder; return the index in the folder of each label."""
        present = self.classes
        fresh = [name for name in classes if name not in present]
        if len(present) + len(fresh) > IGNORE_INDEX:
            raise Refused(f"{self} would have more than {IGNORE_INDEX} classes.")
        colours = self.palette  # of the present classes, which must not change
        self._palette = [*colours, *self._palette[len(colours) :]]
        if fresh or not (self.path / CLASSES_FILE).is_file():
            present = [*present, *fresh]
            self._write_classes(present)
            written.classes.update(fresh)
        table = torch.full((256,), IGNORE_INDEX, dtype=torch.uint8)
        table[: len(classes)] = torch.tensor([present.index(name) for name in classes], dtype=torch.uint8)
        return table

    def _require_indices(self) -> None:
        """Raise InputError if existing label maps are masks of 0 and 255, or colours, instead of class indices."""
        found = self.examples()
        if found is not None and isinstance(found, LabelledFiles):
            coding = found.coding
            if coding == MASKS or not isinstance(coding, LabelValues):
                kind = "masks of 0 and 255" if coding == MASKS else "colours"
                raise InputError(
                    f"the label maps in {self._labels} are {kind}, but the page writes class indices: give a new folder"
                )

    def _require_second_class(self) -> None:
        """Remove a second class without pixels from the list.

        With two classes, label maps of only 0 and 255 would be read as masks (see `LabelledFiles`).
        """
        classes = self.classes
        if len(classes) == len(MASKS.classes) and not any((found.labels == 1).any() for found in self._label_maps()):
            self._write_classes(classes[:1])

    def _write_classes(self, classes: Sequence[str]) -> None:
        write_text(self.path / CLASSES_FILE, "".join(f"{name}\n" for name in classes))

    def _label_maps(self) -> Iterator[LabelMap]:
        names = list_files(self._labels, [".png"]) if self._labels.is_dir() else ()
        return (open_labels(self._labels / name) for name in names)

    def _name(self, name: str, content: bytes) -> str:
        """Return the name of an image in the folder: its own, or a numbered one if that belongs to another image."""
        path = PurePosixPath(name)
        for number in itertools.count(1):
            stem = path.stem if number == 1 else f"{path.stem}-{number}"
            folder = self._images / path.parent
            there = [file for file in _named(folder, stem) if file.suffix.lower() in EXTENSIONS]
            same = [file for file in there if file.stat().st_size == len(content) and file.read_bytes() == content]
            if same:
                return str(path.with_name(same[0].name))
            if not there and not self._files(own := str(path.with_name(f"{stem}{path.suffix}")))[1].exists():
                return own
        raise AssertionError("unreachable")

    def _files(self, name: str) -> tuple[Path, Path]:
        """Return the files of the image and the labels of an example."""
        label_file = (self._labels / name).with_suffix(".png")
        there = (file for file in _named(label_file.parent, label_file.stem) if file.suffix.lower() == ".png")
        return self._images / name, next(there, label_file)

    def _is_own(self, name: str, written: Written) -> bool:
        """Whether the session wrote the labels of an image last."""
        file = self._files(name)[1]
        return file.is_file() and written.labels.get(name) == _hash(file.read_bytes())


def _named(folder: Path, stem: str) -> list[Path]:
    """Return the files in a folder with a stem, in any Unicode form."""
    return [file for file in folder.glob("*") if composed(file.stem) == composed(stem)]


def _enlarged(
    labels: UInt8[Tensor, "h w"], size: tuple[int, int], existing: UInt8[Tensor, "full_h full_w"] | None
) -> UInt8[Tensor, "full_h full_w"]:
    """Enlarge labels to the size of their image; pixels that have not changed keep the detail of existing labels."""
    full = resize_labels(labels, size)
    if existing is None or existing.shape != size:
        return full
    before = resize_labels(existing, (labels.shape[0], labels.shape[1]))
    changed = resize_labels((before != labels).byte(), size)
    return torch.where(changed.bool(), full, existing)


def _write_pair(image_file: Path, image: bytes, label_file: Path, labels: bytes) -> None:
    """Write an image that does not exist yet, and its labels; both are complete before either gets its name."""
    for file in (image_file, label_file):
        file.parent.mkdir(parents=True, exist_ok=True)
    part = write_beside(label_file, lambda path: path.write_bytes(labels))
    copy = None
    try:
        if not image_file.exists():
            write_beside(image_file, lambda path: path.write_bytes(image)).rename(image_file)
            copy = image_file
        part.replace(label_file)
    except BaseException:
        part.unlink(missing_ok=True)
        if copy is not None:
            copy.unlink(missing_ok=True)
        raise


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
