"""Images with one class each: folders of classes, and ImageNet in its usual layouts."""

import csv
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from cribo.base.bounds import at_least
from cribo.base.errors import DataError, InputError, MissingData
from cribo.base.files import read_lines, require
from cribo.base.wording import enumerated
from cribo.data.reading import EXTENSIONS
from cribo.data.sources.images import ImageFiles, composed, list_files

IMAGENET_SIZES = {"train": 1_281_167, "val": 50_000}
"""Images of each split of ImageNet-1k (ILSVRC 2012)."""

IMAGENET_CLASSES = 1000

_IMAGENET_FOLDERS = ("", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "CLS-LOC", "ILSVRC2012", "imagenet")
_IMAGENET_SOLUTION = "LOC_val_solution.csv"  # Kaggle's: ImageId, then the class and box of each object
_IMAGENET_LISTS = ("val.txt", "meta/val.txt")  # Caffe's and MMPretrain's: file and class index on each line
_VALIDATION = ("val", "validation", "valid", "test")
# Folders of other layouts that hold images and are no classes.
_PARTS = "images|jpegimages|labels|annotations|masks|depth|frames|videos|pairs"
_PARTS_OF_SETS = re.compile(rf"(?:train|{'|'.join(_VALIDATION)})(?:annot|\d+)?|{_PARTS}", re.IGNORECASE)


