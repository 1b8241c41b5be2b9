"""Implementation of `cribo segment --video`: propagate the labels of some frames to all frames of their videos."""

import hashlib
import os
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice, pairwise
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from rich.console import Console
from torch import Tensor

from cribo.apps.segment.config import VideoConfig
from cribo.apps.segment.results import OUT, Segmented
from cribo.apps.segment.targets import open_targets, result_name
from cribo.apps.segment.writing import LabelResults, check_min_area
from cribo.base.bounds import at_least
from cribo.base.colours import class_colours
from cribo.base.console import Phases
from cribo.base.devices import resolve_device, resolve_threads
from cribo.base.errors import DataError, UnreadableImage
from cribo.base.job import Job
from cribo.base.versions import versions
from cribo.base.wording import counted
from cribo.data.config import Reading
from cribo.data.labelled.formats import find_examples, find_maps, written_formats
from cribo.data.labelled.label_maps import IGNORE_INDEX
from cribo.data.labelled.segmentation import LabelledExamples
from cribo.data.sources.clips import videos_in
from cribo.data.sources.images import EncodedImages, ImageSource, collection_name, require_readable
from cribo.data.sources.video_files import VideoFiles, has_video_files, open_video_files
from cribo.data.survey import surveyed
from cribo.features.config import PropagationSettings
from cribo.features.encoder import Encoder, open_network
from cribo.features.memory.memory import Segmentation
from cribo.features.prefetching import prefetch
from cribo.features.probes.examples import content_hash
from cribo.features.propagation import encode_frames, frame_labels, propagate, soft_labels
from cribo.features.reading import completed_for

KIND = "video segmentation"

_UNCALIBRATED = "it is the share of the most similar patches that have this label"


