"""Annotation files in COCO's format: one reader and writer for all commands, and label maps drawn from the outlines."""

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64

from cribo.base.colours import Colour, class_colours
from cribo.base.errors import DataError, InputError, MissingData
from cribo.base.files import path_inside, read_json, require
from cribo.base.wording import counted, enumerated
from cribo.data.labelled.coco_writing import mask_annotation, write_coco
from cribo.data.labelled.label_maps import (
    IGNORE_INDEX,
    LabelledBox,
    Labelling,
    LabelMap,
    read_classes,
)
from cribo.data.labelled.outlines import (
    BACKGROUND,
    CORNERS,
    Ring,
    check_outline,
    meets_image,
    pixels_of,
    require_pixels,
    require_size,
    runs_of,
)
from cribo.data.labelled.regions import BOXES
from cribo.data.labelled.run_lengths import decompressed, mask_of, require_counts
from cribo.data.labelled.scaling import Scaling, scaling_of
from cribo.data.labelled.segmentation import LabelledExamples
from cribo.data.reading import full_size
from cribo.data.sources.images import FilesBelow, ImageFiles

log = logging.getLogger("cribo")

_NEEDED = {"images": ("id", "file_name"), "annotations": ("image_id", "category_id"), "categories": ("id", "name")}
_LARGEST_ID = 2**53  # the integers that JSON's numbers represent exactly


@dataclass(frozen=True)
class Annotation:
    """An annotation of an image whose references and `iscrowd` have been checked.

    Attributes:
        entry: the annotation as in the file.
        category: place of its category in `CocoFile.categories`.
        crowd: whether it is a region of uncounted objects.
    """

    entry: Mapping[str, Any]
    category: int
    crowd: bool

    def __str__(self) -> str:
        return f"annotation {self.entry.get('id', 'without id')}"


