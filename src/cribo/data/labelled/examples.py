"""Labelled examples on disk: images and label maps in one or two folders, or a COCO file."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cribo.base.colours import Colour
from cribo.base.errors import DataError
from cribo.base.files import require
from cribo.base.wording import enumerated
from cribo.data.labelled.coco import CocoLabels, find_coco
from cribo.data.labelled.inputs import Example
from cribo.data.labelled.label_maps import MASK_CLASSES, MASKS, ClassList, LabelValues, read_classes
from cribo.data.labelled.segmentation import LabelledFiles, LabelledFolder, by_stem, is_marked, other_annotations
from cribo.data.reading import EXTENSIONS
from cribo.data.sources.images import ImageFiles, list_files, open_images

CLASSES_FILE = "classes.txt"

_MARK = "_labels"  # suffix of the label map of an image
_VOC_IMAGES, _VOC_LABELS = "JPEGImages", ("SegmentationClassPNG", "SegmentationClass")
_LAYOUTS = (
    "a.jpg next to a.png or a_labels.png; images/a.jpg and labels/a.png; JPEGImages/a.jpg and SegmentationClass/a.png; "
    "or images and one COCO JSON file"
)


@dataclass(frozen=True)
class Examples:
    """Labelled images, read on access, and the names of their classes if known."""

    images: LabelledFiles | CocoLabels
    classes: list[str] | None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Example:
        images = self.images
        labels = images.label_map(index) if isinstance(images, LabelledFiles) else images.labels(index)
        return Example(images.path(index), labels, images.name(index))

    @property
    def new_classes(self) -> list[str] | None:
        """Names of the classes of a new memory; those of masks are background and foreground by default."""
        is_masks = isinstance(self.images, LabelledFiles) and self.images.coding == MASKS
        return list(MASK_CLASSES) if self.classes is None and is_masks else self.classes

    @property
    def palette(self) -> list[Colour] | None:
        """Colours of the classes; None for those of the label maps."""
        images = self.images
        if isinstance(images, CocoLabels):
            return list(images.palette)
        return None if isinstance(images.coding, LabelValues) else list(images.coding.classes)


def find_examples(
    source: str | Path,
    *,
    labels: str | Path | None = None,
    classes: str | Path | None = None,
    known_classes: int | None = None,
) -> Examples:
    """Find the examples in a folder in any of four layouts, or with labels in another place.

    Args:
        source: the folder; with `labels`, any source that `open_images` accepts.
        labels: folder of label maps, `a/b.png` for the image `a/b.jpg`; or a file in COCO format.
        classes: text file with the names of the classes; by default `classes.txt` in the folder.
        known_classes: number of classes of earlier examples; unless there are two, 255 in masks of 0 and 255 means no
            class.

    Raises:
        DataError: there are no examples, images without labels, labels without images, a damaged file or several files
            of annotations; or `classes` is given for annotations that define their own.
    """
    folder = Path(source).expanduser()
    require(folder)
    masks = known_classes in (None, len(MASK_CLASSES))
    if labels is not None:
        labels = Path(labels).expanduser()
        require(labels)
        if labels.is_file():
            return _of_coco(CocoLabels(labels, folder), classes)
        classes = classes or _class_file(folder) or _class_file(labels)
        return _of_folders(folder, labels, classes, masks=masks)
    if not folder.is_dir():
        if folder.suffix.lower() == ".json":
            raise DataError(f"{folder} is a file: give the folder of its images, and the file with --labels")
        raise DataError(f"{folder} is a file: give the folder of its label maps with --labels, or give a folder")
    annotations, damaged = find_coco(folder)
    if annotations and damaged:
        raise damaged[0]
    if len(annotations) > 1:
        names = ", ".join(path.name for path in annotations)
        raise DataError(f"{folder} contains several annotation files ({names}): choose one with --labels")
    if annotations:
        return _of_coco(CocoLabels(annotations[0]), classes)
    classes = classes or _class_file(folder)
    if (folder / "images").is_dir() and (folder / "labels").is_dir():
        return _of_folders(folder / "images", folder / "labels", classes, masks=masks)
    voc_labels = next((folder / name for name in _VOC_LABELS if (folder / name).is_dir()), None)
    if voc_labels is not None and (folder / _VOC_IMAGES).is_dir():
        return _of_voc(folder / _VOC_IMAGES, voc_labels, classes, masks=masks)
    try:
        return _side_by_side(folder, classes, masks=masks)
    except DataError as error:
        if damaged:
            raise damaged[0] from error
        raise


def _class_file(folder: Path) -> Path | None:
    path = folder / CLASSES_FILE
    return path if path.is_file() else None


def _of_coco(coco: CocoLabels, classes: str | Path | None) -> Examples:
    if classes is not None:
        raise DataError(f"--classes {classes} cannot be used with COCO annotations, which define their own classes")
    return Examples(coco, coco.classes)


def _of_folders(images: Path, labels: Path, classes: str | Path | None, *, masks: bool) -> Examples:
    found = LabelledFolder(images, labels, classes, masks=masks)
    if images.is_dir():
        _require_images(_maps_in(labels), by_stem(found.names, EXTENSIONS), labels, images)
    return Examples(found, None if classes is None else found.classes)


def _of_voc(images: Path, labels: Path, classes: str | Path | None, *, masks: bool) -> Examples:
    """Find examples in the folders of Pascal VOC, in which most images have no labels."""
    maps, found = _maps_in(labels), by_stem(open_images(images).names, EXTENSIONS)
    if not maps:
        there = sorted(path.name for path in labels.iterdir())
        raise DataError(f"no label maps in {labels}: they must be PNG, got {enumerated(there) or 'no files'}")
    _require_images(maps, found, labels, images)
    files = ImageFiles(images, (found[stem] for stem in maps))
    return _of_files(files, labels, [*maps.values()], classes, masks=masks)


def _side_by_side(folder: Path, classes: str | Path | None, *, masks: bool) -> Examples:
    files = list(list_files(folder, EXTENSIONS))
    if not files:
        open_images(folder)  # raises an error that describes the folder
    maps = by_stem((name for name in files if name.lower().endswith(f"{_MARK}.png")), [f"{_MARK}.png"])
    others = [name for name in files if name not in maps.values()]
    pictures = [name for name in others if not name.lower().endswith(".png")]
    plain = by_stem((name for name in others if name.lower().endswith(".png")), [".png"])
    images = by_stem(pictures, EXTENSIONS)
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
    found = ImageFiles(folder, (images[stem] for stem in stems))
    return _of_files(found, folder, [maps[stem] for stem in stems], classes, masks=masks)


def _maps_in(folder: Path) -> dict[str, str]:
    return by_stem(list_files(folder, [".png"]), [".png"])


def _require_images(maps: Iterable[str], images: Mapping[str, str], labels: Path, folder: Path) -> None:
    """Raise DataError for a label map without an image."""
    for stem in maps:
        if stem not in images:
            near = next((image for image in images if is_marked(stem, image)), None)
            advice = "" if near is None else f", but {images[near]}: give the label map its name, {near}.png"
            raise DataError(f"the labels {labels / stem}.png have no image: {folder} does not contain {stem}{advice}")


def _of_files(
    images: ImageFiles, folder: Path, maps: list[str], classes: str | Path | None, *, masks: bool
) -> Examples:
    listed = ClassList([]) if classes is None else read_classes(classes)
    files = LabelledFiles(images, folder, maps, classes=listed.names, coding=listed.colours, masks=masks)
    return Examples(files, listed.names or None)