def segment_video(
    config: VideoConfig,
    settings: PropagationSettings | None = None,
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
    """Label all frames of videos given some labelled frames, and write label maps, overlays and a summary.

    Labels are propagated as in DINO's `eval_video_segmentation.py`, forwards from each labelled frame and backwards
    from the next one; between the two, the mean of both is weighted by the distance in frames. Labelled frames keep
    their labels.

    Args:
        config: options of the command.
        settings: settings of the propagation.
        out: output folder; by default a numbered folder `segmented/<images>`.
        resume: resume results in `out` with the same frames, labels and settings.
        overwrite: replace existing results in `out`.
        pictures: number of frames in the overview; 0 for no overview.
        write: formats of `LABEL_FORMATS` in which all labels are written, too.
        write_min_area: in these, regions with fewer pixels get the label of the nearest larger region.
        command: command line to record in the results.
        console: console for progress.

    Raises:
        ValueError: an option is invalid; a labelled frame is not among the frames, or a video has none; raised before
            anything is written. Or the frames of a video differ in size.
        FileNotFoundError: a file of the backbone, the labels or the frames does not exist.
        OSError: results cannot be written.
    """
    console, settings, started = console or Console(quiet=True), settings or PropagationSettings(), time.perf_counter()
    at_least(0).check(pictures=pictures)
    check_min_area(write_min_area, write)
    formats = written_formats(write)
    job = Job(
        out or OUT / collection_name(config.images),
        KIND,
        numbered=out is None,
        resume=resume,
        overwrite=overwrite,
        inputs=(config.images, config.examples, config.labels, config.classes, config.backbone.source),
    )
    config = replace(config, reading=completed_for(config.backbone, config.reading))
    frames = _open_frames(config.images, out or OUT, config.reading)
    if isinstance(frames, EncodedImages):
        frames.reading = surveyed(frames)
        config = replace(config, reading=frames.reading)
    require_readable(frames, config.images)
    examples = _open_labels(config)
    network, about = open_network(config.backbone, in_chans=config.reading.in_chans)
    encoder = Encoder(network.eval().to(resolve_device(config.device)))
    videos = _Videos(frames, examples, encoder, settings, config)
    identity = {
        "folder": config.images,
        "frames": len(frames),
        "labels": videos.labels_hash,
        "backbone": about,
        "settings": asdict(settings),
        "classes": videos.classes,
    }
    results = LabelResults(job, frames, videos.classes, videos.palette)
    results.require_writable(formats)
    results.uncalibrated = _UNCALIBRATED
    about_results = {
        "command": command,
        "images": {"folder": config.images},
        **identity,
        "confidence": f"255 times the confidence, 0 to 1; not calibrated: {_UNCALIBRATED}",
        "versions": versions(str(encoder.device)),
    }
    with Phases(console) as progress, job.open(identity, command=command):
        seconds = _label_frames(videos, results, progress)
        results.finish(about_results, seconds)
        results.draw_overview(pictures)
        for each in formats:
            results.write(each, examples.tasks, progress, min_area=write_min_area)
    return results.segmented(time.perf_counter() - started, seconds)


_Segmented = tuple[int, UInt8[Tensor, "c h w"], Segmentation]
"""Index of a frame, its pixels and its labels."""


def _label_frames(videos: "_Videos", results: LabelResults, progress: Phases) -> float:
    """Label the frames that are not labelled yet, span by span, write their files, and return the duration."""
    names, done = videos.names, results.resume(unit="frames")
    todo = [span for span in videos.spans if any(names[index] not in done for index in span.inner)]
    again = {names[index] for span in todo for index in span.inner}
    results.reuse(done[name] for name in names if name in done and name not in again)
    results.skipped, writer = videos.skipped, results.writer
    progress("frames", results.reused, len(names))
    begun = time.perf_counter()
    given = (index for index in videos.labels if names[index] not in done)
    for found in (videos.given(given), *(videos.propagated(span, results.folder) for span in todo)):
        for index, image, segmentation in found:
            results.add([writer.write(names[index], "", image, segmentation)])
            progress("frames", len(results.records) + len(results.skipped), len(names))
    return time.perf_counter() - begun


def _open_frames(source: str, out: Path, reading: Reading) -> ImageSource:
    path = Path(source).expanduser()
    if has_video_files(path):
        return open_video_files(path, reading=reading)
    return open_targets(source, apart_from=out, reading=reading)


def _open_labels(config: VideoConfig) -> LabelledExamples:
    if config.examples is None:
        assert config.labels is not None  # `VideoConfig` requires one of them
        return find_maps(config.labels, classes=config.classes)
    return find_examples(
        config.examples,
        labels=config.labels,
        classes=config.classes,
        label_format=config.format,
        reading=config.reading,
    )


def match_frames(labelled: LabelledExamples, frames: ImageSource) -> dict[int, int]:
    """Map the index of each labelled image to that of its frame, which has the same path or file name.

    Raises:
        DataError: there is no such frame or several, or two labelled images have the same one.
    """
    by_name: dict[str, list[int]] = {}
    for index in range(len(frames)):
        name = result_name(frames.name(index))
        for key in {name, PurePosixPath(name).name}:
            by_name.setdefault(key, []).append(index)
    found: dict[int, int] = {}
    for place in range(len(labelled)):
        name = result_name(labelled.name(place))
        indices = by_name.get(name) or by_name.get(PurePosixPath(name).name) or []
        if len(indices) != 1:
            reason = "is not the name of a frame" if not indices else f"is the name of {len(indices)} frames"
            raise DataError(
                f"the labelled frame {labelled.name(place)} {reason}: give it the name of its frame, such as "
                f"{result_name(frames.name(0))}"
            )
        if indices[0] in found.values():
            raise DataError(f"two labelled images have the name of the frame {frames.name(indices[0])}: remove one")
        found[place] = indices[0]
    return found


@dataclass(frozen=True)
class Span:
    """Consecutive frames of a video whose first or last frame, or both, are labelled.

    Attributes:
        frames: their indices.
        first: whether the first one is labelled.
        last: whether the last one is labelled.
    """

    frames: Sequence[int]
    first: bool
    last: bool

    @property
    def inner(self) -> Sequence[int]:
        """The frames without labels."""
        return self.frames[int(self.first) : len(self.frames) - int(self.last)]


def find_spans(names: Sequence[str], labelled: Collection[int]) -> list[Span]:
    """Divide videos into spans that begin or end at labelled frames.

    Args:
        names: names of all frames, of any number of videos.
        labelled: indices of the labelled frames.

    Raises:
        DataError: a video has no labelled frame.

    Example:
        >>> [list(span.frames) for span in find_spans(["1.png", "2.png", "3.png", "4.png"], [1])]
        [[0, 1], [1, 2, 3]]
    """
    spans: list[Span] = []
    videos = videos_in(names)
    without = [video for video in videos if not any(index in labelled for index in video)]
    if without:
        raise DataError(
            f"{len(without)} of {counted(len(videos), 'video')} have no labelled frame, the first is that of "
            f"{names[without[0][0]]}: label one of its frames, or leave it out. (Frames of a video have names that "
            "differ in their last number only)"
        )
    for video in videos:
        ends = [place for place, index in enumerate(video) if index in labelled]
        spans.append(Span(video[: ends[0] + 1], first=False, last=True))
        spans += [Span(video[start : stop + 1], first=True, last=True) for start, stop in pairwise(ends)]
        spans.append(Span(video[ends[-1] :], first=True, last=False))
    return [span for span in spans if span.inner]


class _Frame(NamedTuple):
    """A frame with its patch features of unit length. If these are on disk, its pixels are read again."""

    number: int
    size: tuple[int, int]
    features: Float[Tensor, "rows columns d"]
    image: UInt8[Tensor, "c h w"] | None


class _Videos:
    """The frames of all videos, of which some have labels.

    Raises DataError if a labelled frame is unreadable or differs from its labels in size, and see `match_frames` and
    `find_spans`.

    Attributes:
        frames: the frames.
        names: their names.
        labels: label map of each labelled frame, by its index.
        spans: the spans between labelled frames.
        skipped: reasons why frames could not be read, by name.
    """

    def __init__(
        self,
        frames: ImageSource,
        examples: LabelledExamples,
        encoder: Encoder,
        settings: PropagationSettings,
        config: VideoConfig,
    ) -> None:
        self.frames, self.settings = frames, settings
        self.names = [frames.name(index) for index in range(len(frames))]
        maps = {index: examples.label_map(place) for place, index in match_frames(examples, frames).items()}
        self.labels = {index: found.labels for index, found in maps.items()}
        self.spans = find_spans(self.names, self.labels.keys())
        self.classes = list(examples.classes)
        stated = examples.stated_palette or next((found.palette for found in maps.values() if found.palette), None)
        self.palette = class_colours(self.classes, stated or ())
        self.skipped: dict[str, str] = {}
        self._encoder, self._batch_size = encoder, config.batch_size
        # Frames of a file are decoded one after the other.
        self._threads = 1 if isinstance(frames, VideoFiles) else resolve_threads(config.workers)
        for index in self.labels:  # before any work
            self._labelled(index)

    @property
    def labels_hash(self) -> str:
        """Hash of the labels and the names of their frames."""
        hashes = [f"{self.names[index]} {content_hash(labels)}" for index, labels in sorted(self.labels.items())]
        return hashlib.sha256("\n".join(hashes).encode()).hexdigest()

    def given(self, indices: Iterable[int]) -> Iterator[_Segmented]:
        """Yield labelled frames with their own labels."""
        for index in indices:
            image, labels = self._labelled(index), self.labels[index]
            yield index, image, Segmentation.of(labels, (labels != IGNORE_INDEX).float(), self.classes)

    @torch.no_grad()
    def propagated(self, span: Span, folder: Path) -> Iterator[_Segmented]:
        """Yield the inner frames of a span with their labels, in order.

        Args:
            span: the span.
            folder: folder for a temporary file of features, which are needed twice if the last frame is labelled.
        """
        if not span.last:
            for frame, labels in self._along(self._encoded(span.frames)):
                yield self._labels_of(frame, labels)
            return
        with tempfile.TemporaryFile(dir=folder) as file:
            kept = [
                frame._replace(features=_on_disk(frame.features, file), image=None)
                for frame in self._encoded(span.frames)
            ]
            backwards = {frame.number: labels.half().cpu() for frame, labels in self._along(reversed(kept))}
            if not span.first:
                for frame in kept[:-1]:
                    yield self._labels_of(frame, backwards[frame.number].float())
                return
            share = {number: place / (len(span.frames) - 1) for place, number in enumerate(span.frames)}
            for frame, labels in self._along(iter(kept[:-1])):
                later = backwards[frame.number].to(labels)
                yield self._labels_of(frame, labels.lerp(later, share[frame.number]))

    def _along(self, frames: Iterator[_Frame]) -> Iterator[tuple[_Frame, Float[Tensor, "rows columns c"]]]:
        """Propagate the labels of the first frame, and yield the other frames with their labels."""
        first = next(frames)
        current = first

        def features() -> Iterator[Tensor]:
            nonlocal current
            for current in chain([first], frames):
                yield current.features.to(self._encoder.device).float()

        rows, columns, _ = first.features.shape
        given = soft_labels(self.labels[first.number], (rows, columns), len(self.classes))
        for labels in propagate(features(), given, self.settings):
            yield current, labels

    def _encoded(self, indices: Sequence[int]) -> Iterator[_Frame]:
        """Yield the readable frames with their features."""
        height, width = self.labels[next(index for index in (indices[0], indices[-1]) if index in self.labels)].shape
        size = height, width
        read = prefetch(
            self._read,
            indices,
            threads=self._threads,
            ahead=self._threads + 2 * self._batch_size,
            nbytes=lambda _, found: None if found is None else getattr(found, "nbytes", 0),
        )
        with closing(read):
            found = ((index, image) for index, image in zip(indices, read, strict=True) if image is not None)
            while batch := list(islice(found, self._batch_size)):
                for index, image in batch:
                    self._require_size(index, image, size)
                features = encode_frames([image for _, image in batch], self._encoder, self.settings)
                for (index, image), own in zip(batch, features, strict=True):
                    yield _Frame(index, size, own, image)

    def _read(self, index: int) -> UInt8[Tensor, "c h w"] | None:
        """Read a frame; None if it is unreadable and has no labels."""
        if index in self.labels:
            return self._labelled(index)
        try:
            return self.frames.load(index)
        except UnreadableImage as error:
            self.skipped[self.names[index]] = error.reason
            return None

    def _labelled(self, index: int) -> UInt8[Tensor, "c h w"]:
        """Read a labelled frame."""
        try:
            image = self.frames.load(index)
        except UnreadableImage as error:
            raise DataError(f"a labelled frame cannot be read: {error}") from error
        self._require_size(index, image, self.labels[index].shape)
        return image

    def _require_size(self, index: int, image: UInt8[Tensor, "c h w"], size: tuple[int, ...]) -> None:
        if image.shape[1:] != size:
            raise DataError(
                f"{self.names[index]}: all frames of a video must have the size of its labels, {size[1]} x {size[0]}, "
                f"got {image.shape[2]} x {image.shape[1]}: resize the frames, or label another one of this video"
            )

    def _labels_of(self, frame: _Frame, labels: Float[Tensor, "rows columns c"]) -> _Segmented:
        found = frame_labels(labels, self._encoder.patch_size, frame.size)
        unknown = found.confidence <= 0  # only near patches without a class
        labelled = found.labels.masked_fill(unknown, IGNORE_INDEX)
        image = self.frames.load(frame.number) if frame.image is None else frame.image
        return frame.number, image, Segmentation.of(labelled, found.confidence, self.classes)


def _on_disk(features: Float[Tensor, "rows columns d"], file: IO[bytes]) -> Float[Tensor, "rows columns d"]:
    """Append features to a file in half precision, and return them as a memory-mapped tensor."""
    values = features.half().cpu().numpy()
    start = file.seek(0, os.SEEK_END)
    file.write(values.tobytes())
    file.flush()
    return torch.from_numpy(np.memmap(file, values.dtype, "r+", start, values.shape))
