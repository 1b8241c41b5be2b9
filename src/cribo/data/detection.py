"""Images with boxes around their objects, from files of COCO's format: what detection is trained and scored on."""

import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float64, Int64, UInt8
from torch import Tensor

from cribo.data.coco import CocoFile, annotation_name
from cribo.data.images import DataError, MissingData, require
from cribo.data.limits import MAX_PIXELS

log = logging.getLogger("cribo")

COCO = "coco"
"""What `DetectionSplits.name` calls the layout of COCO 2017."""

FOLDER = "folder"
"""What it calls every other one."""

# Where the two files and their images lie below a root, the first that is there.
_NAMES = {"train": ("train",), "val": ("val", "valid")}
_ANNOTATIONS = (
    "annotations/instances_{split}2017.json",
    "annotations/instances_{split}.json",
    "instances_{split}.json",
    "{split}/_annotations.coco.json",
)
_IMAGES = ("{split}2017", "images/{split}2017", "images/{split}", "{split}", "images")


@dataclass(frozen=True)
class Boxes:
    """The objects of one image.

    Attributes:
        corners: (n, 4), left, top, right and bottom in pixels, inside the image and not empty.
        labels: (n,), the class of each.
        crowd: (n,), whether a box holds uncounted objects: nobody is trained on those, and what is found there is
            neither right nor wrong.
        areas: (n,), square pixels of the object itself, by which small and large ones are told apart.
    """

    corners: Float64[Tensor, "n 4"]
    labels: Int64[Tensor, " n"]
    crowd: Bool[Tensor, " n"]
    areas: Float64[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, which: slice | Bool[Tensor, " n"]) -> "Boxes":
        """Some of the objects."""
        return Boxes(self.corners[which], self.labels[which], self.crowd[which], self.areas[which])


