"""Annotation files in COCO's format: label maps drawn from their outlines, and files written from masks."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from cribo.colours import class_colours
from cribo.data.images import DataError, ImageFiles, MissingData, require
from cribo.data.label_maps import IGNORE_INDEX, read_classes
from cribo.data.reading import image_size
from cribo.errors import InputError
from cribo.wording import enumerated

BACKGROUND = "background"
"""The class of pixels outside all objects; it comes first."""

_NEEDED = {"images": ("id", "file_name"), "annotations": ("image_id", "category_id"), "categories": ("id", "name")}
_POLYGON = 6  # numbers in the smallest polygon, a triangle


class CocoFile:
    """The content of a file in COCO's format: images, categories, and the annotations of each image.

    Attributes:
        path: the JSON file.
        images: entries of the images, in the order of the file; at least one.
        categories: entries of the categories, sorted by id.
        annotations: entries of the annotations of each image, by the image's id.

    Raises:
        MissingData: the file does not exist.
        DataError: the file is not in COCO's format, an id occurs twice, or an annotation refers to an unlisted image
            or category.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()
        require(self.path)
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path} is not a JSON file ({error})") from error
        if not _has_lists(content):
            raise DataError(f"{self.path} is not in COCO's format: it must contain the lists {', '.join(_NEEDED)}")
        for key, fields in _NEEDED.items():
            for number, entry in enumerate(content[key]):
                missing = [field for field in fields if not isinstance(entry, dict) or field not in entry]
                if missing:
                    raise DataError(f"{self.path}: entry {number} of its {key} lacks {', '.join(missing)}")
        images, categories = (self._distinct_ids(key, content[key]) for key in ("images", "categories"))
        if not images:
            raise DataError(f"{self.path} lists no images")
        self.images: list[Mapping[str, Any]] = content["images"]
        self.categories: list[Mapping[str, Any]] = sorted(content["categories"], key=lambda category: category["id"])
        self.annotations: dict[Any, list[Mapping[str, Any]]] = {image: [] for image in images}
        for annotation in content["annotations"]:
            for what, known in (("image", images), ("category", categories)):
                number = annotation[f"{what}_id"]
                if not isinstance(number, int | str) or number not in known:
                    raise DataError(
                        f"{self.path}: {annotation_name(annotation)} refers to {what} {number}, which is not listed; "
                        f"listed: {enumerated([str(each) for each in sorted(known)]) or 'none'}"
                    )
            self.annotations[annotation["image_id"]].append(annotation)

    def _distinct_ids(self, key: str, entries: list[Mapping[str, Any]]) -> dict[Any, None]:
        ids: dict[Any, None] = {}
        for entry in entries:
            each = entry["id"]
            if not isinstance(each, int | str) or any(type(each) is not type(other) for other in [*ids][:1]):
                raise DataError(f"{self.path}: the ids of its {key} must be all numbers or all strings, got {each!r}")
            if each in ids:
                raise DataError(
                    f"{self.path}: the id {each!r} occurs twice in its {key}: ids must be unique, also in merged files"
                )
            ids[each] = None
        return ids

    def image_files(self, folders: str | os.PathLike[str] | Sequence[Path] | None) -> ImageFiles:
        """Open the images in the first of `folders` that contains the first image.

        Args:
            folders: one or several folders; by default, the file's own folder and `images` below it.

        Raises:
            MissingData: an image does not exist.
        """
        if folders is None:
            folders = self.path.parent, self.path.parent / "images"
        elif isinstance(folders, str | os.PathLike):
            folders = [Path(folders).expanduser()]
        names = [str(entry["file_name"]) for entry in self.images]
        folder = next((folder for folder in folders if (folder / names[0]).is_file()), folders[0])
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise MissingData(
                f"{len(missing)} of the {len(names)} images of {self.path} are not in "
                f"{' or '.join(map(str, folders))}, the first is {missing[0]!r}"
            )
        return ImageFiles(folder, names)


def require_listed_size(file: Path, name: str, listed: tuple[Any, Any], size: tuple[int, int]) -> None:
    """Raise DataError if the size (height, width) of an image differs from the one listed in a COCO file."""
    if listed != size:
        raise DataError(
            f"{file}: {name} must have the size of its file, {size[1]} x {size[0]}, got {listed[1]} x {listed[0]}"
        )


