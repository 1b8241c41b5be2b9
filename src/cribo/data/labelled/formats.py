"""Formats of labels on disk: one table, used by examples of segmentation, labelled sets and results."""

import glob
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from cribo.base.errors import DataError, InputError
from cribo.base.files import read_json, require
from cribo.data.config import DEFAULT_READING, LabelFormatName, Reading
from cribo.data.labelled.coco import CocoLabels, DamagedLabels, is_coco, write_label_maps_as_coco
from cribo.data.labelled.cvat import is_cvat, read_cvat, read_root, write_cvat
from cribo.data.labelled.geojson import is_geojson, read_geojson, write_geojson
from cribo.data.labelled.georeferenced import write_geojson_in_degrees, write_geotiff
from cribo.data.labelled.label_maps import CLASSES_FILE, MASK_CLASSES, Labelling
from cribo.data.labelled.label_studio import is_label_studio, read_label_studio
from cribo.data.labelled.label_studio_writing import write_label_studio
from cribo.data.labelled.labelme import is_labelme, read_labelme, write_labelme
from cribo.data.labelled.map_layouts import find_label_maps
from cribo.data.labelled.regions import RegionLabels
from cribo.data.labelled.renaming import ENDINGS, RenamedExamples, read_mapping
from cribo.data.labelled.segmentation import LabelledExamples, LabelledFolder
from cribo.data.labelled.voc import is_voc_annotation, read_voc, write_voc
from cribo.data.labelled.yolo import is_yolo, read_yolo, write_yolo

log = logging.getLogger("cribo")

Reader = Callable[[Path, list[Path], Path | None], LabelledExamples]
"""Reads labels: the file or folder that the user named, the files in it, and the folder of the images or None."""


