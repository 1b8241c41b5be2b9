"""Label maps of a collection from its annotations, for the study of supervision (paper table 11)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from cribo.base.errors import DataError
from cribo.base.files import write_text
from cribo.base.job import Job
from cribo.base.wording import counted
from cribo.data.labelled.coco import CocoLabels
from cribo.data.labelled.label_maps import CLASSES_FILE, IGNORE_INDEX

_PART = 500  # images that are recorded together
_REST = "other"  # category of COCO's stuff annotations for all pixels of things


@dataclass(frozen=True)
class LabelMaps:
    """Written label maps.

    Attributes:
        folder: their folder.
        images: number of images.
        classes: names of the classes; pixels without one are 255.
    """

    folder: Path
    images: int
    classes: list[str]


def write_label_maps(
    annotations: str | Path,
    out: str | Path,
    *,
    images: str | Path | None = None,
    stuff: str | Path | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> LabelMaps:
    """Draw the label map of each image of a file in COCO's format: 8-bit PNG files with the names of the images.

    Classes are the categories by their ids, from 0; 255 is a pixel outside all objects, or in a crowd. The smaller of
    two objects is on top. To continue after an interruption, call it again: finished maps are kept.

    Args:
        annotations: the file, such as coco/annotations/instances_train2017.json.
        out: folder of the label maps.
        images: folder of the images; for COCO's own layout, the one beside that of the annotations, such as
            coco/train2017.
        stuff: a file with further categories for the pixels outside all objects, such as
            coco/annotations/stuff_train2017.json.
        progress: called with what is done, the number of images and their total.

    Returns:
        The label maps.

    Raises:
        MissingData: a file or folder does not exist.
        DataError: a file is not in COCO's format, lists other images, or there are more than 255 classes.
        FolderError: the folder is not empty, or was made from other annotations.
    """
    images = _images_of(Path(annotations)) if images is None else images
    things = CocoLabels(annotations, images)
    further = None if stuff is None else CocoLabels(stuff, images)
    # Without the background, which comes first, and without the things among the stuff.
    names = list(things.classes)[1:]
    of_stuff = [] if further is None else list(further.classes)[1:]
    numbers = _numbers(names, of_stuff)
    classes = [*names, *(name for name in of_stuff if name != _REST)]
    if len(classes) > IGNORE_INDEX:
        raise DataError(f"label maps have at most {IGNORE_INDEX} classes, got {len(classes)}: leave out the stuff")
    places = {} if further is None else {further.name(index): index for index in range(len(further))}
    if further is not None and (
        lacking := [name for name in map(things.name, range(len(things))) if name not in places]
    ):
        raise DataError(f"{stuff} does not list {lacking[0]}: give the file of the same images as {annotations}")

    def labels(index: int) -> UInt8[Tensor, "h w"]:
        drawn = things.label_map(index)
        if drawn.boxes:
            raise DataError(
                f"{annotations}: {things.name(index)} has {counted(len(drawn.boxes), 'object')} with a box only, but "
                "label maps need outlines: give a file with a segmentation for each object"
            )
        own = numbers[0][drawn.labels.long()]
        if further is None:
            return own
        return torch.where(own == IGNORE_INDEX, numbers[1][further.labels(places[things.name(index)]).long()], own)

    job = Job(Path(out), "label maps", resume=True)
    identity = {"annotations": Path(annotations).name, "stuff": None if stuff is None else Path(stuff).name}
    with job.open({**identity, "images": len(things)}, again=lambda path: "the same options") as job:
        firsts = range(0, len(things), _PART)
        for first in job.missing(firsts, unit=f"parts of {_PART} images"):
            for index in range(first, min(first + _PART, len(things))):
                path = (job.path / things.name(index)).with_suffix(".png")
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(labels(index).numpy()).save(path)
                progress("label maps", index + 1, len(things))
            job.done(first)
        write_text(job.path / CLASSES_FILE, "".join(f"{name}\n" for name in classes))
        job.finish()
    return LabelMaps(job.path, len(things), classes)


def _images_of(annotations: Path) -> Path | None:
    """Return the folder of the images in COCO's own layout; None in another layout."""
    folder = annotations.parent.parent / annotations.stem.rpartition("_")[2]
    return folder if folder.is_dir() else None


def _numbers(names: list[str], of_stuff: list[str]) -> tuple[UInt8[Tensor, "256"], UInt8[Tensor, "256"]]:
    """Return the values in the label maps of the labels of both files, in which 0 is the background."""
    things, stuff = (np.full(256, IGNORE_INDEX, dtype=np.uint8) for _ in range(2))
    things[1 : len(names) + 1] = np.arange(len(names))
    kept = [place for place, name in enumerate(of_stuff, start=1) if name != _REST]
    stuff[kept] = np.arange(len(names), len(names) + len(kept))
    return torch.from_numpy(things), torch.from_numpy(stuff)
