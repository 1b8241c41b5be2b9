"""The field's segmentation sets, read from the layouts in which they are published."""

import difflib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cribo.data.images import DataError, ImageFiles, MissingData, require
from cribo.data.layouts import FolderLayout, LabelMaps, Pairs, SplitPlace, locate, pair
from cribo.data.limits import MAX_PIXELS
from cribo.data.segmentation import (
    Colour,
    LabelledFiles,
    LabelledFolder,
    LabelValues,
    class_indices,
    class_names,
    colour_map,
    missing_labels,
)


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
        query_split: what retrieval labels.
        scale: the sides, long and short, within which MMSegmentation's configurations resize its images; None
            where they stay at their own size.
    """

    name: str
    title: str
    sizes: Mapping[str, int]
    layouts: tuple[FolderLayout, ...]
    class_list: str | None
    without: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    memory_splits: tuple[str, ...] = ("train",)
    query_split: str = "val"
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
    def palette(self) -> list[Colour]:
        """The colour of each class: the set's own, or those of `colour_map`, whose black is for a background."""
        if all("colour" in entry for entry in self._entries):
            return [tuple(entry["colour"]) for entry in self._entries]
        first = 0 if self.classes[0] == "background" else 1
        return colour_map(first + len(self.classes))[first:]

    @property
    def values(self) -> LabelValues:
        """What the values stand for in the label maps that the set was published with."""
        without = [entry["value"] for entry in self._published["classes"] if entry["name"] in self.without]
        return LabelValues(
            tuple(entry["value"] for entry in self._entries),
            ignored=(*without, *self._published["ignored"]),
        )

    def layout(self, split: str) -> str:
        """The layouts of a split, in words."""
        return ", or ".join(layout.describe(split) for layout in self.layouts if split in layout.splits)

    def locate(self, root: Path, split: str) -> SplitPlace:
        """Where a split lies, at or near `root`. Raises MissingData if the root is not there."""
        return locate([layout for layout in self.layouts if split in layout.splits], root, self.folders, split)


