"""Pairs of images with corresponding keypoints, in the format of SPair-71k."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cribo.base.errors import DataError, MissingData
from cribo.base.files import path_inside, read_json, require
from cribo.data.config import spread
from cribo.data.labelled.coco import is_number
from cribo.data.labelled.segmentation import UnlabelledFiles
from cribo.data.reading import image_size

SPAIR_SIZES = {"trn": 53_340, "val": 5_384, "test": 12_234}
"""Pairs of each split of SPair-71k."""

_NEEDED = ("src_imname", "trg_imname", "src_kps", "trg_kps", "trg_bndbox")


@dataclass(frozen=True)
class Pair:
    """Two images of objects of one category, with corresponding keypoints.

    Attributes:
        name: file name without extension.
        category: of the objects.
        source, target: indices of the images.
        source_points: (k, 2), x and y in pixels.
        target_points: (k, 2), the corresponding points in the target.
        box: left, top, right and bottom of the object in the target, in pixels.
    """

    name: str
    category: str
    source: int
    target: int
    source_points: Float[Tensor, "k 2"]
    target_points: Float[Tensor, "k 2"]
    box: tuple[float, float, float, float]


class PairedImages(UnlabelledFiles):
    """Pairs of images with corresponding keypoints; implements `LabelledImages` with all pixels ignored.

    `categories` are the categories of the pairs, sorted.
    """

    def __init__(self, folder: Path, names: Sequence[str], pairs: Sequence[Pair]) -> None:
        super().__init__(folder, names)
        self.pairs = list(pairs)
        self.categories = sorted({pair.category for pair in pairs})


def open_pairs(
    root: str | os.PathLike[str], split: str | None = None, *, partial: bool = False, limit: int | None = None
) -> PairedImages:
    """Open SPair-71k, or a custom folder with files in its format.

    SPair-71k has `PairAnnotation/<split>/*.json` and `JPEGImages/<category>`; a custom folder has `pairs/*.json` and
    `images`. Each file describes one pair: `src_imname`, `trg_imname`, `src_kps` and `trg_kps` (lists of x and y in
    pixels, in the same order), `trg_bndbox` (left, top, right, bottom) and `category`; other keys are ignored.

    Args:
        root: the folder.
        split: split of SPair-71k: trn, val or test, by default test; None for a custom folder.
        partial: accept SPair-71k with missing pairs.
        limit: use only this many pairs, evenly spaced in the list of files.

    Raises:
        MissingData: a folder or image does not exist.
        DataError: unknown layout, missing pairs, or an invalid file, such as one with keypoints outside the image.
    """
    root = Path(root).expanduser()
    require(root)
    if (root / "PairAnnotation").is_dir():
        split = split or "test"
        if split not in SPAIR_SIZES:
            raise DataError(f"split must be {', '.join(SPAIR_SIZES)}, got {split!r}")
        annotations, images = root / "PairAnnotation" / split, root / "JPEGImages"
    elif (root / "pairs").is_dir():
        if split is not None:
            raise DataError(f"{root} has no splits, got {split!r}: omit data.split")
        annotations, images = root / "pairs", root / "images"
    else:
        raise DataError(
            f"{root} must contain PairAnnotation and JPEGImages (SPair-71k), or pairs/*.json and images (custom data)"
        )
    for folder in (annotations, images):
        require(folder)
    files = sorted(annotations.glob("*.json"))
    if not files:
        raise DataError(f"no *.json files in {annotations}: each pair needs one")
    if split is not None and len(files) != SPAIR_SIZES[split] and not partial:
        raise DataError(
            f"{annotations} must have the {SPAIR_SIZES[split]:,} pairs of SPair-71k, got {len(files):,}: complete it, "
            "or accept it with --data.partial"
        )
    if limit is not None:
        files = [files[place] for place in spread(len(files), limit)]
    return _read_pairs(files, images, in_categories=split is not None)


def _read_pairs(files: Sequence[Path], images: Path, *, in_categories: bool) -> PairedImages:
    size_of = cache(lambda name: image_size(str(images / name)))
    numbers: dict[str, int] = {}
    pairs: list[Pair] = []
    for file in files:
        content = _read(file)
        category = str(content.get("category", "object"))
        folder = f"{category}/" if in_categories else ""
        names = [f"{folder}{content[key]}" for key in ("src_imname", "trg_imname")]
        for name in names:
            if not path_inside(images, name, source=file, follow_links=True).is_file():
                raise MissingData(f"{file} refers to the image {name}, which is not in {images}")
        points = [_points(file, content, key, size_of(name)) for key, name in zip(("src", "trg"), names, strict=True)]
        if len(points[0]) != len(points[1]):
            raise DataError(
                f"{file}: src_kps and trg_kps must have the same number of points, "
                f"got {len(points[0])} and {len(points[1])}"
            )
        source, target = (numbers.setdefault(name, len(numbers)) for name in names)
        pairs.append(Pair(file.stem, category, source, target, points[0], points[1], _box(file, content)))
    return PairedImages(images, list(numbers), pairs)


def _read(file: Path) -> Mapping[str, Any]:
    content = read_json(file)
    missing = [key for key in _NEEDED if not isinstance(content, dict) or key not in content]
    if missing:
        raise DataError(f"{file} is not in the format of SPair-71k: missing {', '.join(missing)}")
    return content


def _points(file: Path, content: Mapping[str, Any], key: str, size: tuple[int, int]) -> Float[Tensor, "k 2"]:
    points = content[f"{key}_kps"]
    if not isinstance(points, list) or not points or not all(_are_numbers(point, 2) for point in points):
        raise DataError(f"{file}: {key}_kps must be one or more pairs of x and y in pixels, got {points!r:.60}")
    height, width = size
    for number, (x, y) in enumerate(points):
        if not (0 <= x <= width and 0 <= y <= height):
            raise DataError(
                f"{file}: point {number} of {key}_kps must be inside the image, {width} x {height}, got {x}, {y}"
            )
    return torch.tensor(points, dtype=torch.float32)


def _box(file: Path, content: Mapping[str, Any]) -> tuple[float, float, float, float]:
    box = content["trg_bndbox"]
    if not _are_numbers(box, 4) or box[2] <= box[0] or box[3] <= box[1]:
        raise DataError(f"{file}: trg_bndbox must be left, top, right and bottom in pixels, got {box!r:.60}")
    return tuple(box)


def _are_numbers(values: object, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(map(is_number, values))
