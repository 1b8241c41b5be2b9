"""The labelled images of an evaluation: what can be asked for, and opening them."""

from dataclasses import dataclass

from cribo.arguments import ConfigError
from cribo.data import LabelledImages, LabelledSubset, default_splits, open_segmentation
from cribo.data.scenes import Scenes

_SCENES = "scenes"
_SCENE_COUNTS = 400, 100  # memory, queries
_FIRST_SCENE = 1_000_000  # nobody trains on that many


@dataclass
class DataConfig:
    """Labelled images.

    Attributes:
        name: voc, pascal-context, pascal-context-60, coco-stuff, ade20k, cityscapes, camvid, or folder for
            images/<split> and labels/<split> (PNG indices, 255 for none), with or without classes.txt; or scenes,
            which the program makes itself.
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
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"data.limit must be >= 1, got {self.limit}")


def open_splits(config: DataConfig) -> tuple[LabelledImages, str, LabelledImages, str]:
    """Open the memory's images and the queries, each followed by the name of its split.

    Raises:
        DataError: an unknown set, a folder of another layout, missing images or labels.
    """
    if config.name == _SCENES:
        memory, queries = _SCENE_COUNTS if config.limit is None else (min(config.limit, n) for n in _SCENE_COUNTS)
        first, second = Scenes(memory, first=_FIRST_SCENE), Scenes(queries, first=_FIRST_SCENE + max(_SCENE_COUNTS))
        return first, "held out", second, "held out"
    if config.root is None:
        raise ConfigError(f"data.root must be given: the folder that {config.name} was unpacked to")
    memory_split, query_split = default_splits(config.name, config.root)
    memory_split, query_split = config.memory or memory_split, config.queries or query_split
    opened = []
    for split in (memory_split, query_split):
        images = open_segmentation(config.name, config.root, split, partial=config.partial)
        if config.limit is not None and config.limit < len(images):
            images = LabelledSubset(images, spread(len(images), config.limit))
        opened.append(images)
    return opened[0], memory_split, opened[1], query_split


def spread(count: int, number: int) -> list[int]:
    """`number` indices below `count`, evenly apart."""
    return [place * count // number for place in range(number)]