_VOC = FolderLayout(
    splits={"train": "train", "val": "val"},
    images=("JPEGImages",),
    labels=("SegmentationClass",),
    lists=("ImageSets/Segmentation/{split}.txt",),
)
_VOC_AUGMENTED = FolderLayout(
    splits={"trainaug": "trainaug"},
    images=("JPEGImages",),
    labels=("SegmentationClassAug",),
    lists=("ImageSets/Segmentation/trainaug.txt", "ImageSets/Segmentation/train_aug.txt"),
    # The copies of SegmentationClassAug differ: some hold VOC's own maps for VOC's own images, some the coarser ones
    # of SBD, and of some images none. With VOC's maps first, all copies give the same labels.
    original_labels="SegmentationClass",
)
_PASCAL_CONTEXT = FolderLayout(
    splits={"train": "train", "val": "val"},
    images=("JPEGImages",),
    labels=("SegmentationClassContext", "SegmentationContext"),
    lists=("ImageSets/SegmentationContext/{split}.txt",),
)
_COCO_STUFF = FolderLayout(
    splits={"train": "train2017", "val": "val2017"},
    images=("images/{split}", "{split}"),
    labels=("annotations/{split}", "stuffthingmaps/{split}", "stuffthingmaps_trainval2017/{split}"),
    maps=(LabelMaps(), LabelMaps("_labelTrainIds.png", official=False)),
)
_ADE20K = FolderLayout(
    splits={"train": "training", "val": "validation"},
    images=("images/{split}",),
    labels=("annotations/{split}",),
)
_CITYSCAPES = FolderLayout(
    splits={"train": "train", "val": "val"},
    images=("leftImg8bit/{split}",),
    labels=("gtFine/{split}",),
    image_endings=("_leftImg8bit.png",),
    maps=(LabelMaps("_gtFine_labelIds.png"), LabelMaps("_gtFine_labelTrainIds.png", official=False)),
)
_CAMVID_SEGNET = FolderLayout(
    splits={"train": "train", "val": "val", "test": "test"},
    images=("{split}",),
    labels=("{split}annot",),
    image_endings=(".png",),
)
_CAMVID_FOLDERS = FolderLayout(
    splits={"train": "train", "val": "val", "test": "test"},
    images=("images/{split}",),
    labels=("labels/{split}",),
    image_endings=(".jpg", ".png"),
    maps=(LabelMaps(official=False),),
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


def open_segmentation(
    name: str,
    root: str | os.PathLike[str],
    split: str,
    *,
    partial: bool = False,
    max_pixels: int = MAX_PIXELS,
) -> LabelledFiles:
    """One split of a segmentation set, as it was published.

    Opening lists folders and reads no image. The root may also be one of the set's own folders, or the folder
    above the set's. Images come in the order of their names.

    Args:
        name: one of `SEGMENTATION_SETS`. `folder` is any other set that lies in `images/<split>` and, as PNG maps of
            class indices (255: none), in `labels/<split>`, with a `classes.txt` of a name per line if there are names.
        root: the set's folder.
        split: one of the set's splits; for `folder` the name of its folders.
        partial: accept a part of a split: the images that are there, each of which must have its labels.
        max_pixels: size of the largest image that is decoded.

    Raises:
        MissingData: the root, a folder or a label map is not there.
        DataError: no such set or split, or not the number of images that the set was published with.

    >>> val = open_segmentation("ade20k", "ADEChallengeData2016", "val")  # doctest: +SKIP
    >>> len(val), val.classes[0], val.name(0)  # doctest: +SKIP
    (2000, 'wall', 'ADE_val_00000001.jpg')
    """
    chosen = _known_set(name)
    root = Path(root).expanduser()
    if chosen.name == "folder":
        classes = root / "classes.txt"
        return LabelledFolder(
            root / "images" / split,
            root / "labels" / split,
            classes if classes.exists() else None,
            max_pixels=max_pixels,
        )
    if split not in chosen.sizes:
        raise DataError(f"{chosen.name} has no split {split!r}; {_nearest(split, chosen.sizes)}")
    place = chosen.locate(root, split)
    if place.missing:
        raise MissingData(_not_there(chosen, root, split, place))
    _check_class_file(chosen, place)
    pairs = pair(place)
    stems = _present(chosen, split, pairs) if partial else _complete(chosen, split, pairs)
    return LabelledFiles(
        ImageFiles(place.images, (pairs.images[stem] for stem in stems), max_pixels=max_pixels),
        place.base,
        (pairs.labels[stem] for stem in stems),
        classes=chosen.classes,
        palette=chosen.palette,
        values=chosen.values if pairs.maps.official else class_indices(len(chosen.classes)),
    )


def default_splits(name: str, root: str | os.PathLike[str]) -> tuple[str, str]:
    """The splits of which the field remembers one and labels the other.

    Of Pascal VOC `trainaug` is remembered where its list and its label maps are there, else `train`.

    Raises DataError for an unknown set, MissingData if the root is not there.
    """
    chosen = _known_set(name)
    root = Path(root).expanduser()
    require(root)
    *preferred, last = chosen.memory_splits
    return next((split for split in preferred if not chosen.locate(root, split).missing), last), chosen.query_split


def _known_set(name: str) -> SegmentationSet:
    if name not in SEGMENTATION_SETS:
        raise DataError(f"there is no segmentation set {name!r}; {_nearest(name, SEGMENTATION_SETS)}")
    return SEGMENTATION_SETS[name]


def _nearest(name: str, names: Collection[str]) -> str:
    nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
    there = f"there are {', '.join(names)}"
    return f"did you mean {nearest[0]!r}? ({there})" if nearest else there


def _not_there(chosen: SegmentationSet, root: Path, split: str, place: SplitPlace) -> str:
    there = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    listing = ", ".join(there[:8]) + (f" and {len(there) - 8} more" if len(there) > 8 else "")
    return (
        f"{chosen.title} {split} is not in {place.base}: missing {' and '.join(place.missing)}; "
        f"expected {chosen.layout(split)}; folders in {root}: {listing or 'none'}"
    )


def _check_class_file(chosen: SegmentationSet, place: SplitPlace) -> None:
    path = place.base / place.layout.class_file if place.layout.class_file else None
    if path and path.exists() and (names := class_names(path)) != chosen.classes:
        raise DataError(
            f"{path} must name the classes of {chosen.title} in their order ({', '.join(chosen.classes)}), "
            f"got {', '.join(names)}; open a set with other classes as 'folder'"
        )


def _complete(chosen: SegmentationSet, split: str, pairs: Pairs) -> list[str]:
    """All that belongs to the split; raises DataError unless it is what was published."""
    no_image, no_labels = pairs.without(pairs.images), pairs.without(pairs.labels)
    size, found = chosen.sizes[split], len(pairs.stems)
    if found == size and not no_image and not no_labels:
        return list(pairs.stems)
    gaps = [pairs.image_path(stem) for stem in no_image] + [pairs.label_path(stem) for stem in no_labels]
    first = f"; {len(gaps)} missing, the first is {gaps[0]}" if gaps else ""
    raise DataError(
        f"{chosen.title} {split} in {pairs.place.base} must have {size} images and as many label maps, "
        f"got {found - len(no_image)} images and {found - len(no_labels)} label maps{first}; "
        f"expected {chosen.layout(split)}; to use a part of the set on purpose, open it as partial"
    )


def _present(chosen: SegmentationSet, split: str, pairs: Pairs) -> list[str]:
    """The images of the split that are there; raises MissingData if one has no labels, DataError if there are none."""
    stems = [stem for stem in pairs.stems if stem in pairs.images]
    if not stems:
        raise DataError(f"{chosen.title} {split} has no image in {pairs.place.images}; expected {chosen.layout(split)}")
    for stem in stems:
        if stem not in pairs.labels:
            raise missing_labels(pairs.images[stem], pairs.label_path(stem))
    return stems
