"""Files of the results of segmentation: of each image, of other tools, and pictures."""

import contextlib
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

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
from cribo.apps.segment.large import (
    LARGE_SUFFIX,
    LabelledLargeImage,
    preview_step,
    read_reduced_image,
    read_reduced_tiles,
    read_tiles,
)
from cribo.apps.segment.pictures import SegmentedPanel, draw_overview, overlay
from cribo.apps.segment.results import (
    FOLDERS,
    OVERVIEW,
    Record,
    Segmented,
    class_shares,
    files_of,
    instance_counts,
    instances_file,
    read_records,
    write_finished,
    write_summary,
)
from cribo.apps.segment.targets import result_name
from cribo.base.bounds import at_least
from cribo.base.colours import Colour
from cribo.base.console import Progress
from cribo.base.drawing import write_figure
from cribo.base.errors import ConfigError, DataError, InputError, UnreadableImage
from cribo.base.files import write_folder_whole, write_whole
from cribo.base.job import Job
from cribo.data.config import DEFAULT_READING, Reading, spread
from cribo.data.labelled.formats import LabelFormat
from cribo.data.labelled.georeferenced import Georeference, read_georeference
from cribo.data.labelled.label_maps import IGNORE_INDEX, Labelling, Task, write_labels
from cribo.data.labelled.scaling import resized
from cribo.data.labelled.small_regions import merge_small_regions
from cribo.data.reading import full_size, read_values
from cribo.data.sources.collection import ImageCollection
from cribo.data.sources.images import EncodedImages, ImageSource
from cribo.data.windows import LargeImage
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

    def write(self, name: str, sha256: str, image: UInt8[Tensor, "c h w"], found: Segmentation) -> Record:
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

    def write_large(self, name: str, sha256: str, found: LabelledLargeImage) -> Record:
        """Write the files of a large image, each atomically: label map and confidence as TIFF, and a small overlay."""
        labels, painted, confidence = files_of(self.folder, name, LARGE_SUFFIX)
        for path in (labels, painted, confidence):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(labels, lambda part: found.labels.write(part, self.palette))
        drawn = Image.fromarray(overlay(found.picture, found.picture_labels, self.palette))
        write_whole(painted, lambda part: drawn.save(part, "JPEG", quality=_JPEG_QUALITY))
        write_whole(confidence, found.confidence.write)
        return Record(name, sha256, found.labels.size, found.shares, found.mean_confidence, suffix=LARGE_SUFFIX)

    def _write_instances(self, name: str, instances: Instances) -> None:
        if len(instances.found) > MOST_INSTANCES:
            reason = f"it has {len(instances.found)} instances, more than {MOST_INSTANCES}: raise --min_area"
            raise UnreadableImage(name, reason)
        path = instances_file(self.folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda part: write_instances(instances.numbers, part))


