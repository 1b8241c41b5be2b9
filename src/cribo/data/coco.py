"""Files of COCO's format, and what they outline as a class for each pixel."""

import itertools
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from cribo.data.images import DataError, ImageFiles, MissingData, require
from cribo.data.limits import MAX_PIXELS
from cribo.data.reading import image_size
from cribo.data.segmentation import IGNORE_INDEX, ClassedFiles, class_names, colour_map

BACKGROUND = "background"
"""The class of pixels that lie in no object; it comes first."""

_KEYS = ("images", "annotations", "categories")
_NEEDED = {"images": ("id", "file_name"), "annotations": ("image_id", "category_id"), "categories": ("id", "name")}
_POLYGON = 6  # numbers of the smallest one, a triangle


class CocoFile:
    """What a file of COCO's format says, as it says it: images, categories, and the annotations of each image.

    Args:
        path: the JSON file.

    Attributes:
        path: the JSON file.
        images: the entries of its images, as listed; at least one.
        categories: the entries of its categories, in the order of their ids.
        annotations: those of each image, by the image's id.

    Raises:
        MissingData: it is not there.
        DataError: no such JSON, ids that occur twice, or annotations of images or categories that it does not list.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()
        content = _read(self.path)
        self.images: list[Mapping[str, Any]] = list(content["images"])
        if not self.images:
            raise DataError(f"{self.path} lists no image")
        self.categories: list[Mapping[str, Any]] = sorted(content["categories"], key=lambda category: category["id"])
        self.annotations: dict[Any, list[Mapping[str, Any]]] = {entry["id"]: [] for entry in self.images}
        known = {category["id"] for category in self.categories}
        for annotation in content["annotations"]:
            self._require_listed(annotation, known)
            self.annotations[annotation["image_id"]].append(annotation)

    def _require_listed(self, annotation: Mapping[str, Any], categories: Collection[Any]) -> None:
        if annotation["image_id"] not in self.annotations:
            raise DataError(
                f"{self.path}: {annotation_name(annotation)} is of image {annotation['image_id']}, which is not listed"
            )
        if annotation["category_id"] not in categories:
            raise DataError(
                f"{self.path}: {annotation_name(annotation)} is of category {annotation['category_id']}, which is not "
                f"listed; there are {', '.join(map(str, sorted(categories))) or 'none'}"
            )

    def image_files(self, folders: Sequence[Path], *, max_pixels: int = MAX_PIXELS) -> ImageFiles:
        """The images, in the first of these folders that has the first of them.

        Raises:
            MissingData: one of them is not there.
        """
        names = [str(entry["file_name"]) for entry in self.images]
        folder = next((folder for folder in folders if (folder / names[0]).is_file()), folders[0])
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise MissingData(
                f"{len(missing)} of the {len(names)} images of {self.path} are not in "
                f"{' or '.join(map(str, folders))}, the first is {missing[0]!r}"
            )
        return ImageFiles(folder, names, max_pixels=max_pixels)

    def size(self, number: int, image: str | os.PathLike[str]) -> tuple[int, int]:
        """Height and width of one of the images, as its own file has them.

        Args:
            number: of the image, in the order of the list.
            image: its file.

        Raises:
            UnreadableImage: the image's file is broken.
            DataError: the list has another size.
        """
        entry = self.images[number]
        height, width = image_size(image)
        if (entry.get("height", height), entry.get("width", width)) != (height, width):
            raise DataError(
                f"{self.path}: {entry['file_name']} must have the size of its file, {width} x {height}, "
                f"got {entry.get('width')} x {entry.get('height')}"
            )
        return height, width


class CocoLabels(ClassedFiles):
    """Images whose objects a file of COCO's format outlines, as `LabelledImages`.

    Class 0 is the background, then the categories come in the order of their ids, which need not be without gaps.
    Where objects overlap, the smaller one lies on top. Crowds, which outline a region with uncounted objects in it,
    have no class (255) where no object lies on them.

    Args:
        annotations: the JSON file; `segmentation` holds polygons or run lengths, compressed or not.
        images: folder in which its `file_name`s lie; by default, the file's own folder or `images` below it.
        max_pixels: images with more of them are refused.

    Raises:
        MissingData: the file, or an image that it names, is not there.
        DataError: what `CocoFile` raises, names that occur twice, or annotations without outline.
    """

    def __init__(
        self,
        annotations: str | os.PathLike[str],
        images: str | os.PathLike[str] | None = None,
        *,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self._coco = coco = CocoFile(annotations)
        # What a file calls background is that of all others.
        things = [category for category in coco.categories if str(category["name"]).lower() != BACKGROUND]
        self._label = {category["id"]: 0 for category in coco.categories}
        self._label |= {category["id"]: number for number, category in enumerate(things, start=1)}
        classes = class_names([BACKGROUND, *(str(category["name"]) for category in things)])
        for annotation in itertools.chain.from_iterable(coco.annotations.values()):
            self._require_outline(annotation)
        folders = [Path(images)] if images is not None else [coco.path.parent, coco.path.parent / "images"]
        super().__init__(coco.image_files(folders, max_pixels=max_pixels), classes, colour_map(len(classes)))

    def labels(self, index: int) -> UInt8[Tensor, "h w"]:
        """The class of each pixel, 0 for background, 255 for crowds.

        Raises:
            UnreadableImage: the image's file is broken.
            DataError: it is not of the size that the file says, or an outline cannot be used.
        """
        height, width = self._coco.size(index, self.image_path(index))
        labels = np.zeros((height, width), dtype=np.uint8)
        annotations = self._coco.annotations[self._coco.images[index]["id"]]
        outlined = [(annotation, self._mask(annotation, height, width)) for annotation in annotations]
        # Crowds first, then from the largest object to the smallest.
        outlined.sort(key=lambda pair: (not pair[0].get("iscrowd"), -int(pair[1].sum())))
        for annotation, mask in outlined:
            labels[mask] = IGNORE_INDEX if annotation.get("iscrowd") else self._label[annotation["category_id"]]
        return torch.from_numpy(labels)

    def _require_outline(self, annotation: Mapping[str, Any]) -> None:
        if not annotation.get("segmentation"):
            raise DataError(
                f"{self._coco.path}: {annotation_name(annotation)} has no segmentation: boxes alone do not tell the "
                "class of a pixel; polygons or run lengths are needed"
            )

    def _mask(self, annotation: Mapping[str, Any], height: int, width: int) -> Bool[np.ndarray, "h w"]:
        from faster_coco_eval.core import mask as coco

        outline = annotation["segmentation"]
        try:
            if isinstance(outline, list):
                if any(len(polygon) < _POLYGON or len(polygon) % 2 for polygon in outline):
                    raise ValueError("a polygon needs three corners at least, x and y of each")
                parts: Any = coco.frPyObjects(outline, height, width)
                encoded: Any = coco.merge(parts)
            elif tuple(outline["size"]) != (height, width):
                raise ValueError(f"its run lengths are of {outline['size']} (height, width), not {[height, width]}")
            else:
                compressed = isinstance(outline["counts"], str | bytes)
                encoded = outline if compressed else coco.frPyObjects(outline, height, width)
            return coco.decode(encoded).astype(bool).reshape(height, width)
        except (ValueError, RuntimeError, TypeError, KeyError) as error:
            raise DataError(
                f"{self._coco.path}: the outline of {annotation_name(annotation)} cannot be used: {error}"
            ) from error


def is_coco(path: Path) -> bool:
    """Whether a JSON file is of COCO's format."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and all(isinstance(content.get(key), list) for key in _KEYS)


