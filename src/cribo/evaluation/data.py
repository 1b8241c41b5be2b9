"""Labelled images for evaluation. Torch is imported only when a data set is opened."""

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from cribo.base.bounds import at_least, check_bounds
from cribo.base.errors import ConfigError, DataError
from cribo.base.trust import import_by_path
from cribo.data.config import DEFAULT_READING, Reading, spread
from cribo.data.labelled.sets import HELD_OUT_SCENES, SEGMENTATION_SETS, SegmentationSet, segmentation_set

SCENES = "scenes"
PLACES = ("root", "train_annotations", "val_annotations")
"""Fields of data configurations that locate the data without identifying it."""

_IMAGE_LAYOUTS = "imagenet", "folder"
_LABELLED_IMAGES = ("__len__", "load", "labels", "name", "classes")


@dataclass(frozen=True)
class Splits:
    """Opened splits of a data set.

    Attributes:
        train: images to train on or to search.
        val: images to score; None to score each training image against all others.
        title: short name, for folder names.
        about: description of the data in `results.json`.
    """

    train: Any
    val: Any
    title: str
    about: dict[str, Any] = field(default_factory=dict)

    def read_by(self, reading: Reading) -> Self:
        """Return the splits with these reading options, of which those that are given join the description.

        If nothing states the range of the values, it is that of the training images (`surveyed`).
        """
        from cribo.data.sources.images import EncodedImages
        from cribo.data.survey import surveyed

        for images in self._files():
            images.reading = reading
        if isinstance(first := next(self._files(), None), EncodedImages):
            reading = surveyed(first)
            for images in self._files():
                images.reading = reading
        return replace(self, about={**self.about, **reading.given})

    @property
    def reading(self) -> Reading | None:
        """How the images are read; None if they are not files."""
        return next((images.reading for images in self._files()), None)

    def _files(self) -> Iterator[Any]:
        """Yield the collections of files, also those that others wrap."""
        for images in (self.train, self.val):
            while images is not None:
                if hasattr(images, "reading"):
                    yield images
                images = getattr(images, "images", None)


@dataclass
class LabelledData:
    """Base class of the labelled data of a protocol, whose fields are the options of `--data`.

    Attributes:
        layout: layouts of the folder, for errors.
    """

    layout: ClassVar[str]

    def open(self) -> Splits:
        """Open both splits."""
        raise NotImplementedError

    def open_by(self, reading: Reading) -> Splits:
        """Open both splits, and read their images by these options (`Splits.read_by`)."""
        return self.open().read_by(reading)

    def __post_init__(self) -> None:
        check_bounds(self, "data.")

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Return the data set in a folder, None if there is none."""
        data: Any = cls  # subclasses have a root
        return data(root=str(folder)) if cls.recognises(folder) else None

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """Whether a folder has one of the layouts; its files may be incomplete."""
        raise NotImplementedError


@dataclass
class SegmentationData(LabelledData):
    """Images with pixel-wise class labels.

    Attributes:
        name: folder of a data set, recognised by its name and layout; or, with `root`, the name of its layout: voc,
            pascal-context, pascal-context-60, coco-stuff, ade20k, cityscapes, camvid, or folder for images/<split> and
            labels/<split> (PNG indices, 255 for none), with or without classes.txt; or scenes, which are synthetic; or
            the import path of your own function (docs/extending.md).
        root: folder of the unpacked data set, unless `name` is the folder.
        partial: accept a data set with missing images. Its scores are not comparable with published ones.
        limit: maximum number of images per split, evenly spaced, for a quick trial.
        train: split to train on or to search; by default the training images (trainaug of voc, if it exists).
        val: split to score; by default the validation images.
    """

    layout: ClassVar[str] = (
        f"images/<split> and labels/<split>, or {', '.join(name for name in SEGMENTATION_SETS if name != 'folder')} "
        "in their own layout"
    )

    name: str
    root: str | None = None
    partial: bool = False
    limit: Annotated[int, at_least(1)] | None = None
    train: str | None = None
    val: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name != SCENES and _is_folder(self):
            self.name, self.root = _found(self)
        if self.name != SCENES and "." not in self.name:
            try:
                segmentation_set(self.name)
            except DataError as error:
                raise DataError(f"{error}; or give {SCENES}, or a folder: there is none at {self.name}") from error

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Return the data set in a folder, recognised by folder name and layout; None if there is none."""
        for data_set in SEGMENTATION_SETS.values():
            if _is_named_after(folder, data_set) and _has_labels(folder, data_set):
                return cls(data_set.name, str(folder))
        own = all((folder / part).is_dir() for part in ("images", "labels"))
        return cls("folder", str(folder)) if own else None

    def open_by(self, reading: Reading) -> Splits:
        """Open both splits, and read their images and label maps by these options."""
        return self.open(reading).read_by(reading)

    def open(self, reading: Reading = DEFAULT_READING) -> Splits:
        """Open both splits; without a list of classes, the label maps are read.

        Raises:
            ConfigError: `root` is missing, or options contradict each other.
            DataError: unknown layout, missing images or labels, or splits with different classes.
        """
        (train, train_name), (val, val_name) = self._scenes() if self.name == SCENES else self._sets(reading)
        if list(train.classes) != list(val.classes):
            raise DataError(f"{train_name} and {val_name} have different classes: {train.classes} and {val.classes}")
        return Splits(train, val, self.name, about_splits(self, self.root, train, train_name, val, val_name))

    def _scenes(self) -> list[tuple[Any, str]]:
        from cribo.data.scenes import held_out_scenes

        given = {"root": self.root, "partial": self.partial or None, "a split": self.train or self.val}
        if unused := [option for option, value in given.items() if value is not None]:
            raise ConfigError(f"data scenes are synthetic and take no {' and no '.join(unused)}")
        counts = (count if self.limit is None else min(self.limit, count) for count in HELD_OUT_SCENES)
        return [(scenes, "held out") for scenes in held_out_scenes(*counts)]

    def _sets(self, reading: Reading) -> list[tuple[Any, str]]:
        from cribo.data import LabelledSubset, default_splits, open_segmentation

        if own := "." in self.name:
            function, defaults = import_by_path(self.name, "data.name"), ("train", "val")
        elif self.root is None:
            raise ConfigError(f"data.root is required: the folder of the unpacked data set {self.name}")
        else:
            function: Any = partial(open_segmentation, self.name, partial=self.partial, reading=reading)
            defaults = default_splits(self.name, self.root)
        opened = []
        for split in (self.train or defaults[0], self.val or defaults[1]):
            images: Any = function(self.root, split)
            if missing := [name for name in _LABELLED_IMAGES if not hasattr(images, name)]:
                raise ConfigError(
                    f"data.name {self.name} must return labelled images, and {type(images).__name__} has no "
                    f"{', '.join(missing)}: see docs/extending.md"
                )
            number = len(images) if self.limit is None else min(self.limit, len(images))
            if own or number < len(images):
                images = LabelledSubset(images, spread(len(images), number))
            opened.append((images, split))
        return opened


