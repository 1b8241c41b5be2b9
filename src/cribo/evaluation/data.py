"""The labelled images of an evaluation: what can be asked for, and opening them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cribo.arguments import ConfigError, import_by_path

if TYPE_CHECKING:
    from cribo.data import LabelledImages

_SCENES = "scenes"
_SCENE_COUNTS = 400, 100  # known ones, and those that are scored
_FIRST_SCENE = 1_000_000  # nobody trains on that many


def require_limit(limit: int | None) -> None:
    """Refuse a `data.limit` of no image.

    Raises:
        ConfigError: it is below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"data.limit must be >= 1, got {limit}")


@dataclass
class LabelledDataConfig:
    """Labelled images.

    Attributes:
        name: voc, pascal-context, pascal-context-60, coco-stuff, ade20k, cityscapes, camvid, or folder for
            images/<split> and labels/<split> (PNG indices, 255 for none), with or without classes.txt; or scenes,
            which the program makes itself; or the import path of a function of your own (docs/extending.md).
        root: the folder that the set was unpacked to.
        memory: split whose patches are searched; the training images when not given (trainaug of voc, where it
            is there).
        queries: split that is labelled and scored; the validation images when not given.
        partial: accept a set of which images are missing. Its figures cannot be compared with published ones.
        limit: use so many images of each split only, evenly spread, to try things out.
    """

    name: str
    root: str | None = None
    memory: str | None = None
    queries: str | None = None
    partial: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        require_limit(self.limit)


@dataclass
class TrainingDataConfig:
    """Labelled images to train on, and others to score by.

    Attributes:
        name: voc, pascal-context, pascal-context-60, coco-stuff, ade20k, cityscapes, camvid, or folder for
            images/<split> and labels/<split> (PNG indices, 255 for none), with or without classes.txt; or scenes,
            which the program makes itself; or the import path of a function of your own (docs/extending.md).
        root: the folder that the set was unpacked to.
        train: split that is trained on; the training images when not given (trainaug of voc, where it is there).
        val: split that is scored; the validation images when not given.
        partial: accept a set of which images are missing. Its figures cannot be compared with published ones.
        limit: use so many images of each split only, evenly spread, to try things out.
    """

    name: str
    root: str | None = None
    train: str | None = None
    val: str | None = None
    partial: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        require_limit(self.limit)


def open_splits(config: LabelledDataConfig) -> "tuple[LabelledImages, str, LabelledImages, str]":
    """Open the memory's images and the queries, each followed by the name of its split.

    Raises:
        DataError: an unknown set, a folder of another layout, missing images or labels.
    """
    return _open(config, config.memory, config.queries)


def open_training_splits(config: TrainingDataConfig) -> "tuple[LabelledImages, str, LabelledImages, str]":
    """Open the images to train on and those to score by, each followed by the name of its split.

    Raises:
        DataError: an unknown set, a folder of another layout, missing images or labels, or other classes in the two.
    """
    from cribo.data import DataError

    train, train_split, val, val_split = _open(config, config.train, config.val)
    if list(train.classes) != list(val.classes):
        raise DataError(f"{train_split} and {val_split} have different classes: {train.classes} and {val.classes}")
    return train, train_split, val, val_split


def _open(
    config: LabelledDataConfig | TrainingDataConfig, first_split: str | None, second_split: str | None
) -> "tuple[LabelledImages, str, LabelledImages, str]":
    # Imported here: a configuration must not wait for torch.
    from cribo.data import LabelledSubset, default_splits, open_segmentation
    from cribo.data.scenes import Scenes

    if config.name == _SCENES:
        given = {"root": config.root, "partial": config.partial or None}
        given |= {"a split": first_split or second_split}
        if unused := [option for option, value in given.items() if value is not None]:
            raise ConfigError(f"data scenes are made by the program and take no {' and no '.join(unused)}")
        counts = [n if config.limit is None else min(config.limit, n) for n in _SCENE_COUNTS]
        first, second = (
            Scenes(counts[0], first=_FIRST_SCENE),
            Scenes(counts[1], first=_FIRST_SCENE + max(_SCENE_COUNTS)),
        )
        return first, "held out", second, "held out"
    if "." in config.name:
        return _open_own(config, first_split or "train", second_split or "val")
    if config.root is None:
        raise ConfigError(f"data.root must be given: the folder that {config.name} was unpacked to")
    defaults = default_splits(config.name, config.root)
    splits = first_split or defaults[0], second_split or defaults[1]
    opened = []
    for split in splits:
        images = open_segmentation(config.name, config.root, split, partial=config.partial)
        if config.limit is not None and config.limit < len(images):
            images = LabelledSubset(images, spread(len(images), config.limit))
        opened.append(images)
    return opened[0], splits[0], opened[1], splits[1]


def _open_own(
    config: LabelledDataConfig | TrainingDataConfig, first_split: str, second_split: str
) -> "tuple[LabelledImages, str, LabelledImages, str]":
    """Labelled images of the user's own: a function (root, split) that an import path names."""
    from cribo.data import LabelledSubset

    function = import_by_path(config.name, "data.name")
    opened = []
    for split in (first_split, second_split):
        images = function(config.root, split)
        missing = [name for name in ("__len__", "load", "labels", "name", "classes") if not hasattr(images, name)]
        if missing:
            raise ConfigError(
                f"data.name {config.name} must return labelled images, and {type(images).__name__} has no "
                f"{', '.join(missing)}: see docs/extending.md"
            )
        if config.limit is not None and config.limit < len(images):
            images = LabelledSubset(images, spread(len(images), config.limit))
        opened.append(images)
    first, second = opened
    return first, first_split, second, second_split


def whole_path(root: str | None) -> str | None:
    """The folder of a set, for results: by itself it says which one, from wherever the command was given."""
    return None if root is None else str(Path(root).expanduser().absolute())


def spread(count: int, number: int) -> list[int]:
    """`number` indices below `count`, evenly apart."""
    return [place * count // number for place in range(number)]
