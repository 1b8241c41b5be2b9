"""Standard segmentation sets, read in their published layouts."""

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cribo.base.errors import DataError, MissingData
from cribo.base.files import read_lines, require
from cribo.base.wording import enumerated
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.labelled.formats import open_labels_of
from cribo.data.labelled.label_maps import CLASSES_FILE, class_indices, read_classes
from cribo.data.labelled.segmentation import LabelledExamples, LabelledFiles, by_stem, missing_labels
from cribo.data.labelled.sets import Layout, SegmentationSet, segmentation_set
from cribo.data.reading import EXTENSIONS
from cribo.data.sources.images import ImageFiles, composed, list_files


def open_segmentation(
    name: str,
    root: str | os.PathLike[str],
    split: str,
    *,
    partial: bool = False,
    reading: Reading = DEFAULT_READING,
) -> LabelledExamples:
    """Open one split of a segmentation set, as published.

    Opening lists folders but reads no images. The root may also be a folder inside the set, or the folder that
    contains the set. Images are sorted by name.

    Args:
        name: one of `SEGMENTATION_SETS`. `folder` is any other set with images in `images/<split>` and labels in any
            of `LABEL_FORMATS`: PNG maps of class indices (255: ignored) in `labels/<split>`, and optionally
            `classes.txt` with one name per line; or a file `labels/<split>.json` in COCO's format.
        root: the set's folder.
        split: one of the set's splits; for `folder` the name of its folders, or empty if it has no splits.
        partial: accept an incomplete split; every image must still have labels.
        reading: how images are read.

    Raises:
        MissingData: the root, a folder or a label map does not exist.
        DataError: unknown set or split, or the number of images differs from the published one.

    >>> val = open_segmentation("ade20k", "ADEChallengeData2016", "val")  # doctest: +SKIP
    >>> len(val), val.classes[0], val.name(0)  # doctest: +SKIP
    (2000, 'wall', 'ADE_val_00000001.jpg')
    """
    chosen = segmentation_set(name)
    root = Path(root).expanduser()
    if chosen.name == "folder":
        classes = root / CLASSES_FILE
        listed = classes if classes.exists() else None
        return open_labels_of(root / "images" / split, root / "labels" / split, listed, reading=reading)
    place = _locate(chosen, root, split)
    if place.missing:
        there = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        raise MissingData(
            f"{chosen.title} {split} is not in {place.base}: missing {' and '.join(place.missing)}; "
            f"expected {chosen.describe(split)}; folders in {root}: {enumerated(there) or 'none'}"
        )
    _check_class_file(chosen, place)
    images = by_stem(list_files(place.images, EXTENSIONS), place.layout.image_endings)
    ending, maps = _label_maps(place)
    listed = read_stems(place.list_file) if place.list_file else images.keys() | maps.keys()
    stems = sorted(listed)  # lists of different copies differ in order, and random draws depend on the index
    no_image = [stem for stem in stems if stem not in images]
    no_labels = [stem for stem in stems if stem not in maps]
    if partial:
        stems = [stem for stem in stems if stem in images]
        if not stems:
            expected = chosen.describe(split)
            raise DataError(f"{chosen.title} {split} has no images in {place.images}; expected {expected}")
        for stem in stems:
            if stem not in maps:
                raise missing_labels(images[stem], place.images, place.labels / f"{stem}{ending}")
    elif len(stems) != chosen.sizes[split] or no_image or no_labels:
        gaps = [place.images / f"{stem}{place.layout.image_endings[0]}" for stem in no_image]
        gaps += [place.labels / f"{stem}{ending}" for stem in no_labels]
        first = f"; {len(gaps)} missing, the first is {gaps[0]}" if gaps else ""
        raise DataError(
            f"{chosen.title} {split} in {place.base} must have {chosen.sizes[split]} images and as many label maps, "
            f"got {len(stems) - len(no_image)} images and {len(stems) - len(no_labels)} label maps{first}; "
            f"expected {chosen.describe(split)}; to use only part of the set, open it as partial"
        )
    return LabelledFiles(
        ImageFiles(place.images, (images[stem] for stem in stems), reading=reading),
        place.base,
        (maps[stem] for stem in stems),
        classes=chosen.classes,
        palette=chosen.palette,
        coding=chosen.values if place.layout.label_maps[ending] else class_indices(len(chosen.classes)),
    )


