"""Images with object boxes from files in COCO's format, for training and scoring detection."""

import copy
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64, UInt8
from torch import Tensor

from cribo.base.errors import DataError, MissingData
from cribo.base.files import require
from cribo.data.labelled.coco import Annotation, CocoFile, is_number
from cribo.data.labelled.outlines import FAR, require_pixels, require_size
from cribo.data.sources.images import ImageFiles, PackedNames

log = logging.getLogger("cribo")

# Where to look for the two files and their images below a root; the first that exists is used.
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
        labels: (n,), class of each object.
        crowd: (n,), whether a box contains uncounted objects; crowds are excluded from training, and detections that
            match them from scoring.
        areas: (n,), area of each object in square pixels, by which objects are classified as small or large.
    """

    corners: Float64[Tensor, "n 4"]
    labels: Int64[Tensor, " n"]
    crowd: Bool[Tensor, " n"]
    areas: Float64[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, which: slice | Bool[Tensor, " n"]) -> "Boxes":
        """Select objects by slice or mask."""
        return Boxes(self.corners[which], self.labels[which], self.crowd[which], self.areas[which])


class BoxedImages(ImageFiles):
    """Images with object boxes from a file in COCO's format.

    Classes are sorted by category id; ids may have gaps: class c is the category `category_ids[c]`, and image i has the
    id `image_ids[i]` in `file`. Boxes are clipped to the image. Boxes that are empty or outside the image are dropped
    with a warning (COCO's own files have two). Images without boxes are kept.

    Args:
        annotations: the JSON file; `bbox` contains left, top, width and height in pixels.
        images: folder of its `file_name`s, or several candidates; by default, the file's own folder or `images` below
            it.

    Raises:
        MissingData: the file, or an image that it lists, does not exist.
        DataError: errors of `CocoFile`, no categories, duplicate category names, no boxes, or an invalid box.
    """

    def __init__(
        self,
        annotations: str | os.PathLike[str],
        images: str | os.PathLike[str] | Sequence[Path] | None = None,
    ) -> None:
        coco = CocoFile(annotations)
        self.file = coco.path
        if not coco.categories:
            raise DataError(f"{self.file} lists no categories: detection needs the names of the objects")
        self.classes = [str(category["name"]) for category in coco.categories]
        name, times = Counter(self.classes).most_common(1)[0]
        if times > 1:
            raise DataError(f"{self.file} must name each category once, got {name!r} {times} times")
        self.category_ids: list[int | str] = [category["id"] for category in coco.categories]
        self.image_ids: list[int | str] = [entry["id"] for entry in coco.images]
        files = coco.image_files(images)
        super().__init__(files.folder, files.names)
        coco.require_objects()
        sizes = [coco.size(number, self) for number in range(len(self))]
        # Flat arrays, whose memory workers share.
        self._sizes: Int64[np.ndarray, "n 2"] = np.array(sizes)
        self._boxes, self._spans = self._read_boxes(coco, sizes)

    def size(self, index: int) -> tuple[int, int]:
        """Return the height and width of an image in pixels, as listed in the file."""
        height, width = self._sizes[index].tolist()
        return height, width

    def load(self, index: int) -> UInt8[Tensor, "c h w"]:
        """Load an image as upright RGB.

        Raises:
            UnreadableImage: the image file is broken.
            DataError: its size differs from the listed one, so boxes would be misplaced.
        """
        image = super().load(index)
        require_size(self.file, self.name(index), self.size(index), (image.shape[1], image.shape[2]))
        return image

    def boxes(self, index: int) -> Boxes:
        """Return the objects of an image, possibly none."""
        return self._boxes[slice(*self._spans[index].tolist())]

    def subset(self, indices: Sequence[int]) -> "BoxedImages":
        """Return a subset of the images in the given order, with the same classes.

        Raises:
            IndexError: an index does not exist.
        """
        part = copy.copy(self)
        part.names = PackedNames(map(self.name, indices))
        part.image_ids = [self.image_ids[index] for index in indices]
        part._sizes, part._spans = self._sizes[indices], self._spans[indices]
        return part

    @property
    def num_boxes(self) -> int:
        """Total number of boxes, without crowds."""
        return sum(self._box_counts())

    @property
    def most_boxes(self) -> int:
        """Largest number of boxes in an image, without crowds."""
        return max(self._box_counts())

    def _box_counts(self) -> list[int]:
        return [int((~self.boxes(index).crowd).sum()) for index in range(len(self))]

    def _read_boxes(self, coco: CocoFile, sizes: Sequence[tuple[int, int]]) -> tuple[Boxes, Int64[np.ndarray, "n 2"]]:
        """Return the boxes of all images, and the start and end of each image's boxes."""
        rows: list[tuple[float, ...]] = []
        spans: list[tuple[int, int]] = []
        left_out: list[str] = []
        extents: list[float] = []
        for number, (height, width) in enumerate(sizes):
            start = len(rows)
            for annotation in coco.annotations[number]:
                x, y, w, h = self._box(annotation, height, width)
                extents.append(max(x + w, y + h))
                left, top, right, bottom = max(0.0, x), max(0.0, y), min(x + w, width), min(y + h, height)
                if right <= left or bottom <= top:
                    left_out.append(f"{annotation} of {self.name(number)}, {annotation.entry['bbox']}")
                    continue
                area = self._area(annotation, w * h)
                rows.append((left, top, right, bottom, annotation.category, annotation.crowd, area))
            spans.append((start, len(rows)))
        require_pixels(coco.path, extents)
        if left_out:
            log.warning(
                "%s: dropped %d of %d boxes, which are empty or outside the image; the first is %s",
                *(self.file, len(left_out), len(left_out) + len(rows), left_out[0]),
            )
        if not rows:
            raise DataError(f"{self.file} has no boxes in its {len(sizes)} images")
        table = torch.tensor(rows, dtype=torch.float64)
        boxes = Boxes(table[:, :4].clone(), table[:, 4].long(), table[:, 5].bool(), table[:, 6].clone())
        return boxes, np.array(spans)

    def _box(self, annotation: Annotation, height: int, width: int) -> tuple[float, float, float, float]:
        if annotation.entry.get("bbox") is None:
            raise DataError(f"{self.file}: {annotation} has no bbox (left, top, width, height)")
        box = annotation.entry["bbox"]
        if not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)) or min(box[2:]) < 0:
            raise DataError(
                f"{self.file}: the bbox of {annotation} must be left, top, width and height in pixels, with width and "
                f"height >= 0, got {box!r:.60}"
            )
        if max(map(abs, box)) > (limit := FAR * max(height, width)):
            raise DataError(
                f"{self.file}: the bbox of {annotation} must be in its image of {width} x {height} pixels or near it "
                f"(at most {limit}), got {box!r:.60}"
            )
        return box[0], box[1], box[2], box[3]

    def _area(self, annotation: Annotation, area: float) -> float:
        given = annotation.entry.get("area")
        if given is None:
            return area
        if not is_number(given) or given < 0:
            raise DataError(f"{self.file}: the area of {annotation} must be a number >= 0, got {given!r:.60}")
        return given


