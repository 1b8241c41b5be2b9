"""The field's segmentation sets: classes, splits, and the layouts in which they are published; imports no torch."""

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cribo.errors import DataError

if TYPE_CHECKING:
    from cribo.data.segmentation import Colour, LabelValues


@dataclass(frozen=True)
class Layout:
    """One way in which a set lies on disk; paths are below its root, `{split}` is the split's own folder name.

    Attributes:
        images: folders of which the first that is there holds the images, at any depth.
        labels: the same for the label maps.
        splits: the name in paths of each split that lies this way.
        image_endings: what follows the part of an image's name that its label map shares.
        label_maps: kinds of label maps: what follows that part in their names, and whether their values are those
            that the set was published with, instead of class indices. The kind with the most maps is read.
        lists: text files of which the first that is there names the split's images; without any, all images count.
        original_labels: a folder whose label maps go before those in `labels`.
        class_file: a file that names the same classes in the same order, if it is there.
    """

    images: tuple[str, ...]
    labels: tuple[str, ...]
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "val": "val"})
    image_endings: tuple[str, ...] = (".jpg",)
    label_maps: Mapping[str, bool] = field(default_factory=lambda: {".png": True})
    lists: tuple[str, ...] = ()
    original_labels: str | None = None
    class_file: str | None = None

    def paths(self, templates: Iterable[str], split: str) -> list[str]:
        """Paths of a split below the root."""
        return [template.format(split=self.splits[split]) for template in templates]

    def describe(self, split: str) -> str:
        """What is looked for, in words.

        >>> layout = Layout(("images/{split}",), ("annotations/{split}",), {"val": "validation"})
        >>> layout.describe("val")
        'images/validation (*.jpg) with annotations/validation (*.png)'
        """

        def folders(templates: Iterable[str], endings: Iterable[str]) -> str:
            return f"{' or '.join(self.paths(templates, split))} ({' or '.join(f'*{ending}' for ending in endings)})"

        lists = f", listed in {' or '.join(self.paths(self.lists, split))}" if self.lists else ""
        return f"{folders(self.images, self.image_endings)} with {folders(self.labels, self.label_maps)}{lists}"


@dataclass(frozen=True)
class SegmentationSet:
    """A segmentation set: its classes, its splits, and the layouts in which it is found.

    Attributes:
        name: what `open_segmentation` and the command line call it.
        title: what papers call it.
        sizes: number of images of each split; empty for `folder`, whose splits are the folders that are there.
        layouts: the ways in which it may lie on disk.
        class_list: the file in `classes/` that names its classes, with their values and colours; None for `folder`,
            whose classes come with the data.
        without: classes of that file that are ignored.
        folders: where the root may lie below the folder that is given instead.
        memory_splits: what retrieval remembers: the first of these that is there.
        scale: the sides, long and short, within which MMSegmentation's configurations resize its images; None
            where they stay at their own size.
    """

    name: str
    title: str
    sizes: Mapping[str, int]
    layouts: tuple[Layout, ...]
    class_list: str | None
    without: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    memory_splits: tuple[str, ...] = ("train",)
    scale: tuple[int, int] | None = None

    @cached_property
    def _published(self) -> dict[str, Any]:
        if self.class_list is None:
            return {"ignored": [], "classes": []}
        file = resources.files("cribo.data") / "classes" / f"{self.class_list}.json"
        return json.loads(file.read_text(encoding="utf-8"))

    @cached_property
    def _entries(self) -> list[dict[str, Any]]:
        return [entry for entry in self._published["classes"] if entry["name"] not in self.without]

    @property
    def classes(self) -> list[str]:
        """The names of the classes, in the order of their indices."""
        return [entry["name"] for entry in self._entries]

    @property
    def palette(self) -> "list[Colour]":
        """The colour of each class: the set's own, or those of `colour_map`, whose black is for a background."""
        if all("colour" in entry for entry in self._entries):
            return [tuple(entry["colour"]) for entry in self._entries]
        from cribo.data.segmentation import colour_map

        first = 0 if self.classes[0] == "background" else 1
        return colour_map(first + len(self.classes))[first:]

    @property
    def values(self) -> "LabelValues":
        """What the values stand for in the label maps that the set was published with."""
        from cribo.data.segmentation import LabelValues

        without = [entry["value"] for entry in self._published["classes"] if entry["name"] in self.without]
        return LabelValues(
            tuple(entry["value"] for entry in self._entries),
            ignored=(*without, *self._published["ignored"]),
        )

    def layouts_of(self, split: str) -> list[Layout]:
        """The ways in which a split may lie on disk.

        Raises:
            DataError: no such split.
        """
        if split not in self.sizes:
            raise DataError(f"{self.name} has no split {split!r}; {_nearest(split, self.sizes)}")
        return [layout for layout in self.layouts if split in layout.splits]

    def describe(self, split: str) -> str:
        """The layouts of a split, in words."""
        return ", or ".join(layout.describe(split) for layout in self.layouts_of(split))