def _read(path: Path) -> dict[str, Any]:
    require(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no JSON file ({error})") from error
    if not isinstance(content, dict) or not all(isinstance(content.get(key), list) for key in _KEYS):
        raise DataError(f"{path} is not of COCO's format: it must hold the lists {', '.join(_KEYS)}")
    for key, fields in _NEEDED.items():
        for number, entry in enumerate(content[key]):
            missing = [field for field in fields if not isinstance(entry, dict) or field not in entry]
            if missing:
                raise DataError(f"{path}: number {number} of its {key} lacks {', '.join(missing)}")
    for key in ("images", "categories"):
        _require_ids(path, key, [entry["id"] for entry in content[key]])
    for annotation in content["annotations"]:
        for field in ("image_id", "category_id"):
            if not isinstance(annotation[field], int | str):
                raise DataError(
                    f"{path}: {field} of {annotation_name(annotation)} must be a number or a text, "
                    f"got {annotation[field]!r}"
                )
    return content


def _require_ids(path: Path, key: str, ids: list[Any]) -> None:
    if len({type(each) for each in ids}) > 1 or not all(isinstance(each, int | str) for each in ids):
        wrong = next((each for each in ids if not isinstance(each, int | str)), ids[-1])
        raise DataError(f"{path}: the ids of its {key} must be all numbers or all texts, got {wrong!r}")
    seen: set[Any] = set()
    for each in ids:
        if each in seen:
            raise DataError(
                f"{path}: the id {each!r} stands twice in its {key}: give each its own, also when files are joined"
            )
        seen.add(each)


def annotation_name(annotation: Mapping[str, Any]) -> str:
    """What messages call an annotation."""
    return f"annotation {annotation.get('id', 'without id')}"
