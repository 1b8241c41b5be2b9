"""Layouts of images and label maps in a folder: beside each other, in two folders, or Pascal VOC's."""

from pathlib import Path

from cribo.base.errors import DataError
from cribo.base.wording import enumerated
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.labelled.label_maps import ClassList, read_classes
from cribo.data.labelled.segmentation import (
    LabelledFiles,
    LabelledFolder,
    by_stem,
    label_maps_in,
    other_annotations,
    require_images,
)
from cribo.data.reading import EXTENSIONS
from cribo.data.sources.images import ImageFiles, by_pages, list_files, open_images

_MARK = "_labels"  # suffix of the label map of an image
_VOC_IMAGES, _VOC_LABELS = "JPEGImages", ("SegmentationClassPNG", "SegmentationClass")
_LAYOUTS = (
    "a.jpg next to a.png or a_labels.png; images/a.jpg and labels/a.png; JPEGImages/a.jpg and SegmentationClass/a.png; "
    "or images and one COCO JSON file"
)


def find_label_maps(
    folder: Path, classes: Path | None, masks: bool, *, reading: Reading = DEFAULT_READING
) -> LabelledFiles:
    """Open the images and label maps of a folder in one of three layouts (see `LabelledFolder` for the arguments).

    Raises:
        DataError: the folder has no images, images without labels, or labels without images.
    """
    if (folder / "images").is_dir() and (folder / "labels").is_dir():
        return LabelledFolder(folder / "images", folder / "labels", classes, masks=masks, reading=reading)
    voc_labels = next((folder / name for name in _VOC_LABELS if (folder / name).is_dir()), None)
    if voc_labels is not None and (folder / _VOC_IMAGES).is_dir():
        return _in_voc(folder / _VOC_IMAGES, voc_labels, classes, masks, reading)
    return _side_by_side(folder, classes, masks, reading)


def _in_voc(images: Path, labels: Path, classes: Path | None, masks: bool, reading: Reading) -> LabelledFiles:
    """Open the labelled images in the folders of Pascal VOC, in which most images have no labels."""
    maps, found = label_maps_in(labels), by_stem(open_images(images, reading=reading).names, EXTENSIONS)
    if not maps:
        there = sorted(path.name for path in labels.iterdir())
        raise DataError(f"no label maps in {labels}: they must be PNG, got {enumerated(there) or 'no files'}")
    require_images(maps, found, labels, images)
    files = ImageFiles(images, (found[stem] for stem in maps), reading=reading)
    return _opened(files, labels, [*maps.values()], classes, masks)


def _side_by_side(folder: Path, classes: Path | None, masks: bool, reading: Reading) -> LabelledFiles:
    files = list(list_files(folder, EXTENSIONS))
    if not files:
        open_images(folder)  # raises an error that describes the folder
    maps = by_stem((name for name in files if name.lower().endswith(f"{_MARK}.png")), [f"{_MARK}.png"])
    others = [name for name in files if name not in maps.values()]
    pictures = [name for name in others if not name.lower().endswith(".png")]
    plain = by_stem((name for name in others if name.lower().endswith(".png")), [".png"])
    images = by_stem(by_pages(ImageFiles(folder, pictures, reading=reading)).names, EXTENSIONS)
    for stem, name in plain.items():
        if stem in images:
            if stem in maps:
                raise DataError(f"{images[stem]} has two label maps in {folder}, {name} and {maps[stem]}: remove one")
            maps[stem] = name
        else:
            images[stem] = name
    for stem, name in images.items():
        if stem not in maps:
            instead = other_annotations(folder / name, folder / f"{stem}.png")
            marked = f"{stem}{_MARK}.png"
            lacking = f"contains neither {stem}.png nor {marked}"
            raise DataError(
                f"the image {name} has no labels: {folder} "
                + (f"does not contain {marked}" if name == f"{stem}.png" else lacking)
                + (instead or f"; supported layouts: {_LAYOUTS}; or give the folder of the label maps with --labels")
            )
    for stem, name in maps.items():
        if stem not in images:
            raise DataError(f"the labels {name} have no image: {folder} does not contain {stem}")
    stems = sorted(images)
    found = ImageFiles(folder, (images[stem] for stem in stems), reading=reading)
    return _opened(found, folder, [maps[stem] for stem in stems], classes, masks)


def _opened(images: ImageFiles, folder: Path, maps: list[str], classes: Path | None, masks: bool) -> LabelledFiles:
    listed = ClassList([]) if classes is None else read_classes(classes)
    return LabelledFiles(images, folder, maps, classes=listed.names, coding=listed.colours, masks=masks)