class ClassifiedFiles(ImageFiles):
    """Image files, each of one class, as an ImageSource.

    Raises:
        ValueError: the number of labels differs from the number of images.
    """

    def __init__(self, images: ImageFiles, classes: Sequence[str], labels: Int[np.ndarray, " n"]) -> None:
        if len(labels) != len(images):
            raise InputError(f"labels must have one entry for each of the {len(images)} images, got {len(labels)}")
        super().__init__(images.folder, images.names, reading=images.reading)
        self.classes = list(classes)
        self.labels: Int64[np.ndarray, " n"] = labels.astype(np.int64)

    def limited(self, number: int) -> "ClassifiedFiles":
        """Return a subset of at most `number` images, chosen from each class in turn, in the original order.

        Two splits with images of the same classes keep the same classes.

        Raises:
            ValueError: `number` is below 1.
        """
        at_least(1).check(number=number)
        order = np.argsort(self.labels, kind="stable")
        counts = np.bincount(self.labels)
        earlier = np.empty_like(order)  # images of the same class before each
        earlier[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        chosen = np.sort(np.lexsort((self.labels, earlier))[:number])
        files = ImageFiles(self.folder, map(self.name, chosen.tolist()), reading=self.reading)
        return ClassifiedFiles(files, self.classes, self.labels[chosen])


class ClassificationSplits(NamedTuple):
    """Training images, and images to classify.

    Attributes:
        train: training images.
        val: images to classify, with the same classes; None if the set has no splits.
        train_name, val_name: names of the splits.
    """

    train: ClassifiedFiles
    val: ClassifiedFiles | None
    train_name: str
    val_name: str | None


def has_class_folders(folder: Path) -> bool:
    """Whether images are in folders of classes: `<class>/*`, or `train/<class>/*`.

    There must be at least two folders, all with images, and none named like a part of a set in other layouts.
    """
    if (folder / "train").is_dir():
        folder = folder / "train"
    classes = _class_folders(folder) if folder.is_dir() else []
    return (
        len(classes) > 1
        and not any(map(_PARTS_OF_SETS.fullmatch, classes))
        and all(_has_image(folder / name) for name in classes)
    )


def _has_image(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(entry.name.lower().endswith(EXTENSIONS) for entry in entries)


def is_imagenet(folder: Path) -> bool:
    """Whether a folder has a name and the layout of ImageNet-1k."""
    named = any(part.lower() == folder.resolve().name.lower() for part in (*_IMAGENET_FOLDERS, "ILSVRC"))
    return named and any((folder / place / "train").is_dir() for place in _IMAGENET_FOLDERS)


def open_class_folders(root: str | os.PathLike[str], *, classes: Sequence[str] | None = None) -> ClassifiedFiles:
    """Open a folder with one sub-folder of images per class.

    Images are searched recursively in `root/<class>`. Classes and images are sorted by name. Hidden files and folders
    are skipped.

    Args:
        root: the folder that contains the class folders.
        classes: the classes, in order; the names of the folders by default.

    Raises:
        MissingData: `root` does not exist.
        DataError: `root` has no folders, fewer than two classes, a folder without images or not in `classes`, or
            images outside the class folders.
    """
    root = Path(root).expanduser()
    require(root)
    there = _class_folders(root)
    if not there:
        images = sum(1 for _ in list_files(root, EXTENSIONS))
        found = f"{images} images outside class folders" if images else "no images"
        raise DataError(
            f"{root} must contain a folder of images for each class ({root}/<class>/*.jpg), got {found}: put the "
            "images of each class into a folder with its name"
        )
    if classes is None:
        classes = there
    elif unknown := [name for name in there if composed(name) not in set(map(composed, classes))]:
        raise DataError(
            f"{root} has classes without training images, {enumerated(unknown)}: their images cannot be classified "
            "correctly; add training images of these classes, or remove them"
        )
    if len(classes) < 2:
        raise DataError(f"{root} has only one class, {classes[0]!r}: give a folder with at least two class folders")
    number = {composed(name): place for place, name in enumerate(classes)}
    names, labels, loose = [], array("q"), []
    for name in list_files(root, EXTENSIONS):
        if "/" in name:
            names.append(name)
            labels.append(number[composed(name.partition("/")[0])])
        else:
            loose.append(name)
    if loose:
        raise DataError(
            f"{root} has {len(loose)} images outside its class folders, the first is {loose[0]!r}: move each "
            "into the folder of its class, or elsewhere"
        )
    found = np.frombuffer(labels, dtype=np.int64)
    counts = np.bincount(found, minlength=len(classes))
    if empty := [name for name in there if not counts[number[composed(name)]]]:
        raise DataError(
            f"{root} has folders without images, {enumerated(empty)}: put images there, or remove the folders"
        )
    return ClassifiedFiles(ImageFiles(root, names), classes, found)


def open_classification(
    name: str,
    root: str | os.PathLike[str],
    *,
    train: str | None = None,
    val: str | None = None,
    partial: bool = False,
) -> ClassificationSplits:
    """Open the images of a classification set.

    `imagenet` is ImageNet-1k: `train/<class>/*` and `val/<class>/*`, or the images of `val` in one folder with
    Kaggle's `LOC_val_solution.csv` or a `val.txt` of their classes; also below Kaggle's `ILSVRC/Data/CLS-LOC`.

    `folder` is any other set: `train/<class>/*` and `val/<class>/*` (or `validation`, `valid`, `test`), or, without
    a split, `<class>/*`.

    Args:
        name: `imagenet` or `folder`.
        root: the set's folder.
        train: name of the folder of training images; `train` by default.
        val: name of the folder of images to classify.
        partial: accept an incomplete ImageNet.

    Raises:
        MissingData: a folder does not exist.
        DataError: unknown set, incomplete ImageNet, or errors of `open_class_folders`.
    """
    root = Path(root).expanduser()
    if name == "imagenet":
        return _open_imagenet(root, train or "train", val or "val", partial=partial)
    if name != "folder":
        raise DataError(f"the classification set must be imagenet or folder, got {name!r}")
    require(root)
    if train is None and val is None and not (root / "train").is_dir():
        return ClassificationSplits(open_class_folders(root), None, "all", None)
    train = train or "train"
    val = val or next((other for other in _VALIDATION if (root / other).is_dir()), None)
    if val is None:
        raise DataError(
            f"{root} has a folder {train!r} but no images to classify: looked for {', '.join(_VALIDATION)}; name the "
            f"folder with data.val, or set data.root to {root / train} to classify each image by all others"
        )
    train_images = open_class_folders(root / train)
    val_images = open_class_folders(root / val, classes=train_images.classes)
    return ClassificationSplits(train_images, val_images, train, val)


# --------------------------------------------------------------------- ImageNet


def _open_imagenet(root: Path, train: str, val: str, *, partial: bool) -> ClassificationSplits:
    require(root)
    bases = [root / folder for folder in _IMAGENET_FOLDERS]
    base = next((base for base in bases if (base / train).is_dir()), root)
    for split in (train, val):
        require(base / split)
    train_images = open_class_folders(base / train)
    if not partial:
        _require_complete(train_images, "train", train)
    if _class_folders(base / val):
        val_images = open_class_folders(base / val, classes=train_images.classes)
    else:
        val_images = _flat_validation(base, val, train_images.classes)
    if not partial:
        _require_complete(val_images, "val", val)
    titles = _imagenet_titles(train_images.classes)
    train_images.classes, val_images.classes = list(titles), list(titles)
    return ClassificationSplits(train_images, val_images, train, val)


def _require_complete(images: ClassifiedFiles, split: str, folder: str) -> None:
    classes = len(np.unique(images.labels))
    if folder == split and (len(images), classes) != (IMAGENET_SIZES[split], IMAGENET_CLASSES):
        raise DataError(
            f"ImageNet-1k {split} in {images.folder} must have {IMAGENET_SIZES[split]:,} images of {IMAGENET_CLASSES} "
            f"classes, got {len(images):,} of {classes}; to use only part of the set, open it as partial"
        )


def _flat_validation(base: Path, val: str, classes: Sequence[str]) -> ClassifiedFiles:
    """Open validation images in one folder, with a file that lists the class (WordNet id) of each."""
    names = list(list_files(base / val, EXTENSIONS))
    if not names:
        raise DataError(f"{base / val} contains neither images nor class folders")
    # Kaggle's list is stored above ILSVRC/Data/CLS-LOC.
    readers = {folder / _IMAGENET_SOLUTION: _solution_lines for folder in (base, *base.absolute().parents[:3])}
    readers |= {base / name: _list_lines for name in _IMAGENET_LISTS}
    source = next((path for path in readers if path.is_file()), None)
    if source is None:
        raise MissingData(
            f"the validation images in {base} are not in class folders, and no file lists their classes: put "
            f"Kaggle's {_IMAGENET_SOLUTION}, or a val.txt with a file and its class index on each line, into {base}, "
            "or sort the images into class folders"
        )
    listed = dict(readers[source](source))
    number = {name: place for place, name in enumerate(classes)}
    labels = []
    for name in names:
        wnid = listed.get(Path(name).stem)
        if wnid is None:
            raise DataError(f"{source} does not list the class of {name}: use the list that belongs to these images")
        if wnid not in number:
            raise DataError(f"{name} has the class {wnid}, which has no training images in {base}")
        labels.append(number[wnid])
    return ClassifiedFiles(ImageFiles(base / val, names), classes, np.array(labels))


def _solution_lines(path: Path) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            objects = (row.get("PredictionString") or "").split()
            if not row.get("ImageId") or not objects:
                raise DataError(f"{path} must have the columns ImageId and PredictionString, got {dict(row)}")
            yield row["ImageId"], objects[0]


def _list_lines(path: Path) -> Iterator[tuple[str, str]]:
    from timm.data.imagenet_info import ImageNetInfo

    wnids = ImageNetInfo("imagenet-1k").label_names()
    for line, text in read_lines(path, "a list of images"):
        name, _, number = text.rpartition(" ")
        if not name:
            continue
        if not number.isdecimal() or int(number) >= len(wnids):
            raise DataError(
                f"{path}, line {line}: expected a file and the index of its class, 0..{len(wnids) - 1}, got {text!r}"
            )
        yield Path(name).stem, wnids[int(number)]


def _imagenet_titles(classes: Iterable[str]) -> list[str]:
    """Format each class as its common name and WordNet id; the names alone are not unique."""
    from timm.data.imagenet_info import ImageNetInfo

    info = ImageNetInfo("imagenet-1k")
    words = {wnid: info.label_name_to_description(wnid).partition(",")[0] for wnid in info.label_names()}
    return [f"{words[wnid]} ({wnid})" if wnid in words else wnid for wnid in classes]


# ---------------------------------------------------------------------- folders


def _class_folders(root: Path) -> list[str]:
    if not root.is_dir():
        raise DataError(f"{root} is a file: give the folder that contains the class folders")
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"cannot list the folder {root}: {error.strerror}") from error
