"""The labelled images of an evaluation: what can be asked for, and opening them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cribo.arguments import ConfigError, import_by_path
from cribo.data.sets import segmentation_set
from cribo.errors import DataError

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
class _SetConfig:
    """A set of labelled images.

    Attributes:
        name: voc, pascal-context, pascal-context-60, coco-stuff, ade20k, cityscapes, camvid, or folder for
            images/<split> and labels/<split> (PNG indices, 255 for none), with or without classes.txt; or scenes,
            which the program makes itself; or the import path of a function of your own (docs/extending.md).
        root: the folder that the set was unpacked to.
        partial: accept a set of which images are missing. Its figures cannot be compared with published ones.
        limit: use so many images of each split only, evenly spread, to try things out.
    """

    name: str
    root: str | None = None
    partial: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        require_limit(self.limit)
        if self.name != _SCENES and "." not in self.name:
            segmentation_set(self.name)


@dataclass
class LabelledDataConfig(_SetConfig):
    """Labelled images.

    Attributes:
        memory: split whose patches are searched; the training images when not given (trainaug of voc, where it
            is there).
        queries: split that is labelled and scored; the validation images when not given.
    """

    memory: str | None = None
    queries: str | None = None


@dataclass
class TrainingDataConfig(_SetConfig):
    """Labelled images to train on, and others to score by.

    Attributes:
        train: split that is trained on; the training images when not given (trainaug of voc, where it is there).
        val: split that is scored; the validation images when not given.
    """

    train: str | None = None
    val: str | None = None


def open_splits(config: LabelledDataConfig) -> "tuple[LabelledImages, str, LabelledImages, str]":
    """Open the memory's images and the queries, each followed by the name of its split.

    Raises:
        DataError: a folder of another layout, missing images or labels.
    """
    return _open(config, config.memory, config.queries)


def open_training_splits(config: TrainingDataConfig) -> "tuple[LabelledImages, str, LabelledImages, str]":
    """Open the images to train on and those to score by, each followed by the name of its split.

    Raises:
        DataError: a folder of another layout, missing images or labels, or other classes in the two.
    """
    train, train_split, val, val_split = _open(config, config.train, config.val)
    if list(train.classes) != list(val.classes):
        raise DataError(f"{train_split} and {val_split} have different classes: {train.classes} and {val.classes}")
    return train, train_split, val, val_split


def _open(
    config: _SetConfig, first_split: str | None, second_split: str | None
) -> "tuple[LabelledImages, str, LabelledImages, str]":
    # Imported here: a configuration must not wait for torch.
    from cribo.data import LabelledSubset, default_splits, open_segmentation
    from cribo.data.scenes import Scenes

    if config.name == _SCENES:
        given = {"root": config.root, "partial": config.partial or None}
        given |= {"a split": first_split or second_split}
        if unused := [option for option, value in given.items() if value is not None]:
            raise ConfigError(f"data scenes are made by the program and take no {' and no '.join(unused)}")
        first, second = (count if config.limit is None else min(config.limit, count) for count in _SCENE_COUNTS)
        memory = Scenes(first, first=_FIRST_SCENE)
        return memory, "held out", Scenes(second, first=_FIRST_SCENE + max(_SCENE_COUNTS)), "held out"
    function: Callable[[str | None, str], LabelledImages]
    own = "." in config.name
    if own:
        function = import_by_path(config.name, "data.name")
        defaults = "train", "val"
    elif config.root is None:
        raise ConfigError(f"data.root must be given: the folder that {config.name} was unpacked to")
    else:
        function = cast(Any, partial(open_segmentation, config.name, partial=config.partial))
        defaults = default_splits(config.name, config.root)
    splits = first_split or defaults[0], second_split or defaults[1]
    opened = []
    for split in splits:
        images = function(config.root, split)
        if missing := [name for name in ("__len__", "load", "labels", "name", "classes") if not hasattr(images, name)]:
            raise ConfigError(
                f"data.name {config.name} must return labelled images, and {type(images).__name__} has no "
                f"{', '.join(missing)}: see docs/extending.md"
            )
        number = len(images) if config.limit is None else min(config.limit, len(images))
        if own or number < len(images):
            images = LabelledSubset(images, spread(len(images), number))
        opened.append(images)
    return opened[0], splits[0], opened[1], splits[1]


def whole_path(root: str | None) -> str | None:
    """The folder of a set, for results: by itself it says which one, from wherever the command was given."""
    return None if root is None else str(Path(root).expanduser().absolute())


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` indices below `count`, evenly spaced.

    Example:
        >>> spread(10, 3), spread(2, 3)
        ([0, 3, 6], [0, 1])
    """
    number = min(count, most)
    return [place * count // number for place in range(number)]