class CocoLabels(ImageFiles):
    """Images with objects outlined by a file in COCO's format, as `LabelledImages`.

    Class 0 is the background, followed by the categories sorted by id; ids may have gaps. Where objects overlap, the
    smaller one is on top. Crowds, regions of uncounted objects, are labelled 255 (ignored) unless covered by an object.

    Args:
        annotations: the JSON file; `segmentation` contains polygons or run lengths, compressed or not.
        images: folder of its `file_name`s; by default, the file's own folder or `images` below it.

    Raises:
        MissingData: the file, or an image that it lists, does not exist.
        DataError: errors of `CocoFile`, duplicate category names, or annotations without outlines.
    """

    ignore_index: int = IGNORE_INDEX

    def __init__(self, annotations: str | os.PathLike[str], images: str | os.PathLike[str] | None = None) -> None:
        self._coco = coco = CocoFile(annotations)
        # A category called background is merged with class 0.
        things = [category for category in coco.categories if str(category["name"]).lower() != BACKGROUND]
        self._label = {category["id"]: 0 for category in coco.categories}
        self._label |= {category["id"]: number for number, category in enumerate(things, start=1)}
        self.classes = read_classes([BACKGROUND, *(str(category["name"]) for category in things)]).names
        self.palette = class_colours(self.classes)
        for annotation in (annotation for several in coco.annotations.values() for annotation in several):
            if not annotation.get("segmentation"):
                raise DataError(
                    f"{coco.path}: {annotation_name(annotation)} has no segmentation: boxes do not "
                    "give a class to each pixel; polygons or run lengths are needed"
                )
        files = coco.image_files(images)
        super().__init__(files.folder, files.names)

    def labels(self, index: int) -> UInt8[Tensor, "h w"]:
        """Return the class of each pixel, 0 for background and 255 for crowds.

        Raises:
            UnreadableImage: the image file is broken.
            DataError: its size differs from the listed one, or an outline is invalid.
        """
        entry = self._coco.images[index]
        height, width = image_size(self.path(index), reading=self.reading)
        listed = entry.get("height", height), entry.get("width", width)
        require_listed_size(self._coco.path, self.name(index), listed, (height, width))
        labels = np.zeros((height, width), dtype=np.uint8)
        annotations = self._coco.annotations[entry["id"]]
        outlined = [(annotation, self._mask(annotation, height, width)) for annotation in annotations]
        # Crowds first, then from the largest object to the smallest.
        outlined.sort(key=lambda pair: (not pair[0].get("iscrowd"), -int(pair[1].sum())))
        for annotation, mask in outlined:
            labels[mask] = IGNORE_INDEX if annotation.get("iscrowd") else self._label[annotation["category_id"]]
        return torch.from_numpy(labels)

    def _mask(self, annotation: Mapping[str, Any], height: int, width: int) -> Bool[np.ndarray, "h w"]:
        from faster_coco_eval.core import mask as coco

        outline = annotation["segmentation"]
        try:
            if isinstance(outline, list):
                if any(len(polygon) < _POLYGON or len(polygon) % 2 for polygon in outline):
                    raise InputError("a polygon must have at least three corners, each with x and y")
                parts: Any = coco.frPyObjects(outline, height, width)
                encoded: Any = coco.merge(parts)
            elif tuple(outline["size"]) != (height, width):
                raise InputError(f"run lengths must have size {[height, width]} (height, width), got {outline['size']}")
            else:
                compressed = isinstance(outline["counts"], str | bytes)
                encoded = outline if compressed else coco.frPyObjects(outline, height, width)
            return coco.decode(encoded).astype(bool).reshape(height, width)
        except (ValueError, RuntimeError, TypeError, KeyError) as error:
            raise DataError(
                f"{self._coco.path}: the outline of {annotation_name(annotation)} is invalid: {error}"
            ) from error


def is_coco(path: Path) -> bool:
    """Whether a JSON file is in COCO's format."""
    try:
        return _has_lists(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False


def _has_lists(content: object) -> bool:
    return isinstance(content, dict) and all(isinstance(content.get(key), list) for key in _NEEDED)


def is_number(value: object) -> bool:
    """Whether an entry is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def annotation_name(annotation: Mapping[str, Any]) -> str:
    """Return the name of an annotation for error messages."""
    return f"annotation {annotation.get('id', 'without id')}"
