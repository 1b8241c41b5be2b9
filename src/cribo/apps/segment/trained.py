"""Implementation of `cribo segment --segmenter`: label images by a network that `cribo evaluate segmenter` trained."""

import hashlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from cribo.apps.segment.config import SegmenterConfig
from cribo.apps.segment.labeller import LabelledImage, PixelLabeller
from cribo.apps.segment.results import OUT, Segmented
from cribo.apps.segment.run import label_collection
from cribo.apps.segment.targets import open_targets, place_of
from cribo.apps.segment.writing import LabelResults, check_min_area
from cribo.base.bounds import at_least
from cribo.base.colours import Colour, class_colours
from cribo.base.console import Phases
from cribo.base.devices import resolve_device
from cribo.base.job import Job
from cribo.base.versions import versions
from cribo.data.config import Reading
from cribo.data.labelled.formats import written_formats
from cribo.data.labelled.inputs import DecodedImage, open_valid
from cribo.data.reading import ImageContent, read_image
from cribo.data.sources.images import collection_name, require_readable
from cribo.evaluation.segmentation.trained import TrainedSegmenter, load_segmenter, segmenter_file
from cribo.features.memory.memory import Segmentation
from cribo.features.spread.engines import LocalEngine
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
    write_min_area: int = 0,
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
        write_min_area: in these, regions with fewer pixels get the label of the nearest larger region.
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
    check_min_area(write_min_area, write)
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
    reading = config.reading.completed(segmenter.network.backbone.pixels or {})
    images = open_targets(config.images, column=config.column, apart_from=out or OUT, reading=reading)
    require_readable(images, config.images)
    labeller = SegmenterLabeller(segmenter, workers=config.workers)
    results = LabelResults(job, images, segmenter.classes, labeller.palette)
    results.require_writable(formats)
    results.uncalibrated = _UNCALIBRATED
    with segmenter_file(config.segmenter).open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    place = place_of(images, config.images)
    identity = {"folder": place, "segmenter": sha256, "reading": reading.given}
    about = {
        "command": command,
        "images": {"folder": place},
        "segmenter": {"file": config.segmenter, "sha256": sha256},
        "backbone": describe(segmenter.network.backbone),
        "confidence": f"255 times the confidence, 0 to 1; not calibrated: {_UNCALIBRATED}",
        "versions": versions(str(resolve_device(config.device))),
    }
    with Phases(console) as progress, job.open(identity, command=command):
        engine = LocalEngine()
        seconds = label_collection(results, images, labeller, progress, engine=engine, part_images=_PART)
        results.finish(about, seconds)
        results.draw_overview(pictures)
        for each in formats:
            results.write(each, {}, progress, min_area=write_min_area)
    return results.segmented(time.perf_counter() - started, seconds)


class SegmenterLabeller(PixelLabeller[DecodedImage]):
    """Labels images with a trained segmenter; for batches, see `PixelLabeller`.

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
        return class_colours(self._segmenter.classes, self._segmenter.palette)

    def open(self) -> None:
        """No-op: the segmenter is already loaded."""

    def prepare(self, file: ImageContent, reading: Reading) -> DecodedImage:
        """Decode an image."""
        return DecodedImage(read_image(file, reading=reading), open_valid(file, reading))

    def compute(self, images: Sequence[DecodedImage]) -> Iterable[LabelledImage]:
        """Return images with their labels."""
        return (LabelledImage(image.pixels, self._labels_of(image)) for image in images)

    def _labels_of(self, image: DecodedImage) -> Segmentation:
        labels, confidence = (values.cpu() for values in self._segmenter.label(image.pixels))
        return Segmentation.of(labels, confidence, self._segmenter.classes, image.valid)
