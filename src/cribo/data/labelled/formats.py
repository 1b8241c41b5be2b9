"""Formats of labels on disk: one table, used by examples of segmentation, labelled sets and results."""

import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cribo.base.errors import DataError
from cribo.base.files import require
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.labelled.coco import CocoLabels, DamagedLabels, find_coco_labels, is_coco, write_label_maps_as_coco
from cribo.data.labelled.label_maps import MASK_CLASSES, Labelling
from cribo.data.labelled.map_layouts import find_label_maps
from cribo.data.labelled.segmentation import LabelledExamples, LabelledFolder

CLASSES_FILE = "classes.txt"


@dataclass(frozen=True)
class LabelFormat:
    """A row of the table of label formats.

    Attributes:
        title: for messages.
        accepts: whether a file or folder contains labels of this format, or could contain them.
        open: opens a folder or list of images, and a file or folder of their labels. Arguments: images, labels, list
            of classes or None, and whether maps of 0 and 255 may be masks.
        find: opens the images and labels of one folder in a layout of this format; None if there are none. Arguments:
            folder, list of classes or None, and masks. Raises `DamagedLabels` for a broken file that may have them.
        lists_classes: whether a text file lists the classes; otherwise, the labels name them.
        write: writes the labels of all images to a file; None if they are written image by image.
    """

    title: str
    accepts: Callable[[Path], bool]
    open: Callable[[Path, Path, Path | None, bool], LabelledExamples]
    find: Callable[[Path, Path | None, bool], LabelledExamples | None]
    lists_classes: bool = False
    write: Callable[[Path, Labelling], None] | None = None

    def require_no_list(self, classes: Path | None) -> None:
        """Raise DataError if classes are listed although the labels name them."""
        if classes is not None and not self.lists_classes:
            raise DataError(f"--classes {classes} cannot be used with {self.title}, which define their own classes")


LABEL_FORMATS = {
    "coco": LabelFormat(
        "COCO annotations",
        is_coco,
        lambda images, labels, classes, masks: CocoLabels(labels, images),
        lambda folder, classes, masks: find_coco_labels(folder),
        write=write_label_maps_as_coco,
    ),
    "maps": LabelFormat(
        "label maps",
        lambda labels: not labels.is_file(),
        lambda images, labels, classes, masks: LabelledFolder(images, labels, classes, masks=masks),
        find_label_maps,
        lists_classes=True,
    ),
}
"""All formats of labels. The first that accepts a file or folder reads it; the last one explains what is missing."""


def open_labels_of(
    images: str | os.PathLike[str],
    labels: str | os.PathLike[str],
    classes: str | os.PathLike[str] | None = None,
    *,
    reading: Reading = DEFAULT_READING,
) -> LabelledExamples:
    """Open images with the labels in another folder, or in a file.

    Args:
        images: any source that `open_images` accepts.
        labels: folder, or path of a folder or file without its suffix.
        classes: text file with the names of the classes, for formats that need one.
        reading: how images are read.

    Raises:
        MissingData: a folder or file does not exist.
        DataError: see the readers of the formats.
    """
    place = Path(labels).expanduser()
    if not place.is_dir():
        files = sorted(file for file in place.parent.glob(f"{glob.escape(place.name)}.*") if file.is_file())
        place = next((file for file in files if any(each.accepts(file) for each in LABEL_FORMATS.values())), place)
    chosen = _format_of(place)
    listed = Path(classes) if classes is not None and chosen.lists_classes else None
    found = chosen.open(Path(images).expanduser(), place, listed, True)
    found.reading = reading
    return found


def _format_of(labels: Path) -> LabelFormat:
    found = next((each for each in LABEL_FORMATS.values() if each.accepts(labels)), None)
    if found is None:
        raise DataError(
            f"{labels} has no labels of a known format: {', '.join(each.title for each in LABEL_FORMATS.values())}"
        )
    return found


def find_examples(
    source: str | Path,
    *,
    labels: str | Path | None = None,
    classes: str | Path | None = None,
    known_classes: int | None = None,
) -> LabelledExamples:
    """Find the examples in a folder in a layout of any format, or with labels in another place.

    Args:
        source: the folder; with `labels`, any source that `open_images` accepts.
        labels: folder of label maps, `a/b.png` for the image `a/b.jpg`; or a file in COCO format.
        classes: text file with the names of the classes; by default `classes.txt` in the folder.
        known_classes: number of classes of earlier examples; unless there are two, 255 in masks of 0 and 255 means no
            class.

    Raises:
        DataError: there are no examples, images without labels, labels without images, a damaged file or several files
            of annotations; or `classes` is given for annotations that define their own.
    """
    folder = Path(source).expanduser()
    require(folder)
    masks, listed = known_classes in (None, len(MASK_CLASSES)), None if classes is None else Path(classes)
    if labels is not None:
        place = Path(labels).expanduser()
        require(place)
        chosen = _format_of(place)
        chosen.require_no_list(listed)
        if chosen.lists_classes:
            listed = listed or _class_file(folder) or _class_file(place)
        found = chosen.open(folder, place, listed, masks)
    elif folder.is_dir():
        found = _found(folder, listed, masks)
    elif folder.suffix.lower() == ".json":
        raise DataError(f"{folder} is a file: give the folder of its images, and the file with --labels")
    else:
        raise DataError(f"{folder} is a file: give the folder of its label maps with --labels, or give a folder")
    found.require_images()
    return found


def _found(folder: Path, listed: Path | None, masks: bool) -> LabelledExamples:
    """Return the labelled images of a folder in the first format whose layout it has."""
    damaged: list[DamagedLabels] = []
    for each in LABEL_FORMATS.values():
        try:
            found = each.find(folder, (listed or _class_file(folder)) if each.lists_classes else None, masks)
        except DamagedLabels as error:
            damaged.append(error)
        except DataError as error:
            raise (damaged or [error])[0] from error
        else:
            if found is not None:
                each.require_no_list(listed)
                return found
    raise AssertionError("the last format opens any folder, or raises an error")


def _class_file(folder: Path) -> Path | None:
    path = folder / CLASSES_FILE
    return path if path.is_file() else None