class CocoFile:
    """The content of a file in COCO's format: images, categories, and the annotations of each image.

    Ids may be numbers or text, and 1, 1.0 and "1" are the same id. Names of files may contain backslashes.

    Attributes:
        path: the JSON file.
        images: entries of the images, in the order of the file; at least one.
        sizes: height and width of each image as listed; None where the file lists none.
        categories: entries of the categories, sorted by id.
        annotations: the annotations of each image, in the order of `images`.

    Raises:
        MissingData: the file does not exist.
        DataError: the file is not JSON or not in COCO's format, an id occurs twice, a size is invalid, or an annotation
            refers to an unlisted image or category or has an invalid `iscrowd`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()
        require(self.path)
        content = read_json(self.path, limit_bytes=None)
        if not is_coco(content):
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
        for key, field, entries in (("image", "file_name", self.images), ("category", "name", content["categories"])):
            for entry in entries:
                if not isinstance(entry[field], str | int) or not str(entry[field]).strip():
                    raise DataError(
                        f"{self.path}: the {field} of {key} {entry['id']} must be text, got {_shown(entry[field])}"
                    )
        self.sizes = [self._listed_size(entry) for entry in self.images]
        order = sorted(categories, key=lambda each: (isinstance(each, str), each))
        self.categories: list[Mapping[str, Any]] = [content["categories"][categories[each]] for each in order]
        places = {each: place for place, each in enumerate(order)}
        self.annotations: list[list[Annotation]] = [[] for _ in self.images]
        for entry in content["annotations"]:
            image = self._place(entry, "image", images)
            category = self._place(entry, "category", places)
            self.annotations[image].append(Annotation(entry, category, self._crowd(entry)))

    @property
    def num_annotations(self) -> int:
        """Number of annotations of all images."""
        return sum(map(len, self.annotations))

    def _distinct_ids(self, key: str, entries: list[Mapping[str, Any]]) -> dict[int | str, int]:
        """Return the place of each id in a list."""
        ids: dict[int | str, int] = {}
        for place, entry in enumerate(entries):
            each = _id(entry["id"])
            if each is None:
                raise DataError(
                    f"{self.path}: the ids of its {key} must be whole numbers or text, got {_shown(entry['id'])}"
                )
            if each in ids:
                raise DataError(
                    f"{self.path}: the id {entry['id']!r} occurs twice in its {key}: ids must be unique, also in "
                    "merged files"
                )
            ids[each] = place
        return ids

    def _place(self, entry: Mapping[str, Any], what: str, places: Mapping[int | str, int]) -> int:
        """Return the place of the image or category that an annotation refers to."""
        given = entry[f"{what}_id"]
        each = _id(given)
        if each is None or each not in places:
            raise DataError(
                f"{self.path}: {Annotation(entry, 0, False)} refers to {what} {_shown(given)}, which is not listed; "
                f"listed: {enumerated([str(each) for each in places]) or 'none'}"
            )
        return places[each]

    def _crowd(self, entry: Mapping[str, Any]) -> bool:
        given = entry.get("iscrowd")
        number = _id(given) if given is not None and not isinstance(given, bool) else int(bool(given))
        if number not in (0, 1):
            raise DataError(
                f"{self.path}: iscrowd of {Annotation(entry, 0, False)} must be 0 or 1, got {_shown(given)}"
            )
        return number == 1

    def _listed_size(self, entry: Mapping[str, Any]) -> tuple[int, int] | None:
        given = entry.get("height"), entry.get("width")
        if None in given:
            return None
        height, width = map(_id, given)
        if not (isinstance(height, int) and isinstance(width, int) and height > 0 and width > 0):
            raise DataError(
                f"{self.path}: width and height of {entry['file_name']} must be integers > 0, "
                f"got {_shown(given[1])} and {_shown(given[0])}"
            )
        return height, width

    def image_files(self, folders: str | os.PathLike[str] | Sequence[Path] | None) -> ImageFiles:
        """Open the images in the first of `folders` that contains the first image.

        Args:
            folders: one or several folders; by default, the file's own folder and `images` below it.

        Raises:
            MissingData: an image does not exist.
            InputError: a name leads outside the folders.
        """
        if folders is None:
            folders = self.path.parent, self.path.parent / "images"
        elif isinstance(folders, str | os.PathLike):
            folders = [Path(folders).expanduser()]
        names = [str(entry["file_name"]) for entry in self.images]
        for name in names:
            path_inside(Path(folders[0]), name, source=self.path, follow_links=True)
        folder = next((folder for folder in folders if FilesBelow(folder).find(names[0])), folders[0])
        files = FilesBelow(folder)
        found = [files.find(name) for name in names]
        missing = [name for name, file in zip(names, found, strict=True) if file is None]
        if missing:
            raise MissingData(
                f"{len(missing)} of the {len(names)} images of {self.path} are not in "
                f"{' or '.join(map(str, folders))}, the first is {missing[0]!r}"
            )
        return ImageFiles(folder, (file for file in found if file is not None))

    def size(self, index: int, files: ImageFiles) -> tuple[int, int]:
        """Return the height and width of an image: those listed, or else those of its file.

        Raises:
            UnreadableImage: no size is listed, and the image file is broken.
        """
        return self.sizes[index] or full_size(files.path(index))

    def require_objects(self) -> None:
        """Log the number of crowds, and raise DataError if all annotations are crowds."""
        total = self.num_annotations
        crowds = sum(annotation.crowd for of_image in self.annotations for annotation in of_image)
        if crowds and crowds == total:
            raise DataError(
                f"{self.path}: all {counted(total, 'annotation')} are crowds (iscrowd 1), which have no class. CVAT "
                "exports masks of its brush in this way: set iscrowd to 0 if they are single objects"
            )
        if crowds:
            log.info(
                "%s: %d of %d annotations are crowds (iscrowd 1), which have no class. CVAT exports masks of its brush "
                "in this way: set iscrowd to 0 if they are single objects",
                *(self.path, crowds, total),
            )


class CocoLabels(LabelledExamples):
    """Images with objects outlined by a file in COCO's format, as `LabelledImages`.

    Class 0 is the background, followed by the categories sorted by id; ids may have gaps. Where objects overlap, the
    smaller one is on top. Crowds, regions of uncounted objects, are labelled 255 (ignored) unless covered by an object.
    Of objects without an outline, the label map has the boxes (`LabelMap.boxes`); their pixels have no class unless an
    object covers them. Objects with neither, or with an outline of fewer than three corners or outside the image, are
    skipped with a warning.

    Args:
        annotations: the JSON file; `segmentation` contains polygons or run lengths, compressed or not.
        images: folder of its `file_name`s; by default, the file's own folder or `images` below it.

    Raises:
        MissingData: the file, or an image that it lists, does not exist.
        DataError: errors of `CocoFile`, duplicate category names, an invalid outline or box, neither of them at all, or
            only crowds.
    """

    def __init__(self, annotations: str | os.PathLike[str], images: str | os.PathLike[str] | None = None) -> None:
        self._coco = coco = CocoFile(annotations)
        # A category called background is merged with class 0.
        names = [str(category["name"]) for category in coco.categories]
        things = [name for name in names if name.lower() != BACKGROUND]
        numbers = iter(range(1, len(things) + 1))
        self._label = [0 if name.lower() == BACKGROUND else next(numbers) for name in names]
        self.listed_classes = read_classes([BACKGROUND, *things]).names
        files = coco.image_files(images)
        super().__init__(files.folder, files.names)
        coco.require_objects()
        self._outlines = self._read_outlines()

    def _read_outlines(self) -> list[list[tuple[Annotation, Any]]]:
        """Return the checked outlines of each image: polygons, the counts of run lengths, or a box."""
        coco, skipped, boxes = self._coco, list[str](), 0
        outlines: list[list[tuple[Annotation, Any]]] = [[] for _ in coco.images]
        extents: list[float] = []
        for index, each in enumerate(coco.annotations):
            size = coco.size(index, self) if each else (1, 1)
            for annotation in each:
                try:
                    outline = _outline(annotation.entry.get("segmentation"), *size)
                    if outline is None and not annotation.entry.get("segmentation") and not annotation.crowd:
                        outline = _box(annotation.entry.get("bbox"), self._label[annotation.category])
                except InputError as error:
                    name = self.name(index)
                    what = "outline" if annotation.entry.get("segmentation") else "box"
                    problem = f"the {what} of {annotation} of {name} is invalid: {error}"
                    raise DataError(f"{coco.path}: {problem}") from error
                if isinstance(outline, list):
                    extents.append(max(float(ring.max()) for ring in outline))
                if isinstance(outline, LabelledBox):
                    boxes += 1
                    extents.append(max(outline.corners[2:]))
                if (
                    outline is None
                    or (isinstance(outline, list) and not any(meets_image(ring, *size) for ring in outline))
                    or (isinstance(outline, LabelledBox) and outline.clipped(*size) is None)
                ):
                    skipped.append(f"{annotation} of {self.name(index)}")
                else:
                    outlines[index].append((annotation, outline))
        require_pixels(coco.path, extents)
        total = coco.num_annotations
        if skipped and len(skipped) == total:
            raise DataError(
                f"{coco.path}: none of the {counted(total, 'annotation')} has an outline or a box in its image: "
                f"polygons of three or more corners, run lengths, or boxes are needed. The first is {skipped[0]}"
            )
        if skipped:
            log.warning(
                "%s: skipped %d of %d annotations, which have neither segmentation nor box, fewer than three corners, "
                "or lie outside the image; their pixels are background. The first is %s",
                *(coco.path, len(skipped), total, skipped[0]),
            )
        if boxes:
            log.info(BOXES, coco.path, counted(boxes, "box", "boxes"))
        return outlines

    def label_map(self, index: int) -> LabelMap:
        """Return the class of each pixel, 0 for background and 255 for crowds.

        Raises:
            UnreadableImage: the image file is broken.
            DataError: its size differs from the listed one.
        """
        scaling = scaling_of(self.path(index), self.reading)
        require_size(self._coco.path, self.name(index), self._coco.sizes[index], scaling.full)
        height, width = scaling.read
        labels = np.zeros((height, width), dtype=np.uint8)
        boxes = tuple(
            outline._replace(corners=scaling.box(outline.corners))
            for _, outline in self._outlines[index]
            if isinstance(outline, LabelledBox)
        )
        for box in boxes:
            if (place := box.clipped(height, width)) is not None:
                labels[place[1] : place[3], place[0] : place[2]] = IGNORE_INDEX
        drawn = [
            (annotation, *_drawn(outline, scaling))
            for annotation, outline in self._outlines[index]
            if not isinstance(outline, LabelledBox)
        ]
        # Crowds first, then from the largest object to the smallest.
        drawn.sort(key=lambda each: (not each[0].crowd, -each[1]))
        for annotation, _, runs in drawn:
            labels[_mask(runs, scaling)] = IGNORE_INDEX if annotation.crowd else self._label[annotation.category]
        return LabelMap(torch.from_numpy(labels), boxes=boxes)

    @property
    def stated_palette(self) -> list[Colour]:
        """Colours by the names of the classes."""
        return list(class_colours(self.classes))


# --------------------------------------------------------------------------------------------------------- outlines


def _outline(given: object, height: int, width: int) -> list[Ring] | Int64[np.ndarray, " n"] | None:
    """Return a checked `segmentation` as polygons or as counts of run lengths; None if it describes no area.

    Raises:
        InputError: it is neither; or the numbers do not fit the image.
    """
    if not given:
        return None
    if isinstance(given, dict):
        return _counts(given, height, width)
    if not isinstance(given, list):
        raise InputError(f"segmentation must be polygons or run lengths, got {_shown(given)}")
    polygons = given if isinstance(given[0], list) else [given]
    for polygon in polygons:
        if not isinstance(polygon, list) or len(polygon) % 2:
            raise InputError(f"a polygon must be a list of x and y of its corners, got {_shown(polygon)}")
        wrong = next((each for each in polygon if not is_number(each)), None)
        if wrong is not None:
            raise InputError(f"coordinates must be pixels in the image of {width} x {height}, got {_shown(wrong)}")
    rings = [np.array(polygon, dtype=np.float64).reshape(-1, 2) for polygon in polygons]
    check_outline(rings, height, width)
    return [ring for ring in rings if len(ring) >= CORNERS] or None


def _box(given: object, label: int) -> LabelledBox | None:
    """Return a checked `bbox` (left, top, width, height) as a box of a class; None if it has no area.

    Raises:
        InputError: it is not four numbers.
    """
    if not given:
        return None
    if not isinstance(given, list) or len(given) != 4 or not all(map(is_number, given)):
        raise InputError(f"bbox must be left, top, width and height in pixels, got {_shown(given)}")
    left, top, width, height = map(float, given)
    return LabelledBox(label, (left, top, left + width, top + height), rest=0) if min(width, height) > 0 else None


def _counts(given: Mapping[str, Any], height: int, width: int) -> Int64[np.ndarray, " n"]:
    """Return the checked counts of run lengths."""
    size, counts = given.get("size"), given.get("counts")
    if not isinstance(size, list) or [*map(_id, size)] != [height, width]:
        raise InputError(f"run lengths must have size {[height, width]} (height, width), got {_shown(size)}")
    if isinstance(counts, str):
        found = decompressed(counts)
    elif isinstance(counts, list) and all(map(is_number, counts)):
        found = np.array([each if 0 <= each <= _LARGEST_ID and each == int(each) else -1 for each in counts], np.int64)
    else:
        raise InputError(f"counts of run lengths must be whole numbers or compressed text, got {_shown(counts)}")
    require_counts(found, (height, width))
    return found


def _drawn(outline: Any, scaling: Scaling) -> tuple[float, Any]:
    """Return the area of an outline in pixels as read, and its run lengths for `_mask`."""
    if not isinstance(outline, list):
        return int(outline[1::2].sum()) * math.prod(scaling.factors), outline
    from faster_coco_eval.core import mask as coco

    encoded = runs_of([scaling.corners(ring) for ring in outline], *scaling.read)
    return int(coco.area(encoded)), encoded


def _mask(runs: Any, scaling: Scaling) -> Bool[np.ndarray, "h w"]:
    """Return the pixels of run lengths: counts of the full resolution, or a polygon as read."""
    if isinstance(runs, np.ndarray):
        return scaling.reduced(mask_of(runs, scaling.full))
    return pixels_of(runs, *scaling.read)


# ------------------------------------------------------------------------------------------------------------ files


class DamagedLabels(DataError):
    """A file is damaged that may contain labels."""


def find_coco(folder: Path) -> tuple[list[Path], list[DataError]]:
    """Return the files in COCO's format in a folder, and the errors of its JSON files that are damaged."""
    found: list[Path] = []
    damaged: list[DataError] = []
    for path in sorted(folder.glob("*.json")):
        try:
            if is_coco(read_json(path, limit_bytes=None)):
                found.append(path)
        except DataError as error:
            damaged.append(error)
    return found, damaged


