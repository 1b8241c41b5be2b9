"""The labelled images of an evaluation. Nothing here needs torch until a set is opened."""

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from cribo.arguments import ConfigError, import_by_path
from cribo.data.sets import SEGMENTATION_SETS, SegmentationSet, segmentation_set
from cribo.errors import DataError
from cribo.evaluation.runtime import require_least

SCENES = "scenes"
PLACES = ("root", "train_annotations", "val_annotations")
"""Facts about data that say where it lies, not what it is."""

_SCENE_COUNTS = 400, 100  # in train and val
_FIRST_SCENE = 1_000_000  # no training uses that many scenes
_LABELLED_IMAGES = ("__len__", "load", "labels", "name", "classes")


@dataclass(frozen=True)
class Splits:
    """Opened data of an evaluation.

    Attributes:
        train: images that are searched or trained on.
        val: images that are scored; None if each training image is scored by the others.
        title: for names of folders.
        about: what `results.json` says of the data.
    """

    train: Any
    val: Any
    title: str
    about: dict[str, Any] = field(default_factory=dict)


@dataclass
class SegmentationData:
    """Images with a class for each pixel.

    Attributes:
        name: voc, pascal-context, pascal-context-60, coco-stuff, ade20k, cityscapes, camvid, or folder for
            images/<split> and labels/<split> (PNG indices, 255 for none), with or without classes.txt; or scenes,
            which are synthetic; or the import path of a function of your own (docs/extending.md).
        root: the folder that the set was unpacked to.
        partial: accept a set with missing images. Its scores cannot be compared with published ones.
        limit: use only this many images of each split, evenly spread, to try things out.
        train: split that is trained on, or whose patches are searched; the training images when not given (trainaug of
            voc, if it exists).
        val: split that is scored; the validation images when not given.
    """

    layout: ClassVar[str] = (
        f"images/<split> and labels/<split>, or {', '.join(name for name in SEGMENTATION_SETS if name != 'folder')} "
        "in their own layout"
    )

    name: str
    root: str | None = None
    partial: bool = False
    limit: int | None = None
    train: str | None = None
    val: str | None = None

    def __post_init__(self) -> None:
        require_least(self, {"limit": 1}, "data.")
        if self.name != SCENES and "." not in self.name:
            segmentation_set(self.name)

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Return the set in a folder: a published one if folder and layout have its names, or one of your own."""
        for known in SEGMENTATION_SETS.values():
            if _is_named_after(folder, known) and _has_labels(folder, known):
                return cls(known.name, str(folder))
        own = all((folder / part).is_dir() for part in ("images", "labels"))
        return cls("folder", str(folder)) if own else None

    def open(self) -> Splits:
        """Open both splits.

        Raises:
            ConfigError: no root, or options that do not fit together.
            DataError: a folder of another layout, missing images or labels, or different classes in the two splits.
        """
        (train, train_name), (val, val_name) = self._scenes() if self.name == SCENES else self._sets()
        if list(train.classes) != list(val.classes):
            raise DataError(f"{train_name} and {val_name} have different classes: {train.classes} and {val.classes}")
        return Splits(train, val, self.name, about_splits(self, self.root, train, train_name, val, val_name))

    def _scenes(self) -> list[tuple[Any, str]]:
        from cribo.data.scenes import Scenes

        given = {"root": self.root, "partial": self.partial or None, "a split": self.train or self.val}
        if unused := [option for option, value in given.items() if value is not None]:
            raise ConfigError(f"data scenes are made by the program and take no {' and no '.join(unused)}")
        train, val = (count if self.limit is None else min(self.limit, count) for count in _SCENE_COUNTS)
        return [
            (Scenes(train, first=_FIRST_SCENE), "held out"),
            (Scenes(val, first=_FIRST_SCENE + max(_SCENE_COUNTS)), "held out"),
        ]

    def _sets(self) -> list[tuple[Any, str]]:
        from cribo.data import LabelledSubset, default_splits, open_segmentation

        if own := "." in self.name:
            function, defaults = import_by_path(self.name, "data.name"), ("train", "val")
        elif self.root is None:
            raise ConfigError(f"data.root must be given: the folder that {self.name} was unpacked to")
        else:
            function: Any = partial(open_segmentation, self.name, partial=self.partial)
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


def _is_named_after(folder: Path, known: SegmentationSet) -> bool:
    names = {known.name, *(Path(usual).name for usual in known.folders)}
    return folder.resolve().name.lower() in {name.lower() for name in names}


def _has_labels(folder: Path, known: SegmentationSet) -> bool:
    """Whether the label maps of a split of a published set are in a folder."""
    return any(
        (folder / place).is_dir()
        for layout in known.layouts
        for split in layout.splits
        for place in layout.paths(layout.labels, split)
    )


@dataclass
class ImageData:
    """Images of one class each.

    Attributes:
        name: imagenet (ImageNet-1k: train/<class>/*, and val/<class>/* or val/* with LOC_val_solution.csv or val.txt),
            or folder for train/<class>/* and val/<class>/*, or, without splits, <class>/*: each image is then
            classified by all others.
        root: the folder that the set was unpacked to.
        train: folder of the images whose classes are known, below the root. [train]
        val: folder of the images to classify. [val, for a folder also validation, valid, test]
        partial: accept an ImageNet with missing images. Its scores cannot be compared with published ones.
        limit: use only this many images of each split, of each class in turn, to try things out.
    """

    layout: ClassVar[str] = "train/<class>/* and val/<class>/*, or <class>/*, also below images"

    name: Literal["imagenet", "folder"]
    root: str | None = None
    train: str | None = None
    val: str | None = None
    partial: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        require_least(self, {"limit": 1}, "data.")

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Return the images in a folder that has a folder for each class, itself or in its `images`."""
        from cribo.data.classification import has_class_folders, is_imagenet

        if is_imagenet(folder):
            return cls("imagenet", str(folder))
        found = next((place for place in (folder, folder / "images") if has_class_folders(place)), None)
        return None if found is None else cls("folder", str(found))

    def open(self) -> Splits:
        """Open the images whose classes are known, and those to classify.

        Raises:
            ConfigError: no root.
            DataError: a folder of another layout, or missing images.
        """
        if self.root is None:
            raise ConfigError(f"data.root must be given: the folder of {self.name}")
        from cribo.data.classification import open_classification

        found = open_classification(self.name, self.root, train=self.train, val=self.val, partial=self.partial)
        train, val = found.train, found.val
        if self.limit is not None:
            train, val = train.limited(self.limit), None if val is None else val.limited(self.limit)
        about = about_splits(self, self.root, train, found.train_name, val, found.val_name)
        return Splits(train, val, self.name, about)


def about_splits(
    config: Any, root: str | None, train: Any, train_name: str, val: Any, val_name: str | None
) -> dict[str, Any]:
    """Return what `results.json` says of data; the root is absolute, so that it identifies a folder of your own."""
    return {
        **dataclasses.asdict(config),
        "root": None if root is None else str(Path(root).expanduser().absolute()),
        "train": train_name,
        "val": val_name,
        "train_images": len(train),
        "val_images": None if val is None else len(val),
    }


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` indices below `count`, evenly spaced.

    Example:
        >>> spread(10, 3), spread(2, 3)
        ([0, 3, 6], [0, 1])
    """
    number = min(count, most)
    return [place * count // number for place in range(number)]