class BoxedImages:
    """Images whose objects a file of COCO's format puts into boxes.

    The classes come in the order of the categories' ids, which need not be without gaps: class c is the category
    `category_ids[c]`. Boxes are clipped to their image; those that are empty, or lie outside of it, are left out, which
    the log says once. (COCO's own files have two of them.) Images without boxes stay.

    Args:
        annotations: the JSON file; `bbox` holds left, top, width and height in pixels.
        images: folder in which its `file_name`s lie, or several in which they may lie; by default, the file's own
            folder or `images` below it.
        max_pixels: images with more of them are refused.

    Attributes:
        path: the JSON file.
        classes: the names of the classes.
        category_ids: the id of each class in the file.
        image_ids: the id of each image in the file.

    Raises:
        MissingData: the file, or an image that it names, is not there.
        DataError: what `CocoFile` raises, no category or two of one name, no box at all, or a box that is none.
    """

    def __init__(
        self,
        annotations: str | os.PathLike[str],
        images: str | os.PathLike[str] | Sequence[Path] | None = None,
        *,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        coco = CocoFile(annotations)
        self.path = coco.path
        if not coco.categories:
            raise DataError(f"{self.path} lists no category: detection needs the names of what it shall find")
        self.classes = [str(category["name"]) for category in coco.categories]
        name, times = Counter(self.classes).most_common(1)[0]
        if times > 1:
            raise DataError(f"{self.path} must name each category once, got {name!r} {times} times")
        self.category_ids: list[int | str] = [category["id"] for category in coco.categories]
        self.image_ids: list[int | str] = [entry["id"] for entry in coco.images]
        folders = _folders(self.path, images)
        self._files = coco.image_files(folders, max_pixels=max_pixels)
        self._listed_sizes = [self._listed_size(coco, number) for number in range(len(coco.images))]
        self._boxes, self._ends = self._read_boxes(coco)
        self._chosen = range(len(self.image_ids))

    def __len__(self) -> int:
        return len(self._chosen)

    def name(self, index: int) -> str:
        """The image's path below the folder of the images."""
        return self._files.name(self._chosen[index])

    def image_id(self, index: int) -> int | str:
        """The image's id in the file."""
        return self.image_ids[self._chosen[index]]

    def image_path(self, index: int) -> str:
        """Where the image's file is."""
        return self._files.path(self._chosen[index])

    def size(self, index: int) -> tuple[int, int]:
        """Height and width of the image in pixels, as listed."""
        return self._listed_sizes[self._chosen[index]]

    def load(self, index: int) -> UInt8[Tensor, "3 h w"]:
        """One image, RGB, upright.

        Raises:
            UnreadableImage: its file is broken.
            DataError: it is not of the size that is listed, so that boxes would lie elsewhere.
        """
        image = self._files.load(self._chosen[index])
        height, width = self.size(index)
        if image.shape[1:] != (height, width):
            raise DataError(
                f"{self.path}: {self.name(index)} must have the size of its file, "
                f"{image.shape[2]} x {image.shape[1]}, got {width} x {height}"
            )
        return image

    def boxes(self, index: int) -> Boxes:
        """The objects of one image, may be none."""
        number = self._chosen[index]
        return self._boxes[slice(self._ends[number], self._ends[number + 1])]

    def subset(self, indices: Iterable[int]) -> "BoxedImages":
        """Some of the images, in this order, of the same classes.

        Raises:
            IndexError: an index that there is not.
        """
        part = object.__new__(BoxedImages)
        part.__dict__.update(self.__dict__)
        part._chosen = [self._chosen[index] for index in indices]
        return part

    @property
    def num_boxes(self) -> int:
        """Boxes of all images together, without crowds."""
        return sum(int((~self.boxes(index).crowd).sum()) for index in range(len(self)))

    @property
    def most_boxes(self) -> int:
        """Boxes of the image with the most of them, without crowds."""
        return max(int((~self.boxes(index).crowd).sum()) for index in range(len(self)))

    def _listed_size(self, coco: CocoFile, number: int) -> tuple[int, int]:
        entry = coco.images[number]
        if "height" not in entry or "width" not in entry:
            return coco.size(number, self._files.path(number))
        size = entry["height"], entry["width"]
        if not all(isinstance(side, int) and side > 0 for side in size):
            raise DataError(
                f"{self.path}: width and height of {entry['file_name']} must be whole numbers > 0, "
                f"got {entry['width']!r} and {entry['height']!r}"
            )
        return size

    def _read_boxes(self, coco: CocoFile) -> tuple[Boxes, list[int]]:
        """All boxes in flat tensors, which workers share, and where those of each image begin and end."""
        label = {category: number for number, category in enumerate(self.category_ids)}
        rows: list[tuple[float, ...]] = []
        ends = [0]
        left_out: list[str] = []
        for number, (height, width) in enumerate(self._listed_sizes):
            for annotation in coco.annotations[self.image_ids[number]]:
                x, y, w, h = self._box(annotation)
                left, top, right, bottom = max(0.0, x), max(0.0, y), min(x + w, width), min(y + h, height)
                if right <= left or bottom <= top:
                    left_out.append(
                        f"{annotation_name(annotation)} of {self._files.name(number)}, {annotation['bbox']}"
                    )
                    continue
                crowd, area = bool(annotation.get("iscrowd")), self._area(annotation, w * h)
                rows.append((left, top, right, bottom, label[annotation["category_id"]], crowd, area))
            ends.append(len(rows))
        if left_out:
            log.warning(
                "%s: left out %d of %d boxes, which are empty or lie outside of their image; the first is %s",
                *(self.path, len(left_out), len(left_out) + len(rows), left_out[0]),
            )
        if not rows:
            raise DataError(f"{self.path} has no box in any of its {len(self.image_ids)} images")
        table = torch.tensor(rows, dtype=torch.float64)
        boxes = Boxes(table[:, :4].clone(), table[:, 4].long(), table[:, 5].bool(), table[:, 6].clone())
        return boxes, ends

    def _box(self, annotation: Mapping[str, Any]) -> tuple[float, float, float, float]:
        if "bbox" not in annotation:
            raise DataError(f"{self.path}: {annotation_name(annotation)} has no bbox (left, top, width, height)")
        box = annotation["bbox"]
        if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)) or min(box[2:]) < 0:
            raise DataError(
                f"{self.path}: the bbox of {annotation_name(annotation)} must be left, top, width and height in "
                f"pixels, width and height not below 0, got {box!r}"
            )
        return box[0], box[1], box[2], box[3]

    def _area(self, annotation: Mapping[str, Any], area: float) -> float:
        given = annotation.get("area", area)
        if not _is_number(given) or given < 0:
            raise DataError(
                f"{self.path}: the area of {annotation_name(annotation)} must be a number >= 0, got {given!r}"
            )
        return given


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _folders(annotations: Path, images: str | os.PathLike[str] | Sequence[Path] | None) -> Sequence[Path]:
    if images is None:
        return annotations.parent, annotations.parent / "images"
    return [Path(images).expanduser()] if isinstance(images, str | os.PathLike) else images