def default_splits(name: str, root: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the usual splits for retrieval, (memory, queries).

    The memory of Pascal VOC is `trainaug` if its list and label maps exist, else `train`.

    Raises DataError for an unknown set, MissingData if the root does not exist.
    """
    chosen = segmentation_set(name)
    root = Path(root).expanduser()
    require(root)
    *preferred, last = chosen.memory_splits
    return next((split for split in preferred if not _locate(chosen, root, split).missing), last), "val"


@dataclass(frozen=True)
class _Place:
    """Paths of a split, and descriptions of the missing ones."""

    layout: Layout
    base: Path
    images: Path
    labels: Path
    list_file: Path | None
    missing: tuple[str, ...]


def _locate(chosen: SegmentationSet, root: Path, split: str) -> _Place:
    """Find the most complete location of a split: the root, a usual folder below it, or a folder above it."""
    layouts = chosen.layouts_of(split)
    require(root)
    here = root.absolute()
    inner = (PurePosixPath(path).parts for each in layouts for path in each.paths((*each.images, *each.labels), split))
    above = [
        here.parents[depth - 1]
        for parts in inner
        for depth in range(1, len(parts) + 1)
        if here.parts[-depth:] == parts[:depth]
    ]
    bases = [root, *(root / folder for folder in chosen.folders), *above]
    places = (_look(layout, base, split) for base in bases for layout in layouts)
    return min(places, key=lambda place: len(place.missing))


def _look(layout: Layout, base: Path, split: str) -> _Place:
    missing: list[str] = []

    def first(what: str, templates: tuple[str, ...]) -> Path:
        names = layout.paths(templates, split)
        there = next((base / name for name in names if (base / name).exists()), None)
        if there is None:
            missing.append(f"{what} ({' or '.join(names)})")
        return there or base / names[0]

    images, labels = first("images", layout.images), first("label maps", layout.labels)
    list_file = first("list", layout.lists) if layout.lists else None
    return _Place(layout, base, images, labels, list_file, tuple(missing))


def _check_class_file(chosen: SegmentationSet, place: _Place) -> None:
    path = place.base / place.layout.class_file if place.layout.class_file else None
    if path and path.exists() and (names := read_classes(path).names) != chosen.classes:
        raise DataError(
            f"{path} must list the classes of {chosen.title} in order ({', '.join(chosen.classes)}), "
            f"got {', '.join(names)}; open a set with other classes as 'folder'"
        )


def _label_maps(place: _Place) -> tuple[str, dict[str, str]]:
    """Return the most frequent ending of label maps, and the paths of these maps below the base, by stem."""
    kinds = place.layout.label_maps
    # The longest ending matches first: x_labelTrainIds.png is not the map of an image x_labelTrainIds.
    longest_first = sorted(kinds, key=len, reverse=True)

    def maps_in(folder: Path) -> dict[str, dict[str, str]]:
        names: dict[str, list[str]] = {ending: [] for ending in kinds}
        for name in list_files(folder, [".png"]):
            ending = next((ending for ending in longest_first if name.endswith(ending)), None)
            if ending:
                names[ending].append(name)
        inner = folder.relative_to(place.base)
        return {
            ending: {stem: (inner / name).as_posix() for stem, name in by_stem(names[ending], [ending]).items()}
            for ending in kinds
        }

    maps = maps_in(place.labels)
    ending = max(kinds, key=lambda kind: len(maps[kind]))
    original = place.base / place.layout.original_labels if place.layout.original_labels else None
    return ending, maps[ending] | (maps_in(original)[ending] if original and original.is_dir() else {})


def read_stems(path: Path) -> set[str]:
    """Read the stems in an image list in Pascal VOC's format, or raise DataError.

    Each line is a name without folder and extension, or the paths of an image and its label map.
    """
    stems: set[str] = set()
    for number, line in read_lines(path, "a list of images"):
        names = {composed(PurePosixPath(part).stem) for part in line.split()}
        if len(names) > 1:
            raise DataError(
                f"{path}, line {number}: must be a name, or the paths of an image and its label map, got {line!r}"
            )
        stems |= names
    if not stems:
        raise DataError(f"{path} lists no images: put one name per line")
    return stems
