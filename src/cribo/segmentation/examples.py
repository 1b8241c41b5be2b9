"""Labelled examples on disk: images and label maps in one or two folders, or a COCO file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cribo.data.coco import CocoLabels, is_coco
from cribo.data.images import EXTENSIONS, DataError, list_files, open_images, require
from cribo.data.segmentation import Colour, LabelledFolder, by_stem, class_names
from cribo.segmentation.memory import Example

CLASSES_FILE = "classes.txt"

_MARK = "_labels"  # suffix of the label map of an image
_LAYOUTS = "a.jpg next to a.png or a_labels.png; images/a.jpg and labels/a.png; or images and one COCO JSON file"


@dataclass(frozen=True)
class Examples:
    """Labelled images, read on access.

    Attributes:
        names: names of the images.
        classes: names of the classes; None if unknown.
        palette: colours of the classes; None for those of the label maps.
        example: function that returns the example with an index.
    """

    names: Sequence[str]
    classes: list[str] | None
    palette: list[Colour] | None
    example: Callable[[int], Example]

    def __len__(self) -> int:
        return len(self.names)


def find_examples(
    source: str | Path, *, labels: str | Path | None = None, classes: str | Path | None = None
) -> Examples:
    """Find the examples in a folder in any of three layouts, or with labels in another place.

    Args:
        source: the folder; with `labels`, any source that `open_images` accepts.
        labels: folder of label maps, `a/b.png` for the image `a/b.jpg`; or a file in COCO format.
        classes: text file with the names of the classes; by default `classes.txt` in the folder.

    Raises:
        DataError: there are no examples, images without labels, labels without images, or several annotation files; or
            `classes` is given for annotations that define their own.
    """
    folder = Path(source).expanduser()
    require(folder)
    if labels is not None:
        labels = Path(labels).expanduser()
        require(labels)
        if labels.is_file():
            return _of_coco(CocoLabels(labels, folder), classes)
        return _of_folders(folder, labels, classes or _class_file(folder) or _class_file(labels))
    if not folder.is_dir():
        raise DataError(f"{folder} is a file: give the folder of its label maps with --labels, or give a folder")
    annotations = [path for path in sorted(folder.glob("*.json")) if is_coco(path)]
    if len(annotations) > 1:
        names = ", ".join(path.name for path in annotations)
        raise DataError(f"{folder} contains several annotation files ({names}): choose one with --labels")
    if annotations:
        return _of_coco(CocoLabels(annotations[0]), classes)
    if (folder / "images").is_dir() and (folder / "labels").is_dir():
        return _of_folders(folder / "images", folder / "labels", classes or _class_file(folder))
    return _side_by_side(folder, classes or _class_file(folder))


def _class_file(folder: Path) -> Path | None:
    path = folder / CLASSES_FILE
    return path if path.is_file() else None


def _of_coco(coco: CocoLabels, classes: str | Path | None) -> Examples:
    if classes is not None:
        raise DataError(f"--classes {classes} cannot be used with COCO annotations, which define their own classes")

    def example(index: int) -> Example:
        return Example(coco.path(index), coco.labels(index), coco.name(index))

    return Examples([*coco.names], coco.classes, coco.palette, example)


def _of_folders(images: Path, labels: Path, classes: str | Path | None) -> Examples:
    names = None if classes is None else class_names(classes)
    found = LabelledFolder(images, labels, names)
    stems = by_stem(found.names, EXTENSIONS)
    for stem in by_stem(list_files(labels, [".png"]), [".png"]):
        if images.is_dir() and stem not in stems:
            raise DataError(f"the labels {labels / stem}.png have no image: {images} does not contain {stem}")

    def example(index: int) -> Example:
        return Example(found.path(index), found.label_path(index), found.name(index))

    return Examples([*found.names], names, None, example)


def _side_by_side(folder: Path, classes: str | Path | None) -> Examples:
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
            raise DataError(
                f"the image {name} has no labels: {folder} contains neither {stem}.png nor {stem}{_MARK}.png; "
                f"supported layouts: {_LAYOUTS}"
            )
    for stem, name in maps.items():
        if stem not in images:
            raise DataError(f"the labels {name} have no image: {folder} does not contain {stem}")
    stems = sorted(images)

    def example(index: int) -> Example:
        stem = stems[index]
        return Example(folder / images[stem], folder / maps[stem], images[stem])

    names = None if classes is None else class_names(classes)
    return Examples([images[stem] for stem in stems], names, None, example)


def open_targets(source: str, *, apart_from: Path | None = None) -> tuple[Path, list[str]]:
    """Find the images to label: a folder, a glob, a text file that lists images, or one image.

    Args:
        source: such as `frames`, `frames/**/*.jpg`, `list.txt` or `frame.jpg`.
        apart_from: a folder to exclude, such as the output folder.

    Returns:
        A folder, and the sorted paths of the images relative to it.

    Raises:
        DataError: there are no images, or two images whose results would have the same name.
    """
    path = Path(source).expanduser()
    if path.is_file() and path.suffix.lower() in EXTENSIONS:
        folder, names = path.parent, [path.name]
    elif not path.exists() and any(sign in source for sign in "*?["):
        folder, names = _of_glob(path)
        if not names:
            raise DataError(f"no images match {source}: searched {folder.absolute()} for {' '.join(EXTENSIONS)}")
    else:
        found = open_images(path)
        folder, names = Path(found.folder), [*found.names]
    if apart_from is not None:
        own = apart_from.absolute()
        names = [name for name in names if own not in (folder / name).absolute().parents]
        if not names:
            raise DataError(f"all images of {source} are in {apart_from}, the output folder: choose another --out")
    outside = next((name for name in names if Path(name).is_absolute() or ".." in Path(name).parts), None)
    if outside is not None:
        raise DataError(f"{source} lists {outside}, which is outside {folder}: list paths relative to {folder}")
    by_stem(names, EXTENSIONS)
    return folder, names


def _of_glob(pattern: Path) -> tuple[Path, list[str]]:
    """Return the folder above the first wildcard, and the matching images relative to it."""
    first = next(number for number, part in enumerate(pattern.parts) if any(sign in part for sign in "*?["))
    folder = Path(*pattern.parts[:first])
    rest = str(Path(*pattern.parts[first:]))
    found = sorted(path for path in folder.glob(rest) if path.suffix.lower() in EXTENSIONS and path.is_file())
    return folder, [path.relative_to(folder).as_posix() for path in found]