def _is_named_after(folder: Path, data_set: SegmentationSet) -> bool:
    names = {data_set.name, *(Path(usual).name for usual in data_set.folders)}
    return folder.resolve().name.lower() in {name.lower() for name in names}


def _has_labels(folder: Path, data_set: SegmentationSet) -> bool:
    """Whether a folder has the label maps of any split of a published data set."""
    return any(
        (folder / place).is_dir()
        for layout in data_set.layouts
        for split in layout.splits
        for place in layout.paths(layout.labels, split)
    )


@dataclass
class ImageData(LabelledData):
    """Images with one class each, for classification.

    Attributes:
        name: folder of a data set, recognised by its layout; or, with `root`, the name of its layout: imagenet
            (ImageNet-1k: train/<class>/*, and val/<class>/* or val/* with LOC_val_solution.csv or val.txt), or folder
            for train/<class>/* and val/<class>/* or, without splits, <class>/*, where each image is classified by all
            others.
        root: folder of the unpacked data set, unless `name` is the folder.
        train: subfolder of the labelled training images. [train]
        val: subfolder of the images to classify. [val, for a folder also validation, valid, test]
        partial: accept an ImageNet with missing images. Its scores are not comparable with published ones.
        limit: maximum number of images per split, spread over all classes, for a quick trial.
    """

    layout: ClassVar[str] = "train/<class>/* and val/<class>/*, or <class>/*, also below images"

    name: str
    root: str | None = None
    train: str | None = None
    val: str | None = None
    partial: bool = False
    limit: Annotated[int, at_least(1)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if _is_folder(self):
            self.name, self.root = _found(self)
        if self.name not in _IMAGE_LAYOUTS:
            raise ConfigError(f"data.name must be a folder or one of {', '.join(_IMAGE_LAYOUTS)}, got {self.name!r}")

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Return the data set in a folder with a subfolder per class, also below `images`; None if there is none."""
        from cribo.data.labelled.classification import has_class_folders, is_imagenet

        if is_imagenet(folder):
            return cls("imagenet", str(folder))
        found = next((place for place in (folder, folder / "images") if has_class_folders(place)), None)
        return None if found is None else cls("folder", str(found))

    def open(self) -> Splits:
        """Open both splits.

        Raises:
            ConfigError: `root` is missing.
            DataError: unknown layout, or missing images.
        """
        if self.root is None:
            raise ConfigError(f"data.root is required: the folder of {self.name}")
        from cribo.data.labelled.classification import open_classification

        found = open_classification(self.name, self.root, train=self.train, val=self.val, partial=self.partial)
        train, val = found.train, found.val
        if self.limit is not None:
            train, val = train.limited(self.limit), None if val is None else val.limited(self.limit)
        about = about_splits(self, self.root, train, found.train_name, val, found.val_name)
        return Splits(train, val, self.name, about)


def _is_folder(data: SegmentationData | ImageData) -> bool:
    """Whether `name` is a path to the data set instead of the name of a layout."""
    return data.root is None and (os.sep in data.name or Path(data.name).exists())


def _found(data: SegmentationData | ImageData) -> tuple[str, str]:
    """Recognise the data set in the folder `data.name`; return the name of its layout and its root.

    Raises:
        DataError: the folder does not exist or has another layout.
    """
    folder = Path(data.name).expanduser()
    if not folder.exists():
        from cribo.base.files import require

        require(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} is a file: give the folder of the data set")
    if (found := data.find(folder)) is None:
        raise DataError(f"{folder} has none of the known layouts: {data.layout}")
    return found.name, str(found.root)


def described(config: Any, root: str | os.PathLike[str] | None, **facts: Any) -> dict[str, Any]:
    """Return the description of a data set in `results.json`: its configuration with an absolute root, and facts."""
    return {**dataclasses.asdict(config), "root": None if root is None else str(absolute(root)), **facts}


def about_splits(
    config: Any, root: str | None, train: Any, train_name: str, val: Any, val_name: str | None, **facts: Any
) -> dict[str, Any]:
    """Return the description of a data set with two splits, as in `described`."""
    images = {"train_images": len(train), "val_images": None if val is None else len(val)}
    return described(config, root, train=train_name, val=val_name, **images, **facts)


def absolute(folder: str | os.PathLike[str]) -> Path:
    """Return an absolute path, with ~ replaced by the home folder, but symbolic links kept."""
    return Path(folder).expanduser().absolute()
