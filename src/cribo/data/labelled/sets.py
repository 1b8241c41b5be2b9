"""Standard segmentation sets: classes, splits and published layouts. Does not import torch."""

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cribo.base.colours import Colour, class_colours
from cribo.base.errors import DataError

if TYPE_CHECKING:
    from cribo.data.labelled.segmentation import LabelValues

HELD_OUT_SCENES = 200, 100
"""Number of held-out scenes in the memory, and number of query scenes, of dense retrieval."""


@dataclass(frozen=True)
class Layout:
    """One layout of a set on disk; paths are relative to its root, `{split}` is the folder name of the split.

    Attributes:
        images: candidate folders of the images, at any depth; the first that exists is used.
        labels: candidate folders of the label maps.
        splits: folder name of each split in this layout.
        image_endings: endings of image names, after the stem that their label maps share.
        label_maps: maps endings of label maps after that stem to whether their values are the published ones instead
            of class indices. The ending with the most maps is used.
        lists: candidate text files that list the split's images; if empty, all images are used.
        original_labels: a folder whose label maps take precedence over those in `labels`.
        class_file: an optional file that must list the same classes in the same order.
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
        """Return the paths of a split below the root."""
        return [template.format(split=self.splits[split]) for template in templates]

    def describe(self, split: str) -> str:
        """Describe the expected folders and files.

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
    """A segmentation set: its classes, splits and layouts.

    Attributes:
        name: name of the set in `open_segmentation` and on the command line.
        title: name of the set in papers.
        sizes: number of images of each split; empty for `folder`, whose splits are the existing folders.
        layouts: possible layouts on disk.
        class_list: file in `classes/` with the classes, their values and colours; None for `folder`, whose classes
            are part of the data.
        without: classes of that file that are ignored.
        folders: usual paths of the root below a given parent folder.
        memory_splits: candidate splits for the memory of retrieval; the first that exists is used.
        scale: long and short side to which MMSegmentation's configurations resize the images; None for their own
            size.
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
        file = resources.files("cribo.data.labelled") / "classes" / f"{self.class_list}.json"
        return json.loads(file.read_text(encoding="utf-8"))

    @cached_property
    def _entries(self) -> list[dict[str, Any]]:
        return [entry for entry in self._published["classes"] if entry["name"] not in self.without]

    @property
    def classes(self) -> list[str]:
        """The names of the classes, in the order of their indices."""
        return [entry["name"] for entry in self._entries]

    @property
    def palette(self) -> list[Colour]:
        """The colour of each class: the set's own, or else those of `class_colours`."""
        if all("colour" in entry for entry in self._entries):
            return [tuple(entry["colour"]) for entry in self._entries]
        return class_colours(self.classes)

    @property
    def values(self) -> "LabelValues":
        """Meaning of the values in the published label maps."""
        from cribo.data.labelled.label_maps import LabelValues

        without = [entry["value"] for entry in self._published["classes"] if entry["name"] in self.without]
        return LabelValues(
            tuple(entry["value"] for entry in self._entries),
            ignored=(*without, *self._published["ignored"]),
        )

    def layouts_of(self, split: str) -> list[Layout]:
        """Return the possible layouts of a split.

        Raises:
            DataError: unknown split.
        """
        if split not in self.sizes:
            raise DataError(f"{self.name} has no split {split!r}; {_nearest(split, self.sizes)}")
        return [layout for layout in self.layouts if split in layout.splits]

    def describe(self, split: str) -> str:
        """Describe the layouts of a split."""
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
    # Copies of SegmentationClassAug differ: for the images of VOC, some contain VOC's maps, some the coarser maps of
    # SBD, and some no maps. With precedence for VOC's maps, all copies give the same labels.
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
"""Sets that `open_segmentation` can read, by name."""


def segmentation_set(name: str) -> SegmentationSet:
    """Find a set by name.

    Raises:
        DataError: unknown set.
    """
    if name not in SEGMENTATION_SETS:
        raise DataError(f"unknown segmentation set {name!r}; {_nearest(name, SEGMENTATION_SETS)}")
    return SEGMENTATION_SETS[name]


def _nearest(name: str, names: Collection[str]) -> str:
    nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
    available = f"available: {', '.join(names)}"
    return f"did you mean {nearest[0]!r}? ({available})" if nearest else available
