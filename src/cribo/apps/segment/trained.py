"""Implementation of `cribo segment --segmenter`: label images by a network that `cribo evaluate segmenter` trained."""

import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from rich.console import Console
from torch import Tensor

from cribo.apps.segment.config import SegmenterConfig
from cribo.apps.segment.labeller import LabelledImage, PixelLabeller
from cribo.apps.segment.pictures import draw_overview
from cribo.apps.segment.results import (
    FOLDERS,
    Record,
    class_shares,
    read_records,
    write_finished,
    write_summary,
)
from cribo.apps.segment.run import OUT, OVERVIEW, LabelParts, Segmented
from cribo.apps.segment.targets import open_targets, result_name
from cribo.apps.segment.writing import ResultWriter, panel_of, write_format
from cribo.base.bounds import at_least
from cribo.base.colours import Colour, class_colours
from cribo.base.console import Phases
from cribo.base.devices import resolve_device
from cribo.base.drawing import write_figure
from cribo.base.job import Job
from cribo.base.versions import versions
from cribo.data.config import spread
from cribo.data.labelled.formats import written_formats
from cribo.data.sources.images import ImageFiles, collection_name, is_url, require_readable
from cribo.evaluation.segmentation.trained import TrainedSegmenter, load_segmenter, segmenter_file
from cribo.features.memory.memory import Segmentation
from cribo.features.spread.parts import ImagePart
from cribo.models import describe

KIND = "segmenter's segmentation"

_UNCALIBRATED = "it is the softmax of the segmenter"
_PART = 8  # images; an interrupted part is labelled again


def apply_segmenter(
    config: SegmenterConfig,
    *,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    pictures: int = 6,
    write: Sequence[str] = (),
    command: str = "",
    console: Console | None = None,
) -> Segmented:
    """Label images by a trained segmenter, and write label maps, overlays, confidences and a summary.

    Args:
        config: options of the command.
        out: output folder; by default a numbered folder `segmented/<images>`.
        resume: resume results in `out` of the same folder, segmenter and reading. New and changed images are labelled;
            results of images that were removed are kept.
        overwrite: replace existing results in `out`.
        pictures: number of images in the overview; 0 for no overview.
        write: formats of `LABEL_FORMATS` in which all labels are written, too.
        command: command line to record in the results.
        console: console for progress.

    Raises:
        ValueError: segmenter, images or folder are invalid, or no image can be read; raised before anything is
            written.
        FileNotFoundError: the segmenter or the images do not exist.
        OSError: results cannot be written.
    """
    console, started = console or Console(quiet=True), time.perf_counter()
    at_least(0).check(pictures=pictures)
    formats = written_formats(write)
    job = Job(
        out or OUT / collection_name(config.images),
        KIND,
        numbered=out is None,
        resume=resume,
        overwrite=overwrite,
        inputs=(config.images, config.segmenter),
    )
    segmenter = load_segmenter(config.segmenter, resolve_device(config.device), trust=config.trust)
    images = open_targets(config.images, column=config.column, apart_from=out or OUT, reading=config.reading)
    require_readable(images, config.images)
    labeller = SegmenterLabeller(segmenter, workers=config.workers)
    names = [images.name(index) for index in range(len(images))]
    classes, palette = [*segmenter.classes], labeller.palette
    source = images.folder if isinstance(images, ImageFiles) else config.images
    with segmenter_file(config.segmenter).open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    identity = {
        "folder": source if is_url(source) else os.path.realpath(source),
        "segmenter": sha256,
        "reading": config.reading.given,
    }
    records: dict[str, Record] = {}
    skipped: dict[str, str] = {}
    reused = 0
    with Phases(console) as progress, job.open(identity, command=command):
        done = read_records(job.path, job.accounts)
        job.missing(names, unit="images")
        for folder in FOLDERS:
            (job.path / folder).mkdir(exist_ok=True)
        stored = [done[name].content if name in done else "" for name in names]
        starts = range(0, len(images), _PART)
        places = [range(start, min(start + _PART, len(images))) for start in starts]
        parts = [ImagePart(images.part(part), [stored[place] for place in part]) for part in places]
        work = LabelParts(labeller, ResultWriter(job.path.absolute(), palette), config.workers)
        progress("images", 0, len(images))
        begun = time.perf_counter()
        with closing(work(parts)) as labelled:
            for part in labelled:
                for record in part.records:
                    job.done(record.name, **record.account)
                records |= {name: done[name] for name in part.unchanged}
                records |= {record.name: record for record in part.records}
                skipped |= part.skipped
                reused += len(part.unchanged)
                progress("images", len(records) + len(skipped), len(images))
        seconds = time.perf_counter() - begun
        records = {name: records[name] for name in names if name in records}
        stems = {result_name(name) for name in names}
        earlier = {name: record for name, record in done.items() if result_name(name) not in stems}
        write_summary(job.path, names, records, earlier, skipped, classes)
        write_finished(
            job.path,
            {
                "command": command,
                "images": {"folder": identity["folder"]},
                "segmenter": {"file": config.segmenter, "sha256": sha256},
                "backbone": describe(segmenter.network.backbone),
                "classes": classes,
                "palette": palette,
                "confidence": f"255 times the confidence, 0 to 1; not calibrated: {_UNCALIBRATED}",
                "versions": versions(str(resolve_device(config.device))),
            },
            seconds=seconds,
            found=len(names),
            segmented=len(records) - reused,
            reused=reused,
            earlier=len(earlier),
            skipped=len(skipped),
        )
        job.finish()
        if pictures and records:
            shown = [[*records][place] for place in spread(len(records), pictures)]
            panels = [panel_of(job.path, name, images.load(names.index(name))) for name in shown]
            write_figure(job.path / OVERVIEW, draw_overview(panels, classes, palette, {}, _UNCALIBRATED))
        for each in formats:
            write_format(each, job.path, records, classes, {}, progress)
    shares = class_shares([*records.values(), *earlier.values()], classes)
    whole = time.perf_counter() - started
    return Segmented(job.path, len(records), reused, len(earlier), skipped, whole, seconds, shares)


class SegmenterLabeller(PixelLabeller):
    """Labels images by a trained segmenter, in collections or batches of rows (`PixelLabeller`).

    Args:
        segmenter: the segmenter.
        workers: number of threads that read images. [half of the cores]
    """

    def __init__(self, segmenter: TrainedSegmenter, *, workers: int | None = None) -> None:
        super().__init__(1, workers)
        self._segmenter = segmenter

    @property
    def palette(self) -> list[Colour]:
        """Colour of each class."""
        classes, stated = self._segmenter.classes, self._segmenter.palette
        return [*stated, *class_colours(classes)[len(stated) :]]

    def open(self) -> None:
        """The segmenter is open."""

    def compute(self, images: Sequence[UInt8[Tensor, "3 h w"]]) -> Iterable[LabelledImage]:
        """Return images with their labels."""
        return (LabelledImage(image, self._labels_of(image)) for image in images)

    def _labels_of(self, image: UInt8[Tensor, "3 h w"]) -> Segmentation:
        labels, confidence = (values.cpu() for values in self._segmenter.label(image))
        classes = self._segmenter.classes
        counts = np.bincount(labels.numpy().ravel(), minlength=len(classes)) / labels.numel()
        shares = {name: float(share) for name, share in zip(classes, counts, strict=True) if share}
        return Segmentation(labels, confidence, dict(sorted(shares.items(), key=lambda share: -share[1])))