@dataclass(frozen=True)
class DetectionSplits:
    """Images for training a detector, and images for scoring it.

    Attributes:
        name: `coco` for the layout of COCO 2017, else `folder`.
        root: the folder, or that of the annotations if they were given.
        train, val: images with the same categories.
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

    Supported layouts below `root` are that of COCO (`annotations/instances_train2017.json`, `train2017`),
    `instances_train.json` with `images/train`, and `train/_annotations.coco.json` in the folder of the images; the
    same with `val` (or `valid`).

    Args:
        root: the folder of the set.
        train_annotations: the JSON file of the training images, at any path.
        train_images: the folder of the training images; by default that of the layout, or of the JSON file.
        val_annotations: the JSON file of the images to score.
        val_images: the folder of the images to score.

    Raises:
        MissingData: a folder, file or image does not exist.
        DataError: neither `root` nor the files are given, the splits have different categories, or errors of
            `BoxedImages`.
    """
    # Find both files before reading either.
    places = [_place(root, "train", train_annotations, train_images), _place(root, "val", val_annotations, val_images)]
    train, val = (BoxedImages(*place) for place in places)
    first, second = (dict(zip(split.category_ids, split.classes, strict=True)) for split in (train, val))
    if first != second:
        differing = [category for category in (first | second) if first.get(category) != second.get(category)]
        category = differing[0]
        raise DataError(
            f"{train.file} and {val.file} must list the same categories with the same ids, got {len(differing)} that "
            f"differ: {category!r} is {first.get(category, 'not listed')} for training and "
            f"{second.get(category, 'not listed')} for validation"
        )
    of_coco = (train.file.name, val.file.name) == ("instances_train2017.json", "instances_val2017.json")
    return DetectionSplits(
        "coco" if of_coco else "folder", train.file.parent if root is None else Path(root), train, val
    )


def has_annotations(root: str | os.PathLike[str]) -> bool:
    """Whether a folder has the annotations of either split where `open_detection` looks for them."""
    return any(
        (Path(root) / place.format(split=name)).is_file()
        for name, place in product(sum(_NAMES.values(), ()), _ANNOTATIONS)
    )


def open_boxes(
    root: str | os.PathLike[str] | None,
    split: str,
    *,
    annotations: str | os.PathLike[str] | None = None,
    images: str | os.PathLike[str] | None = None,
) -> BoxedImages:
    """Open one split of a detection set.

    Args:
        root: the folder of the set, in one of the layouts of `open_detection`.
        split: `train` or `val`.
        annotations: the JSON file, at any path.
        images: the folder of its images; by default that of the layout, or of the JSON file.

    Raises:
        MissingData: a folder, file or image does not exist.
        DataError: neither `root` nor the file is given, an unknown split, or errors of `BoxedImages`.
    """
    if split not in _NAMES:
        raise DataError(f"split must be {' or '.join(_NAMES)}, got {split!r}")
    return BoxedImages(*_place(root, split, annotations, images, options="data."))


def _place(
    root: str | os.PathLike[str] | None,
    split: str,
    annotations: str | os.PathLike[str] | None,
    images: str | os.PathLike[str] | None,
    *,
    options: str | None = None,
) -> tuple[Path, str | os.PathLike[str] | Sequence[Path] | None]:
    """Return a split's file and candidate image folders; `options` is the prefix of option names in errors."""
    options = f"data.{split}_" if options is None else options
    if root is None:
        if annotations is None:
            raise DataError(
                f"data.root (the folder of images and annotations) or {options}annotations (a JSON file in COCO's "
                "format) is required"
            )
        return Path(annotations), images
    folder = Path(root).expanduser()
    require(folder)
    file = Path(annotations) if annotations is not None else _annotations(folder, split, options)
    if images is not None:
        return file, images
    below = [folder / place.format(split=name) for name, place in product(_NAMES[split], _IMAGES)]
    return file, [*below, file.parent, folder]


def _annotations(folder: Path, split: str, options: str) -> Path:
    places = [place.format(split=name) for name, place in product(_NAMES[split], _ANNOTATIONS)]
    for place in places:
        if (folder / place).is_file():
            return folder / place
    raise MissingData(
        f"no annotations of the {split} split in {folder}: looked for {', '.join(places)}; set "
        f"{options}annotations to the file and {options}images to the folder of its images"
    )