@dataclass(frozen=True)
class DetectionSplits:
    """What a detector is trained on and what it is scored on.

    Attributes:
        name: `COCO` for the layout of COCO 2017, else `FOLDER`.
        root: the folder, or that of the annotations where they were named.
        train, val: of the same categories.
    """

    name: str
    root: Path
    train: BoxedImages
    val: BoxedImages


def open_detection(
    root: str | os.PathLike[str] | None = None,
    *,
    train_annotations: str | os.PathLike[str] | None = None,
    train_images: str | os.PathLike[str] | None = None,
    val_annotations: str | os.PathLike[str] | None = None,
    val_images: str | os.PathLike[str] | None = None,
) -> DetectionSplits:
    """Open the two splits of a detection set.

    Below a root they are found by themselves in the layout of COCO (`annotations/instances_train2017.json`,
    `train2017`), with `instances_train.json` and `images/train`, or with `train/_annotations.coco.json` beside the
    images, and the same with `val` (or `valid`).

    Args:
        root: the folder of the set.
        train_annotations: the JSON file of the images to train on, wherever it is.
        train_images: the folder of these images; by default where the layout has them, or beside the file.
        val_annotations: the JSON file of the images to score on.
        val_images: the folder of these.

    Raises:
        MissingData: a folder, file or image is not there.
        DataError: neither a root nor the files are given, what `BoxedImages` raises, or the splits have different
            categories.
    """
    given = {"train": (train_annotations, train_images), "val": (val_annotations, val_images)}
    places = {split: _place(root, split, *paths) for split, paths in given.items()}
    train, val = (BoxedImages(annotations, images) for annotations, images in places.values())
    _require_same_categories(train, val)
    name = COCO if all(places[split][0].name == f"instances_{split}2017.json" for split in places) else FOLDER
    return DetectionSplits(name, train.path.parent if root is None else Path(root), train, val)


def _place(
    root: str | os.PathLike[str] | None,
    split: str,
    annotations: str | os.PathLike[str] | None,
    images: str | os.PathLike[str] | None,
) -> tuple[Path, str | os.PathLike[str] | Sequence[Path] | None]:
    """The file of a split, and where its images may lie."""
    if root is None:
        if annotations is None:
            raise DataError(
                f"data.root must be given, the folder of images and annotations; or data.{split}_annotations, a JSON "
                "file of COCO's format"
            )
        return Path(annotations), images
    folder = Path(root).expanduser()
    require(folder)
    file = Path(annotations) if annotations is not None else _annotations(folder, split)
    if images is not None:
        return file, images
    below = [folder / place.format(split=name) for name, place in product(_NAMES[split], _IMAGES)]
    return file, [*below, file.parent, folder]


def _annotations(folder: Path, split: str) -> Path:
    places = [place.format(split=name) for name, place in product(_NAMES[split], _ANNOTATIONS)]
    for place in places:
        if (folder / place).is_file():
            return folder / place
    raise MissingData(
        f"no annotations of the {split} split in {folder}: looked for {', '.join(places)}; name the file by "
        f"data.{split}_annotations and the folder of its images by data.{split}_images"
    )


def _require_same_categories(train: BoxedImages, val: BoxedImages) -> None:
    first, second = (dict(zip(split.category_ids, split.classes, strict=True)) for split in (train, val))
    if first == second:
        return
    differing = [category for category in (first | second) if first.get(category) != second.get(category)]
    category = differing[0]
    raise DataError(
        f"{train.path} and {val.path} must list the same categories with the same ids, got {len(differing)} that "
        f"differ: {category!r} is {first.get(category, 'not listed')} for training and "
        f"{second.get(category, 'not listed')} for validation"
    )
