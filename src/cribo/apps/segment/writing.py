"""Files of the results of segmentation: of each image, of other tools, and pictures."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int32, UInt8
from PIL import Image
from torch import Tensor

from cribo.apps.segment.instances import (
    MOST_INSTANCES,
    Instances,
    Splitter,
    read_instances,
    write_instances,
)
from cribo.apps.segment.pictures import SegmentedPanel, overlay
from cribo.apps.segment.results import Record, files_of, instances_file
from cribo.base.colours import Colour
from cribo.base.console import Progress
from cribo.base.errors import UnreadableImage
from cribo.base.files import write_folder_whole, write_whole
from cribo.data.labelled.formats import LabelFormat
from cribo.data.labelled.label_maps import IGNORE_INDEX, Labelling, Task, write_labels
from cribo.data.reading import read_values
from cribo.features.memory.memory import Segmentation
from cribo.features.memory.pixels import write_confidence

log = logging.getLogger("cribo")

_JPEG_QUALITY = 90
_OVERVIEW_SIDE = 480  # limit on the longer side of an image in the overview, in pixels


class ResultWriter(NamedTuple):
    """Writes the files of an image.

    Attributes:
        folder: absolute path of the output folder.
        palette: colour of each class.
        splitter: splits classes into instances.
    """

    folder: Path
    palette: list[Colour]
    splitter: Splitter | None = None

    def write(self, name: str, sha256: str, image: UInt8[Tensor, "3 h w"], found: Segmentation) -> Record:
        """Write the files of an image, each atomically; raises UnreadableImage if it has too many instances."""
        instances = None if self.splitter is None else self.splitter(found)
        labels, painted, confidence = files_of(self.folder, name)
        for path in (labels, painted, confidence):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(labels, lambda part: write_labels(found.labels, self.palette, part))
        numbers = None if instances is None else instances.numbers
        drawn = Image.fromarray(overlay(image, found.labels, self.palette, numbers))
        write_whole(painted, lambda part: drawn.save(part, "JPEG", quality=_JPEG_QUALITY))
        write_whole(confidence, lambda part: write_confidence(found.confidence, part))
        if instances is not None:
            self._write_instances(name, instances)
        size = (found.labels.shape[0], found.labels.shape[1])
        objects = None if instances is None else instances.found
        return Record(name, sha256, size, found.shares, float(found.confidence.mean()), objects)

    def _write_instances(self, name: str, instances: Instances) -> None:
        if len(instances.found) > MOST_INSTANCES:
            reason = f"it has {len(instances.found)} instances, more than {MOST_INSTANCES}: raise --min_area"
            raise UnreadableImage(name, reason)
        path = instances_file(self.folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda part: write_instances(instances.numbers, part))


def write_format(
    labels_format: LabelFormat,
    folder: Path,
    records: Mapping[str, Record],
    classes: Sequence[str],
    tasks: Mapping[str, Task],
    progress: Progress,
    *,
    split: Sequence[int] = (),
) -> None:
    """Write all labels in a format of the table, to a file or a folder.

    Args:
        labels_format: a format that can be written.
        folder: output folder, with the label maps.
        records: records of the labelled images by name.
        classes: names of the classes.
        tasks: what the tool of the examples' labels knows of images, by name.
        progress: progress callback.
        split: classes whose regions are split into instances; their other pixels get no class.
    """
    sizes = {name: record.size for name, record in records.items()}
    done = itertools.count(1)

    def labels(name: str) -> UInt8[Tensor, "h w"]:
        progress(labels_format.written, next(done), len(sizes))
        found = _read_grey(files_of(folder, name)[0])
        if not split:
            return found
        is_split = torch.isin(found, torch.tensor(split, dtype=torch.uint8))
        return found.masked_fill(is_split & (instances(name) == 0), IGNORE_INDEX)

    def instances(name: str) -> Int32[Tensor, "h w"]:
        return read_instances(instances_file(folder, name))

    labelling = Labelling(sizes, list(classes), labels, tasks, instances if split else None)
    path = folder / labels_format.written
    write, holes = labels_format.write, []
    assert write is not None
    if path.suffix:
        holes.append(write(path, labelling))
    else:
        write_folder_whole(path, lambda part: holes.append(write(part, labelling)), replaces=True)
    if any(holes):
        log.warning(
            "%s cannot hold holes in regions: %d were filled; use --write coco or geojson for exact regions",
            *(labels_format.title, sum(holes)),
        )


def panel_of(folder: Path, name: str, image: UInt8[Tensor, "3 h w"], *, is_split: bool = False) -> SegmentedPanel:
    """Return an image with its written labels, confidence and instances, if there are any, reduced for the overview."""
    labels, _, confidence = files_of(folder, name)
    step = max(1, -(-max(image.shape[1:]) // _OVERVIEW_SIDE))
    grey = _read_grey(confidence)[::step, ::step].float() / 255
    numbers = read_instances(instances_file(folder, name))[::step, ::step] if is_split else None
    return SegmentedPanel(name, image[:, ::step, ::step], _read_grey(labels)[::step, ::step], grey, numbers)


def _read_grey(path: Path) -> UInt8[Tensor, "h w"]:
    return torch.from_numpy(np.array(read_values(path)))
