"""Labels in YOLO's format: a text file for each image, with a line for each polygon or box in shares of the image."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cribo.base.errors import DataError
from cribo.base.files import parse_yaml, read_lines, read_text, require, write_text
from cribo.data.labelled.label_maps import CLASSES_FILE, Labelling, read_classes
from cribo.data.labelled.regions import Region, RegionImage, RegionSet, things, trace
from cribo.data.labelled.writing import stems
from cribo.data.reading import EXTENSIONS, full_size
from cribo.data.sources.images import list_files

DATA = "data.yaml"
SPLITS = ("train", "val", "test")
_LISTS = (CLASSES_FILE, "obj.names")


def is_yolo(path: Path) -> bool:
    """Whether a file describes labels in YOLO's format: a data.yaml, or a list of classes beside images and labels."""
    if path.suffix.lower() in (".yaml", ".yml"):
        content = _parsed(path)
        return isinstance(content, Mapping) and "names" in content and any(split in content for split in SPLITS)
    folder = path.parent
    has_folders = path.name in _LISTS and (folder / "images").is_dir() and (folder / "labels").is_dir()
    return has_folders and any((folder / "labels").rglob("*.txt"))


def read_yolo(source: Path) -> RegionSet:
    """Read the labels that a data.yaml, or a list of classes beside `images` and `labels`, describes.

    Images without a text file are left out; an empty text file means that nothing is labelled.

    Raises:
        MissingData: a folder of images does not exist.
        DataError: the file does not name the classes, a line is not in this format, or a number is out of range.
    """
    require(source)
    folder = source.parent
    if source.suffix.lower() in (".yaml", ".yml"):
        names, splits = _described(source)
    else:
        names, splits = read_classes(source).names, {"": [folder / "images"]}
    found = RegionSet(source, [], [folder], classes=names)
    for split, places in splits.items():
        for place in places:
            require(place)
            for name in list_files(place, EXTENSIONS):
                image = place / name
                relative = image.relative_to(folder) if image.is_relative_to(folder) else image
                labels, files = _labels_of(image), (relative.as_posix(), name)
                if labels is None:
                    found.unlabelled.append(RegionImage(files, None, [], source, split=split))
                    continue
                size = full_size(image)
                regions = _read(labels, names, size, found)
                found.images.append(RegionImage(files, size, regions, labels, split=split))
    return found


def _parsed(path: Path) -> Any:
    try:
        return parse_yaml(read_text(path))
    except (DataError, ValueError, yaml.YAMLError):
        return None


def _described(source: Path) -> tuple[list[str], dict[str, list[Path]]]:
    """Return the classes of a data.yaml, and the folders of images of each split."""
    content = _parsed(source)
    names = content.get("names") if isinstance(content, Mapping) else None
    if isinstance(names, Mapping):
        numbers = sorted(names)
        if numbers != [*range(len(names))]:
            raise DataError(f"{source}: the numbers of names must be 0 to {len(names) - 1}, got {numbers[:10]}")
        names = [names[number] for number in numbers]
    if not isinstance(names, list) or not names:
        raise DataError(f"{source} must contain names, a list of the classes")
    base = source.parent
    stated = content.get("path")
    if isinstance(stated, str) and (candidate := (base / stated)).is_dir():
        base = candidate
    splits: dict[str, list[Path]] = {}
    for split in SPLITS:
        given = content.get(split)
        places = [given] if isinstance(given, str) else given if isinstance(given, list) else []
        # Datasets are moved together with their data.yaml, whose paths often begin with ../
        splits[split] = [_existing(base, str(place)) for place in places]
    return read_classes([str(name) for name in names]).names, {split: place for split, place in splits.items() if place}


def _existing(base: Path, place: str) -> Path:
    candidates = [base / place, base / place.removeprefix("../")]
    return next((path for path in candidates if path.is_dir()), candidates[0])


def _labels_of(image: Path) -> Path | None:
    """Return the text file of an image: below `labels` instead of the last `images`, or beside it."""
    parts = [*image.with_suffix(".txt").parts]
    beside = image.with_suffix(".txt")
    if "images" in parts[:-1]:
        place = len(parts) - 2 - parts[-2::-1].index("images")
        beside = Path(*parts[:place], "labels", *parts[place + 1 :])
    return next((path for path in (beside, image.with_suffix(".txt")) if path.is_file()), None)


def _read(path: Path, names: Sequence[str], size: tuple[int, int], found: RegionSet) -> list[Region]:
    """Return the regions of a text file."""
    if not path.stat().st_size:
        return []
    height, width = size
    regions: list[Region] = []
    for number, line in read_lines(path, "labels"):
        name = f"line {number} of {path.name}"
        try:
            label, *values = (float(part) for part in line.split())
        except ValueError:
            raise DataError(f"{path}: {name} must be numbers, got {line[:60]!r}") from None
        if not (label.is_integer() and 0 <= label < len(names)):
            raise DataError(f"{path}: the class in {name} must be 0 to {len(names) - 1}, got {line.split()[0]}")
        if any(not -0.1 <= value <= 1.1 for value in values):
            raise DataError(
                f"{path}: coordinates in {name} must be shares of the image, 0 to 1, got {max(values, key=abs):g}"
            )
        if len(values) == 4:
            x, y, w, h = values
            box = ((x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height)
            regions += found.boxed(names[int(label)], box, name=name)
        elif len(values) % 2:
            raise DataError(f"{path}: {name} must have a class, then x and y of each corner, or a box of four numbers")
        else:
            ring = [(x * width, y * height) for x, y in zip(values[::2], values[1::2], strict=True)]
            regions += found.outline(names[int(label)], ring, size=size, name=name)
    return regions


def write_yolo(folder: Path, labelling: Labelling) -> int:
    """Write a text file for each image and data.yaml; return the number of holes that are filled."""
    named, holes = things(labelling.classes), 0
    numbers = {label: number for number, label in enumerate(named)}
    for name, stem in stems(labelling.sizes).items():
        lines = []
        labels = labelling.labels(name).numpy()
        height, width = labels.shape
        for region in trace(labels, named, labelling.instances_of(name)):
            # Regions in holes are written later, and drawn on top.
            holes += region.holes_of(labels, named) if region.has_holes else 0
            shares = (np.array(region.rings[0]) / (width, height)).ravel()
            lines.append(" ".join([str(numbers[region.label]), *(f"{share:.7g}" for share in shares)]))
        split = labelling.task(name).split or "train"
        path = folder / "labels" / split / f"{stem}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(f"{line}\n" for line in lines))
    used = dict.fromkeys(labelling.task(name).split or "train" for name in labelling.sizes)
    listed = "".join(f"{split}: images/{split}\n" for split in used)
    write_text(
        folder / DATA, f"{listed}names:\n" + "".join(f"  {n}: {_quoted(c)}\n" for n, c in enumerate(named.values()))
    )
    return holes


def _quoted(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"
