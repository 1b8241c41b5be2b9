"""Images with a depth map each: NYU-Depth v2 in the layouts of BTS and DINOv2, or custom folders."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cribo.base.errors import DataError, MissingData
from cribo.base.files import path_inside, read_lines, require
from cribo.data.config import spread
from cribo.data.labelled.segmentation import UnlabelledFiles, by_stem, label_maps_in
from cribo.data.reading import EXTENSIONS, read_values
from cribo.data.sources.images import ImageFiles, open_images

NYU_SIZES = {"train": 24_231, "val": 654}
"""Images of NYU-Depth v2 in the lists of BTS."""

EIGEN_CROP = slice(45, 471), slice(41, 601)
"""Rows and columns of NYU-Depth v2 that are scored (Eigen et al. 2014)."""

_NYU_SIZE = 480, 640
_NYU_LISTS = {
    split: (
        f"nyu_{name}.txt",
        f"nyudepthv2_{name}_files_with_gt.txt",
        f"train_test_inputs/nyudepthv2_{name}_files_with_gt.txt",
    )
    for split, name in (("train", "train"), ("val", "test"))
}
_NYU_FOLDERS = {"train": ("", "sync"), "val": ("", "official_splits/test", "test")}
_SAMPLED = 8  # maps of a split that are read to check their unit
_TOO_NEAR = 0.01  # share of the greatest depth; a median below it shows another unit


class DepthImages(UnlabelledFiles):
    """Images with a depth map each, in 16-bit PNG files.

    Args:
        folder: of the images.
        names: paths of the images below it.
        depth_files: the depth map of each image, as paths below `folder` or absolute.
        scale: units of the depth maps per metre; 0 is no measurement.
        max_depth: metres, above which values are no measurements either.
        window: rows and columns that are scored; None for all.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        names: Iterable[str],
        depth_files: Iterable[str],
        *,
        scale: float,
        max_depth: float,
        window: tuple[slice, slice] | None = None,
    ) -> None:
        super().__init__(folder, names)
        self._depth_files = ImageFiles(folder, depth_files)
        self.scale, self.max_depth, self.window = scale, max_depth, window

    def depth(self, index: int) -> Float[Tensor, "h w"]:
        """The depth of each pixel in metres, 0 where there is no measurement.

        Raises:
            UnreadableImage: a broken file.
            DataError: another format, or another size than the image.
        """
        depth = self._metres(index)
        return torch.where(depth > self.max_depth, 0.0, depth)

    def subset(self, indices: Sequence[int]) -> "DepthImages":
        """Some of the images, in this order."""
        names, files = ([each[index] for index in indices] for each in (self.names, self._depth_files.names))
        return DepthImages(self.folder, names, files, scale=self.scale, max_depth=self.max_depth, window=self.window)

    def check_unit(self) -> None:
        """Raise DataError if a few depth maps are empty, or their median is above `max_depth` or under 1 % of it."""
        maps = [self._metres(index) for index in spread(len(self), _SAMPLED)]
        measured = torch.cat([depth[depth > 0] for depth in maps])
        first = self._depth_files.path(0)
        if not len(measured):
            raise DataError(
                f"all pixels of {len(maps)} depth maps are 0, which is no measurement, such as {first}: give maps with "
                "depths above 0"
            )
        median = float(measured.median())
        if not _TOO_NEAR * self.max_depth <= median <= self.max_depth:
            raise DataError(
                f"the median depth of {len(maps)} maps, such as {first}, must be {_TOO_NEAR * self.max_depth:g} to "
                f"{self.max_depth:g} m, got {median:.3g} m: give the units per metre with --data.scale, now "
                f"{self.scale:g} (1000 for millimetres, 256 for KITTI), or the greatest depth with --data.max_depth"
            )

    def _metres(self, index: int) -> Float[Tensor, "h w"]:
        path = self._depth_files.path(index)
        image = read_values(path)
        mode, values = image.mode, np.array(image)
        # Pillow opens 16-bit PNGs as I;16 or, in older versions, as I.
        if not (mode.startswith("I;16") or mode == "I"):
            raise DataError(
                f"{path}: depth must be a grey PNG with 16 bits, got mode {mode}: a picture of depths with 8 bits or "
                "in colours has no unit, take the file of the measurements"
            )
        self.require_size(index, values.shape, f"{path}: depth")
        if self.window is not None and values.shape != _NYU_SIZE:
            height, width = values.shape
            raise DataError(
                f"{path}: images of NYU-Depth v2 must have 640 x 480 pixels, of which the crop of Eigen et al. is "
                f"scored, got {width} x {height}: give other images as images/train, depth/train, ..."
            )
        return torch.from_numpy(values.astype(np.float32) / self.scale)