class LabelResults:
    """The label maps in an output folder, with their summary and pictures.

    Args:
        job: output folder.
        images: the images to label.
        classes: names of the classes.
        palette: colour of each class.
        splitter: splits classes into instances; None if no class is split.

    Attributes:
        names: index of each image by its name.
        records: records of the labelled images by name.
        earlier: records of images of earlier calls that are no longer among the images.
        skipped: reasons why images could not be read, by name.
        reused: number of images that were already labelled.
        expected: IoU of classes on left-out examples, for the overview.
        uncalibrated: the reason why the confidence is not calibrated; "" if it is.
    """

    expected: Mapping[int, float] = {}
    uncalibrated: str = ""

    def __init__(
        self,
        job: Job,
        images: ImageSource,
        classes: Sequence[str],
        palette: Sequence[Colour],
        splitter: Splitter | None = None,
    ) -> None:
        self.job, self.images, self.splitter = job, images, splitter
        self.names = {images.name(index): index for index in range(len(images))}
        self.classes, self.palette = [*classes], [*palette]
        self.records: dict[str, Record] = {}
        self.earlier: dict[str, Record] = {}
        self.skipped: dict[str, str] = {}
        self.reused = 0
        self._full_sizes: dict[str, tuple[int, int]] = {}

    @property
    def folder(self) -> Path:
        """The output folder."""
        return self.job.path

    @property
    def split(self) -> list[str]:
        """Names of the classes that are split into instances."""
        return [] if self.splitter is None else [self.classes[label] for label in self.splitter.classes]

    @property
    def writer(self) -> ResultWriter:
        """A writer of the files of images in the folder."""
        return ResultWriter(self.folder.absolute(), self.palette, self.splitter)

    def load(self, name: str) -> UInt8[Tensor, "c h w"]:
        """Load an image by its name."""
        return self.images.load(self.names[name])

    def resume(self, *, unit: str) -> dict[str, Record]:
        """Create the folders, and return the records of all images whose files are complete, by name."""
        done = read_records(self.folder, self.job.accounts)
        self.job.missing([*self.names], unit=unit)
        stems = {result_name(name) for name in self.names}
        self.earlier = {name: record for name, record in done.items() if result_name(name) not in stems}
        for folder in FOLDERS:
            (self.folder / folder).mkdir(exist_ok=True)
        return done

    def reuse(self, records: Iterable[Record]) -> None:
        """Keep the records of images that were already labelled."""
        for record in records:
            self.records[record.name] = record
            self.reused += 1

    def add(self, records: Iterable[Record]) -> None:
        """Record images whose files are complete."""
        for record in records:
            self.job.done(record.name, **record.account)
            self.records[record.name] = record

    def finish(self, about: Mapping[str, Any], seconds: float) -> None:
        """Write the summary and the final description of the results.

        Args:
            about: description, besides classes and palette.
            seconds: duration of labelling.
        """
        self.records = {name: self.records[name] for name in self.names if name in self.records}  # in their order
        write_summary(self.folder, self.names, self.records, self.earlier, self.skipped, self.classes, self.split)
        write_finished(
            self.folder,
            {**about, "classes": self.classes, "palette": self.palette},
            seconds=seconds,
            found=len(self.names),
            segmented=len(self.records) - self.reused,
            reused=self.reused,
            earlier=len(self.earlier),
            skipped=len(self.skipped),
        )
        self.job.finish()

    def segmented(self, seconds: float, labelling_seconds: float) -> Segmented:
        """Return the counts of the results, given the durations of the command and of labelling in seconds."""
        everything = [*self.records.values(), *self.earlier.values()]
        return Segmented(
            self.folder,
            len(self.records),
            self.reused,
            len(self.earlier),
            self.skipped,
            seconds,
            labelling_seconds,
            class_shares(everything, self.classes),
            instance_counts(everything, self.classes, self.split),
        )

    def require_writable(self, formats: Sequence[LabelFormat]) -> None:
        """Check that labels of all images can be written in some formats.

        Raises:
            DataError: a format writes labels in the coordinates of a map, and an image has none.
            InputError: a format writes labels at full resolution, at which an image has too many pixels.
        """
        if any(each.on_map for each in formats):
            for name in self.names:
                self._place(name)
        enlarged = next((each for each in formats if not each.any_resolution), None)
        for name in self.names if self._reading.pixel_size and formats else ():
            with contextlib.suppress(UnreadableImage):  # skipped
                height, width = self._full_size(name)
                if enlarged is not None and height * width > self._reading.max_pixels:
                    raise InputError(
                        f"{enlarged.title} are written at full resolution, at which {name} has {width} x {height} "
                        f"pixels, more than --max_pixels {self._reading.max_pixels}: use --write geojson, yolo, "
                        "geotiff or geojson-wgs84, or raise the limit"
                    )

    def write(
        self, labels_format: LabelFormat, tasks: Mapping[str, Task], progress: Progress, *, min_area: int = 0
    ) -> None:
        """Write all labels in a format of the table, to a file or a folder.

        Args:
            labels_format: a format that can be written.
            tasks: what the tool of the examples' labels knows of images, by name.
            progress: progress callback.
            min_area: merge regions with fewer pixels of the label map into larger ones; see `merge_small_regions`.
        """
        sizes = {name: self._full_size(name) for name in self.records}
        done = itertools.count(1)

        def labels(name: str) -> UInt8[Tensor, "h w"]:
            progress(labels_format.written, next(done), len(sizes))
            return at_resolution(merge_small_regions(self._split_labels(name), min_area), name)

        def at_resolution(values: Tensor, name: str) -> Tensor:
            return values if labels_format.any_resolution else resized(values, sizes[name])

        instances = None if self.splitter is None else lambda name: at_resolution(self._instances(name), name)
        labelling = Labelling(sizes, self.classes, labels, tasks, instances, self._place)
        path = self.folder / labels_format.written
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

    @property
    def _reading(self) -> Reading:
        return getattr(self.images, "reading", DEFAULT_READING)

    def _full_size(self, name: str) -> tuple[int, int]:
        """Return height and width of an image at full resolution."""
        if not self._reading.pixel_size:
            return self.records[name].size
        if name not in self._full_sizes:
            images = cast("ImageCollection", self.images)
            self._full_sizes[name] = full_size(images.read(self.names[name]), reading=self._reading)
        return self._full_sizes[name]

    def _place(self, name: str) -> Georeference:
        if not hasattr(self.images, "read"):
            raise DataError(
                f"{name} has no coordinates: frames of videos have none, so omit formats of maps in --write"
            )
        return read_georeference(cast("ImageCollection", self.images), self.names[name])

    def draw_overview(self, pictures: int) -> None:
        """Draw some images, evenly spread, with their labels and confidence."""
        names = [*self.records]
        if pictures and names:
            self.draw([names[place] for place in spread(len(names), pictures)], OVERVIEW)

    def draw(self, names: Sequence[str], file: str) -> None:
        """Draw images with their labels and confidence."""
        panels = list(map(self._panel, names))
        figure = draw_overview(panels, self.classes, self.palette, self.expected, self.uncalibrated)
        write_figure(self.folder / file, figure)

    def _panel(self, name: str) -> SegmentedPanel:
        """Return an image with its written labels, confidence and instances, reduced for the overview."""
        record = self.records[name]
        if record.suffix == LARGE_SUFFIX:
            return self._large_panel(name, preview_step(record.size, _OVERVIEW_SIDE))
        image = self.load(name)
        labels, _, confidence = files_of(self.folder, name)
        step = max(1, -(-max(image.shape[1:]) // _OVERVIEW_SIDE))
        grey = _read_grey(confidence)[::step, ::step].float() / 255
        numbers = None if self.splitter is None else self._instances(name)[::step, ::step]
        return SegmentedPanel(name, image[:, ::step, ::step], _read_grey(labels)[::step, ::step], grey, numbers)

    def _large_panel(self, name: str, step: int) -> SegmentedPanel:
        image = cast("EncodedImages", self.images).load_or_open(self.names[name])
        assert isinstance(image, LargeImage)
        labels, _, confidence = files_of(self.folder, name, LARGE_SUFFIX)
        grey = read_reduced_tiles(confidence, step).float() / 255
        return SegmentedPanel(name, read_reduced_image(image, step), read_reduced_tiles(labels, step), grey)

    def _split_labels(self, name: str) -> UInt8[Tensor, "h w"]:
        """Return the labels of an image; pixels of split classes without an instance have no class."""
        if self.records[name].suffix == LARGE_SUFFIX:
            return read_tiles(files_of(self.folder, name, LARGE_SUFFIX)[0])
        labels = _read_grey(files_of(self.folder, name)[0])
        if self.splitter is None:
            return labels
        is_split = torch.isin(labels, torch.tensor(self.splitter.classes, dtype=torch.uint8))
        return labels.masked_fill(is_split & (self._instances(name) == 0), IGNORE_INDEX)

    def _instances(self, name: str) -> Int32[Tensor, "h w"]:
        return read_instances(instances_file(self.folder, name))


def check_min_area(write_min_area: int, write: Sequence[str], instances: Sequence[str] = ()) -> None:
    """Check `write_min_area` against the other options.

    Raises:
        ConfigError: it is negative, there are no such files, or classes are split into instances.
    """
    at_least(0).check(write_min_area=write_min_area)
    if write_min_area and not write:
        raise ConfigError(
            "--write_min_area requires --write: small regions are merged only in the files of other tools"
        )
    if write_min_area and instances:
        raise ConfigError(
            "--write_min_area cannot be combined with --instances, which splits the exact labels: use --min_area, "
            "which leaves out smaller instances"
        )


def _read_grey(path: Path) -> UInt8[Tensor, "h w"]:
    return torch.from_numpy(np.array(read_values(path)))
