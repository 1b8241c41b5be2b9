"""Videos as folders of frames with objects in them: DAVIS 2017, or folders of the same layout."""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from cribo.base.colours import BLACK, Colour, distinct_colours
from cribo.base.errors import DataError, MissingData
from cribo.base.files import path_inside, read_lines, require
from cribo.data.config import spread
from cribo.data.labelled.segmentation import IGNORE_INDEX, UnlabelledFiles, by_stem, label_maps_in
from cribo.data.reading import EXTENSIONS, image_size, read_values
from cribo.data.sources.images import ImageFiles, list_files

DAVIS_SIZES = {"train": 60, "val": 30}
"""Videos of the splits of DAVIS 2017 with public annotations."""

_RESOLUTION = "480p"
_MAX_OBJECTS = 100
_LEAST_FRAMES = 3


@dataclass(frozen=True)
class Video:
    """Consecutive frames among the images of a set.

    Attributes:
        name: of its folder.
        frames: indices of its frames, in order.
        objects: number of objects, which are 1 to `objects` in the annotations.
    """

    name: str
    frames: range
    objects: int


class VideoFrames(UnlabelledFiles):
    """The frames of `videos`, with an annotation each; names are paths below the two folders."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        annotation_folder: Path,
        annotation_names: Sequence[str],
        videos: Sequence[Video],
    ) -> None:
        super().__init__(folder, names)
        self._annotations = ImageFiles(annotation_folder, annotation_names)
        self.videos = list(videos)

    def objects(self, index: int) -> UInt8[Tensor, "h w"]:
        """The number of the object at each pixel of a frame, 0 for background.

        Raises:
            errors of `read_objects`.
        """
        return read_objects(self._annotations.path(index))


def read_objects(path: str | os.PathLike[str]) -> UInt8[Tensor, "h w"]:
    """Read the number of the object at each pixel; 255, no class in DAVIS, is background, as in its evaluation."""
    image = read_values(path)
    mode, values = image.mode, np.array(image)
    if mode not in ("P", "L", "1"):
        raise DataError(
            f"{path}: annotations must be object numbers in a grey or palette PNG with 8 bits, got mode {mode}: "
            "replace each colour by the number of its object"
        )
    values = values.astype(np.uint8)
    return torch.from_numpy(np.where(values == IGNORE_INDEX, 0, values))


def has_videos(root: Path) -> bool:
    """Whether a folder has frames and annotations with a folder per video (unlike Pascal VOC)."""
    return (root / "JPEGImages").is_dir() and any((root / "Annotations").glob("*/"))


def open_videos(
    root: str | os.PathLike[str], split: str = "val", *, partial: bool = False, limit: int | None = None
) -> VideoFrames:
    """Open videos in the layout of DAVIS 2017.

    These are `JPEGImages/480p/<video>/*.jpg`, `Annotations/480p/<video>/*.png` with the same names, and
    `ImageSets/2017/<split>.txt` with a video per line. Custom folders may omit `480p`; without the list, all videos are
    used.

    Args:
        root: the folder.
        split: name of the list.
        partial: accept a list of DAVIS with fewer videos, and leave out videos without frames or annotations.
        limit: use only this many videos, evenly spread.

    Raises:
        MissingData: a folder, list, frame or annotation does not exist.
        DataError: a video of fewer than three frames, without objects in the first frame, with a gap between frames,
            or with frames or annotations of several sizes.
    """
    root = Path(root).expanduser()
    folders = (root / "JPEGImages", root / "Annotations")
    for folder in (root, *folders):
        require(folder)
    frames, annotations = (each / _RESOLUTION if (each / _RESOLUTION).is_dir() else each for each in folders)
    names = _listed(root, split, frames, partial=partial)
    missing = [name for name in names if not all((each / name).is_dir() for each in (frames, annotations))]
    if missing and (not partial or len(missing) == len(names)):
        raise MissingData(
            f"{len(missing)} of the {len(names)} videos of {root} have no folder in {frames} or {annotations}, the "
            f"first is {missing[0]}: complete the set"
            + ("" if partial else ", or accept an incomplete set with --data.partial")
        )
    names = [name for name in names if name not in missing]
    if limit is not None:
        names = [names[place] for place in spread(len(names), limit)]
    videos, frame_names, annotation_names = [], [], []
    for name in names:
        pairs = _pairs(frames / name, annotations / name)
        files = ((frames / name / frame, annotations / name / annotation) for frame, annotation in pairs)
        _require_one_size([file for pair in files for file in pair])
        start = len(frame_names)
        objects = _count_objects(annotations / name / pairs[0][1])
        videos.append(Video(name, range(start, start + len(pairs)), objects))
        frame_names += [f"{name}/{frame}" for frame, _ in pairs]
        annotation_names += [f"{name}/{annotation}" for _, annotation in pairs]
    return VideoFrames(frames, frame_names, annotations, annotation_names, videos)


def _listed(root: Path, split: str, frames: Path, *, partial: bool) -> list[str]:
    """Return the names of the videos in the list of the split, or of all videos if there are no lists."""
    if not (root / "ImageSets").is_dir():
        if names := sorted(entry.name for entry in frames.iterdir() if entry.is_dir()):
            return names
        raise DataError(f"{frames} has no folders of frames, one for each video")
    file = root / "ImageSets" / "2017" / f"{split}.txt"
    require(file)
    names = [name for _, line in read_lines(file, "a list of videos") for name in line.split()]
    for name in names:
        path_inside(frames, name, source=file, follow_links=True)
    if not names:
        raise DataError(f"{file} lists no video")
    if split in DAVIS_SIZES and len(names) != DAVIS_SIZES[split] and not partial:
        raise DataError(
            f"{file} must list the {DAVIS_SIZES[split]} videos of DAVIS 2017, got {len(names)}: complete it, or accept "
            "it with --data.partial"
        )
    return names


def _pairs(frames: Path, annotations: Path) -> list[tuple[str, str]]:
    """Return the frames of a video in order, each with its annotation."""
    pictures = by_stem(list_files(frames, EXTENSIONS), EXTENSIONS)
    maps = label_maps_in(annotations)
    if len(pictures) < _LEAST_FRAMES:
        raise DataError(
            f"{frames} must have at least {_LEAST_FRAMES} frames, got {len(pictures)}: the first one is given, and the "
            "last one is not scored"
        )
    for have, lack, folder, what in ((maps, pictures, frames, "frame"), (pictures, maps, annotations, "annotation")):
        if missing := [stem for stem in have if stem not in lack]:
            raise MissingData(
                f"{folder} lacks {len(missing)} of the {len(have)} {what}s, the first is {missing[0]}: each frame must "
                "have an annotation of the same name, and each annotation a frame"
            )
    stems = sorted(pictures)
    if all(stem.isdecimal() for stem in stems):
        stems.sort(key=int)
        steps = [later - earlier for earlier, later in itertools.pairwise(map(int, stems))]
        gap = next((place for place, step in enumerate(steps) if step != min(steps)), None)
        if gap is not None:
            raise DataError(
                f"{frames} has no frames between {stems[gap]} and {stems[gap + 1]}, but others are {min(steps)} apart: "
                "add the missing frames, or number the frames without gaps"
            )
    return [(pictures[stem], maps[stem]) for stem in stems]


def _require_one_size(files: Sequence[Path]) -> None:
    """Check that all frames and annotations of a video have the size of the first frame."""
    first = image_size(files[0])
    for file in files[1:]:
        if (size := image_size(file)) != first:
            raise DataError(
                f"{file}: frames and annotations of a video must have one size, that of the first frame, {first[1]} x "
                f"{first[0]}, got {size[1]} x {size[0]}"
            )


def _count_objects(path: Path) -> int:
    objects = int(read_objects(path).max())
    if not objects:
        raise DataError(f"{path}: the first frame of a video must have an object, and all its pixels are background")
    if objects > _MAX_OBJECTS:
        raise DataError(
            f"{path}: objects must be numbered from 1 to {_MAX_OBJECTS} at most, got {objects}: an image of grey "
            "values is not an annotation"
        )
    return objects


def object_palette(objects: int) -> list[Colour]:
    """Return the colour of background (black) and of each object."""
    return [BLACK, *distinct_colours(objects)]