def is_nyu(root: str | os.PathLike[str]) -> bool:
    """Whether a folder has the lists of NYU-Depth v2."""
    root = Path(root).expanduser()
    return any((root / name).is_file() for names in _NYU_LISTS.values() for name in names)


def open_depth(
    root: str | os.PathLike[str], *, scale: float = 1000.0, max_depth: float = 10.0, partial: bool = False
) -> tuple[DepthImages, DepthImages]:
    """Open the images for training and validation of a set with depth maps.

    NYU-Depth v2 has `nyu_train.txt` and `nyu_test.txt`, or BTS's `nyudepthv2_train_files_with_gt.txt` and
    `nyudepthv2_test_files_with_gt.txt`; a line is the path of an image, that of its depth map, and further values that
    are ignored. Paths are below the root, or below `sync` for training and `official_splits/test` for validation.

    A custom folder has `images/train`, `images/val`, `depth/train` and `depth/val`; the depth map of
    `images/val/a/b.jpg` is `depth/val/a/b.png`.

    Args:
        root: the folder.
        scale: units of the depth maps per metre.
        max_depth: in metres; depths above it are ignored.
        partial: accept missing images and depth maps.

    Raises:
        MissingData: a folder, list, image or depth map does not exist.
        DataError: another layout, no images, or depth maps in another format or unit.
    """
    root = Path(root).expanduser()
    require(root)
    has_lists = is_nyu(root)
    if not has_lists and not (root / "depth").is_dir():
        raise DataError(
            f"{root} must contain nyu_train.txt and nyu_test.txt (NYU-Depth v2), or images/train, images/val, "
            "depth/train and depth/val with a 16-bit PNG for each image"
        )

    def open_split(split: str) -> DepthImages:
        folder, source, pairs = _listed(root, split, partial=partial) if has_lists else _paired(root, split)
        names, maps = zip(*_complete(pairs, folder, source, partial=partial), strict=True)
        window = EIGEN_CROP if has_lists else None
        return DepthImages(folder, names, maps, scale=scale, max_depth=max_depth, window=window)

    train, val = open_split("train"), open_split("val")
    for images in (train, val):
        images.check_unit()
    return train, val


Pairs = tuple[Path, Path, list[tuple[str, str]]]
"""A folder, the list or folder of its images, and the paths below it of each image and its depth map."""


def _listed(root: Path, split: str, *, partial: bool) -> Pairs:
    listed = next((root / name for name in _NYU_LISTS[split] if (root / name).is_file()), None)
    if listed is None:
        raise MissingData(f"{root} has no list of NYU-Depth v2 for {split}: {' or '.join(_NYU_LISTS[split])} is needed")
    lines = read_lines(listed, "a list of images")
    wrong = next((f"{line!r} in line {number}" for number, line in lines if len(line.split()) < 2), None)
    if wrong is not None or not lines:
        raise DataError(
            f"{listed} must have lines with the paths of an image and of its depth map, got {wrong or 'an empty file'}"
        )
    words = (line.split() for _, line in lines)
    pairs = [(image.lstrip("/"), depth.lstrip("/")) for image, depth, *_ in words]
    for name in (name for pair in pairs for name in pair):
        path_inside(root, name, source=listed, follow_links=True)
    folders = [root / name for name in _NYU_FOLDERS[split]]
    folder = next((each for each in folders if any((each / name).is_file() for name in pairs[0])), root)
    if len(pairs) != NYU_SIZES[split] and not partial:
        raise DataError(
            f"{listed} must list the {NYU_SIZES[split]:,} images of NYU-Depth v2, got {len(pairs):,}: take BTS's list, "
            "or accept it with --data.partial"
        )
    return folder, listed, pairs


def _paired(root: Path, split: str) -> Pairs:
    folders = root / "images" / split, root / "depth" / split
    for folder in folders:
        require(folder)
    images = by_stem(open_images(folders[0]).names, EXTENSIONS)
    maps = label_maps_in(folders[1])
    pairs = [
        (f"images/{split}/{name}", f"depth/{split}/{maps.get(stem, f'{stem}.png')}") for stem, name in images.items()
    ]
    return root, folders[0], pairs


def _complete(pairs: list[tuple[str, str]], folder: Path, source: Path, *, partial: bool) -> list[tuple[str, str]]:
    """Return the pairs whose files exist."""
    missing = {pair: name for pair in pairs for name in reversed(pair) if not (folder / name).is_file()}
    if missing and (not partial or len(missing) == len(pairs)):
        raise MissingData(
            f"{len(missing)} of the {len(pairs)} images of {source} or their depth maps are missing, the first is "
            f"{folder / next(iter(missing.values()))}: complete the set"
            + ("" if partial else ", or accept an incomplete set with --data.partial")
        )
    return [pair for pair in pairs if pair not in missing]