_VOC = Layout(
    images=("JPEGImages",),
    labels=("SegmentationClass",),
    lists=("ImageSets/Segmentation/{split}.txt",),
)
_VOC_AUGMENTED = Layout(
    splits={"trainaug": "trainaug"},
    images=("JPEGImages",),
    labels=("SegmentationClassAug",),
    lists=("ImageSets/Segmentation/trainaug.txt", "ImageSets/Segmentation/train_aug.txt"),
    # The copies of SegmentationClassAug differ: some hold VOC's own maps for VOC's own images, some the coarser ones
    # of SBD, and of some images none. With VOC's maps first, all copies give the same labels.
    original_labels="SegmentationClass",
)
_PASCAL_CONTEXT = Layout(
    images=("JPEGImages",),
    labels=("SegmentationClassContext", "SegmentationContext"),
    lists=("ImageSets/SegmentationContext/{split}.txt",),
)
_COCO_STUFF = Layout(
    splits={"train": "train2017", "val": "val2017"},
    images=("images/{split}", "{split}"),
    labels=("annotations/{split}", "stuffthingmaps/{split}", "stuffthingmaps_trainval2017/{split}"),
    label_maps={".png": True, "_labelTrainIds.png": False},
)
_ADE20K = Layout(
    splits={"train": "training", "val": "validation"},
    images=("images/{split}",),
    labels=("annotations/{split}",),
)
_CITYSCAPES = Layout(
    images=("leftImg8bit/{split}",),
    labels=("gtFine/{split}",),
    image_endings=("_leftImg8bit.png",),
    label_maps={"_gtFine_labelIds.png": True, "_gtFine_labelTrainIds.png": False},
)
_CAMVID_SEGNET = Layout(
    splits={"train": "train", "val": "val", "test": "test"},
    images=("{split}",),
    labels=("{split}annot",),
    image_endings=(".png",),
)
_CAMVID_FOLDERS = Layout(
    splits={"train": "train", "val": "val", "test": "test"},
    images=("images/{split}",),
    labels=("labels/{split}",),
    image_endings=(".jpg", ".png"),
    label_maps={".png": False},
    class_file="classes.txt",
)

_SETS = (
    SegmentationSet(
        name="voc",
        title="Pascal VOC 2012",
        sizes={"train": 1464, "val": 1449, "trainaug": 10582},
        layouts=(_VOC, _VOC_AUGMENTED),
        class_list="voc",
        folders=("VOCdevkit/VOC2012", "VOC2012"),
        memory_splits=("trainaug", "train"),
        scale=(2048, 512),
    ),
    SegmentationSet(
        name="pascal-context",
        title="Pascal Context",
        sizes={"train": 4998, "val": 5105},
        layouts=(_PASCAL_CONTEXT,),
        class_list="pascal_context",
        without=("background",),
        folders=("VOCdevkit/VOC2010", "VOC2010"),
        scale=(520, 520),
    ),
    SegmentationSet(
        name="pascal-context-60",
        title="Pascal Context (60 classes)",
        sizes={"train": 4998, "val": 5105},
        layouts=(_PASCAL_CONTEXT,),
        class_list="pascal_context",
        folders=("VOCdevkit/VOC2010", "VOC2010"),
        scale=(520, 520),
    ),
    SegmentationSet(
        name="coco-stuff",
        title="COCO-Stuff 164k",
        sizes={"train": 118287, "val": 5000},
        layouts=(_COCO_STUFF,),
        class_list="coco_stuff",
        folders=("coco_stuff164k", "coco"),
        scale=(2048, 512),
    ),
    SegmentationSet(
        name="ade20k",
        title="ADE20K",
        sizes={"train": 20210, "val": 2000},
        layouts=(_ADE20K,),
        class_list="ade20k",
        folders=("ADEChallengeData2016", "ade/ADEChallengeData2016"),
        scale=(2048, 512),
    ),
    SegmentationSet(
        name="cityscapes",
        title="Cityscapes",
        sizes={"train": 2975, "val": 500},
        layouts=(_CITYSCAPES,),
        class_list="cityscapes",
        folders=("cityscapes",),
        scale=(2048, 1024),
    ),
    SegmentationSet(
        name="camvid",
        title="CamVid",
        sizes={"train": 367, "val": 101, "test": 233},
        layouts=(_CAMVID_SEGNET, _CAMVID_FOLDERS),
        class_list="camvid",
        folders=("CamVid", "camvid"),
    ),
    SegmentationSet(name="folder", title="Folder", sizes={}, layouts=(), class_list=None),
)

SEGMENTATION_SETS: Mapping[str, SegmentationSet] = MappingProxyType({known.name: known for known in _SETS})
"""The sets that `open_segmentation` reads, by name."""


def segmentation_set(name: str) -> SegmentationSet:
    """The set of a name.

    Raises:
        DataError: there is none.
    """
    if name not in SEGMENTATION_SETS:
        raise DataError(f"there is no segmentation set {name!r}; {_nearest(name, SEGMENTATION_SETS)}")
    return SEGMENTATION_SETS[name]


def _nearest(name: str, names: Collection[str]) -> str:
    nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
    there = f"there are {', '.join(names)}"
    return f"did you mean {nearest[0]!r}? ({there})" if nearest else there