def write_label_maps_as_coco(path: Path, labelling: Labelling) -> int:
    """Write labels in COCO's format: an annotation for each class of an image, or for each of its instances."""
    things = [c for c, name in enumerate(labelling.classes) if name.lower() != BACKGROUND]
    ids = {label: category for category, label in enumerate(things, start=1)}

    def annotations() -> Iterator[dict[str, Any]]:
        for number, name in enumerate(labelling.sizes, start=1):
            for label, mask in labelling.masks(name, things):
                yield {"image_id": number, "category_id": ids[label], **mask_annotation(mask)}

    sizes = labelling.sizes.items()
    images = [{"file_name": name, "width": width, "height": height} for name, (height, width) in sizes]
    write_coco(path, images, [labelling.classes[c] for c in things], annotations())
    return 0


def is_coco(content: object) -> bool:
    """Whether the content of a JSON file is in COCO's format."""
    return isinstance(content, dict) and all(isinstance(content.get(key), list) for key in _NEEDED)


def is_number(value: object) -> bool:
    """Whether an entry is a finite number."""
    # Integers of JSON have any length, and the larger ones do not fit a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_ID


def _id(value: object) -> int | str | None:
    """Return an id or a whole number in one form for 1, 1.0 and "1"; None for other values."""
    if isinstance(value, str):
        text = value.strip()
        is_whole = text.isascii() and text.isdigit() and len(text) < 16 and str(int(text)) == text
        return int(text) if is_whole else text
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _LARGEST_ID else None
    return value


def _shown(value: object) -> str:
    """Return a value for a message, shortened."""
    return f"{value!r:.60}"