class LabelFile:
    """A file that may have labels, parsed once for all formats.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def json(self) -> Any:
        """Content of a JSON file; raises DataError if it is damaged."""
        return read_json(self.path, limit_bytes=None)

    @cached_property
    def xml(self) -> Any:
        """Root of an XML file; raises DataError if it is damaged."""
        return read_root(self.path)


@dataclass(frozen=True)
class LabelFormat:
    """A row of the table of label formats.

    Attributes:
        title: for messages.
        endings: of the names of its files.
        recognises: whether a file with one of these endings is in this format.
        read: reads the files.
        write: writes labels to a file or folder, and returns the number of holes that the format cannot hold; None if
            results are not written in this format.
        written: name of that file or folder.
        per_image: whether each image has a file of its own.
        on_map: whether labels are written in the coordinates of a map, which the images must have.
    """

    title: str
    endings: tuple[str, ...]
    recognises: Callable[[LabelFile], bool]
    read: Reader | None
    write: Callable[[Path, Labelling], int] | None = None
    written: str = ""
    per_image: bool = False
    on_map: bool = False


def _single(read: Callable[[Path, Path | None], LabelledExamples]) -> Reader:
    """Return the reader of a format with one file for all images."""

    def opened(source: Path, files: list[Path], images: Path | None) -> LabelledExamples:
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise DataError(f"{source} contains several annotation files ({names}): choose one with --labels")
        return read(files[0], images)

    return opened


LABEL_FORMATS = {
    "coco": LabelFormat(
        "COCO annotations",
        (".json",),
        lambda file: is_coco(file.json),
        _single(lambda file, images: CocoLabels(file, images)),
        write_label_maps_as_coco,
        "coco.json",
    ),
    "yolo": LabelFormat(
        "YOLO labels",
        (".yaml", ".yml", ".txt", ".names"),
        lambda file: is_yolo(file.path),
        _single(lambda file, images: RegionLabels(read_yolo(file), images)),
        write_yolo,
        "yolo",
    ),
    "cvat": LabelFormat(
        "CVAT annotations",
        (".xml",),
        lambda file: is_cvat(file.xml),
        _single(lambda file, images: RegionLabels(read_cvat(file), images)),
        write_cvat,
        "cvat.xml",
    ),
    "label-studio": LabelFormat(
        "tasks of Label Studio",
        (".json",),
        lambda file: is_label_studio(file.json),
        _single(lambda file, images: RegionLabels(read_label_studio(file), images)),
        write_label_studio,
        "label-studio.json",
    ),
    "labelme": LabelFormat(
        "LabelMe files",
        (".json",),
        lambda file: is_labelme(file.json),
        lambda source, files, images: RegionLabels(read_labelme(source, files), images),
        write_labelme,
        "labelme",
        per_image=True,
    ),
    "geojson": LabelFormat(
        "GeoJSON files",
        (".geojson", ".json"),
        lambda file: is_geojson(file.json),
        lambda source, files, images: RegionLabels(read_geojson(source, files), images),
        write_geojson,
        "geojson",
        per_image=True,
    ),
    "voc": LabelFormat(
        "boxes of Pascal VOC",
        (".xml",),
        lambda file: is_voc_annotation(file.xml),
        lambda source, files, images: RegionLabels(read_voc(source, files), images),
        write_voc,
        "voc",
        per_image=True,
    ),
    "geotiff": LabelFormat(
        "GeoTIFF", (), lambda file: False, None, write_geotiff, "geotiff", per_image=True, on_map=True
    ),
    "geojson-wgs84": LabelFormat(
        *("GeoJSON in degrees", (), lambda file: False, None, write_geojson_in_degrees, "geojson-wgs84"),
        per_image=True,
        on_map=True,
    ),
    "maps": LabelFormat("label maps", (), lambda file: False, None),
}
"""All formats of labels, recognised by the content of files; what has none of the others is label maps."""


def open_labels_of(
    images: str | os.PathLike[str],
    labels: str | os.PathLike[str],
    classes: str | os.PathLike[str] | None = None,
    *,
    reading: Reading = DEFAULT_READING,
) -> LabelledExamples:
    """Open images with the labels in another folder, or in a file.

    Args:
        images: any source that `open_images` accepts; a folder unless the labels are label maps.
        labels: folder, or path of a folder or file without its suffix.
        classes: text file with the names of the classes, for label maps.
        reading: how images are read.

    Raises:
        MissingData: a folder or file does not exist.
        DataError: see the readers of the formats.
    """
    place = Path(labels).expanduser()
    if not place.is_dir():
        files = sorted(file for file in place.parent.glob(f"{glob.escape(place.name)}.*") if file.is_file())
        place = next((file for file in files if _rows_of(file)), place)
    found = _opened(Path(images).expanduser(), place, None if classes is None else Path(classes), None, True, reading)
    found.reading = reading
    return found


def find_examples(
    source: str | Path,
    *,
    labels: str | Path | None = None,
    classes: str | Path | None = None,
    known_classes: int | None = None,
    label_format: str | None = None,
    reading: Reading = DEFAULT_READING,
) -> LabelledExamples:
    """Find the examples in a folder in a layout of any format, or with labels in another place.

    Args:
        source: the folder; with `labels`, any source that `open_images` accepts.
        labels: folder or file of labels in one of `LABEL_FORMATS`; of label maps, `a/b.png` for the image `a/b.jpg`.
        classes: text file with the names of the classes, by default `classes.txt` in the folder; or a YAML file that
            maps names in the labels to names, which merges, renames or ignores classes of any format.
        known_classes: number of classes of earlier examples; unless there are two, 255 in masks of 0 and 255 means no
            class.
        label_format: one of `LABEL_FORMATS`; recognised by the content of the files by default.
        reading: how images are read.

    Raises:
        DataError: there are no examples, images without labels, labels without images, a damaged file, or files of
            several formats; or `classes` is given for annotations that define their own.
    """
    if label_format is not None and label_format not in (known := get_args(LabelFormatName)):
        raise InputError(f"--format must be one of {', '.join(known)}, got {label_format!r}")
    folder = Path(source).expanduser()
    require(folder)
    masks = known_classes in (None, len(MASK_CLASSES))
    mapping, listed = _mapping_or_list(classes)
    renamed = None if mapping is None else read_mapping(mapping)
    if labels is not None:
        place = Path(labels).expanduser()
        require(place)
        found = _opened(folder, place, listed, label_format, masks, reading)
    elif folder.is_dir():
        found = _found(folder, listed, label_format, masks, reading)
    elif label_format is not None or _recognised_file(folder) is not None:
        found = _read(folder, [folder], None, _format_of(folder, label_format), listed)
    else:
        raise DataError(f"{folder} is a file: give the folder of its label maps with --labels, or give a folder")
    found.reading = reading
    if mapping is not None and renamed is not None:
        found = RenamedExamples(found, renamed, mapping)
    found.require_images()
    return found


def find_maps(folder: str | Path, *, classes: str | Path | None = None) -> LabelledExamples:
    """Find label maps without their images, such as those of frames in a video file; each is its own image.

    Args:
        folder: PNGs of class indices, masks, or colours that `classes` lists.
        classes: see `find_examples`.

    Raises:
        DataError: there are no label maps, or other images.
    """
    place = Path(folder).expanduser()
    mapping, listed = _mapping_or_list(classes)
    found = LabelledFolder(place, place, listed or _class_file(place))
    return found if mapping is None else RenamedExamples(found, read_mapping(mapping), mapping)


def _mapping_or_list(classes: str | Path | None) -> tuple[Path | None, Path | None]:
    """Return the file `classes` as (mapping, None) or (None, list), by its extension."""
    if classes is None:
        return None, None
    file = Path(classes)
    return (file, None) if file.suffix.lower() in ENDINGS else (None, file)


def _opened(
    images: Path, labels: Path, classes: Path | None, label_format: str | None, masks: bool, reading: Reading
) -> LabelledExamples:
    """Open images with labels in another place."""
    if labels.is_file():
        found = _read(labels, [labels], images, _format_of(labels, label_format), classes)
    else:
        chosen, files = _recognised(labels, label_format) if labels.is_dir() else ("maps", [])
        if chosen == "maps" or (
            label_format is None and LABEL_FORMATS[chosen].per_image and any(labels.rglob("*.png"))
        ):
            listed = classes or _class_file(images) or _class_file(labels)
            found = LabelledFolder(images, labels, listed, masks=masks, reading=reading)
        else:
            found = _read(labels, files, images, chosen, classes)
    return found


def _found(
    folder: Path, classes: Path | None, label_format: str | None, masks: bool, reading: Reading
) -> LabelledExamples:
    """Return the labelled images of a folder."""
    damaged: DataError | None = None
    try:
        chosen, files = _recognised(folder, label_format)
    except DamagedLabels as error:
        damaged, chosen, files = error, "maps", []
    row = LABEL_FORMATS[chosen]
    if row.read is not None and (label_format is not None or not row.per_image):
        return _read(folder, files, None, chosen, classes)
    try:
        maps = find_label_maps(folder, classes or _class_file(folder), masks, reading=reading)
    except DataError as error:
        if row.read is not None:
            return _read(folder, files, None, chosen, classes)
        raise damaged or error from error
    if row.read is not None:
        log.info("%s has both label maps and %s: using the label maps", folder, row.title)
    return maps


def _read(source: Path, files: list[Path], images: Path | None, chosen: str, classes: Path | None) -> LabelledExamples:
    """Read files that define their own classes."""
    row = LABEL_FORMATS[chosen]
    if row.read is None:
        raise DataError(f"{source} is not a folder of label maps: give their folder, or another --format")
    if classes is not None:
        raise DataError(f"--classes {classes} cannot be used with {row.title}, which define their own classes")
    return row.read(source, files, images)


def _format_of(file: Path, label_format: str | None) -> str:
    """Return the format of a file, as asked for or recognised."""
    if label_format is not None:
        return label_format
    found = _recognised_file(file)
    if found is None:
        raise DataError(
            f"{file} has no labels of a known format: {', '.join(each.title for each in LABEL_FORMATS.values())}"
        )
    return found


def _recognised(folder: Path, label_format: str | None) -> tuple[str, list[Path]]:
    """Return the format of the labels in a folder, and their files; label maps if there are no others.

    Raises:
        DamagedLabels: no file has labels of a known format, but one is damaged.
        DataError: there are files of several formats, or damaged ones among others.
    """
    found: dict[str, list[Path]] = {}
    damaged: list[DataError] = []
    for path in sorted(path for path in folder.rglob("*") if _rows_of(path) and path.is_file()):
        in_folder = path.parent == folder  # the files of formats with one for all images are not searched below it
        try:
            name = _recognised_file(path)
        except DataError as error:
            damaged += [error] if in_folder or any(LABEL_FORMATS[each].per_image for each in found) else []
        else:
            if name is not None and (in_folder or LABEL_FORMATS[name].per_image):
                found.setdefault(name, []).append(path)
    if label_format is not None:
        if label_format != "maps" and label_format not in found:
            raise DataError(
                f"{folder} has no {LABEL_FORMATS[label_format].title}: choose another --format, or another folder"
            )
        return label_format, found.get(label_format, [])
    if len(found) > 1:
        names = ", ".join(f"{paths[0].name} ({LABEL_FORMATS[name].title})" for name, paths in found.items())
        raise DataError(f"{folder} has labels of several formats, {names}: choose one with --format")
    if damaged and not found:
        raise DamagedLabels(str(damaged[0])) from damaged[0]
    if damaged:
        raise damaged[0]
    return next(iter(found.items()), ("maps", []))


def _recognised_file(path: Path) -> str | None:
    """Return the format of a file; None if it has no labels. Raises DataError for a damaged file."""
    file = LabelFile(path)
    return next((name for name, row in _rows_of(path).items() if row.recognises(file)), None)


def _rows_of(path: Path) -> dict[str, LabelFormat]:
    """Return the formats whose files have the ending of this one."""
    return {name: row for name, row in LABEL_FORMATS.items() if path.suffix.lower() in row.endings}


def _class_file(folder: Path) -> Path | None:
    path = folder / CLASSES_FILE
    return path if path.is_file() else None


def written_formats(names: Sequence[str]) -> list[LabelFormat]:
    """Return the formats of results by name.

    Raises:
        InputError: a name is not one of a format that can be written.
    """
    known = [name for name, row in LABEL_FORMATS.items() if row.write is not None]
    for name in names:
        if name not in known:
            raise InputError(f"--write must be one or more of {', '.join(known)}, got {name!r}")
    return [LABEL_FORMATS[name] for name in dict.fromkeys(names)]
