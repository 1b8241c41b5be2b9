"""Implementation of `cribo segment`: add examples, label images and write the results."""

import errno
import logging
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, replace
from itertools import islice, tee
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from cribo.apps.segment.config import SegmentConfig
from cribo.apps.segment.instances import Splitter
from cribo.apps.segment.labeller import LabelledImage, Labeller, PixelLabeller
from cribo.apps.segment.large import LARGE_SUFFIX, LabelledLargeImage
from cribo.apps.segment.results import KIND, OUT, SUMMARY, Record, Segmented, changes_between
from cribo.apps.segment.suggesting import suggest
from cribo.apps.segment.targets import open_targets, place_of
from cribo.apps.segment.writing import LabelResults, ResultWriter, check_min_area
from cribo.base.bounds import at_least
from cribo.base.console import Phases
from cribo.base.devices import resolve_device, resolve_threads
from cribo.base.errors import DataError, FolderError, InputError, Stopped, UnreadableImage
from cribo.base.files import require, write_text
from cribo.base.job import Job, require_writable
from cribo.base.versions import versions
from cribo.base.wording import counted
from cribo.data.config import Reading, spread
from cribo.data.labelled.formats import find_examples, written_formats
from cribo.data.labelled.inputs import DecodedImage, decode_image
from cribo.data.labelled.label_maps import IGNORE_INDEX, Task
from cribo.data.labelled.segmentation import LabelledExamples
from cribo.data.sources.collection import ImageCollection, names_hash
from cribo.data.sources.images import collection_name, require_readable
from cribo.data.survey import surveyed
from cribo.features.memory.memory import SegmentationMemory
from cribo.features.memory.settings import SegmentationSettings
from cribo.features.memory.storage import memory_lock, stored_reading
from cribo.features.prefetching import prefetch
from cribo.features.reading import completed_for
from cribo.features.spread.engines import open_engine
from cribo.features.spread.parts import ImagePart, part_size
from cribo.features.spread.work import Engine
from cribo.features.stream import Streamed

log = logging.getLogger("cribo")

SUGGESTED, SUGGESTED_PICTURE = "suggested.txt", "suggested.png"

_MEMORY = "memory.safetensors"  # in the output folder, for workers in other processes
_MOST_IMAGES = 256  # limit per part; an interrupted part is labelled again
_OF_NAMES = (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL)  # too long or not allowed on the file system
_Labelled = LabelledImage | LabelledLargeImage
_WEAKEST = 3  # number of classes to name
_SUGGESTED_FROM = 300  # limit on the images to choose from


def segment_images(
    config: SegmentConfig,
    *,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    pictures: int = 6,
    suggestions: int = 0,
    write: Sequence[str] = (),
    write_min_area: int = 0,
    command: str = "",
    console: Console | None = None,
) -> Segmented:
    """Label images given a few examples, and write label maps, overlays, confidences and a summary.

    Args:
        config: options of the command.
        out: output folder; by default a numbered folder `segmented/<images>`. Images in it, or in `segmented`, are not
            labelled.
        resume: resume results in `out`, or without `out` in the last folder of this name, that were created with images
            of the same folder, the same memory and the same settings. New and changed images are labelled; results of
            images that were removed are kept.
        overwrite: replace existing results in `out`.
        pictures: number of images in the overview; 0 for no overview.
        suggestions: number of images to suggest for labelling next.
        write: formats of `LABEL_FORMATS` in which all labels are written, too.
        write_min_area: in these, regions with fewer pixels get the label of the nearest larger region.
        command: command line to record in the results.
        console: console for progress.

    Raises:
        ValueError: backbone, images, examples, memory, settings or folder are invalid, or no image can be read; raised
            before anything is written.
        FileNotFoundError: a file of the backbone, the examples or the images does not exist.
        ConnectionError: timm's weights cannot be downloaded.
        OSError: results cannot be written.
    """
    console = console or Console(quiet=True)
    started = time.perf_counter()
    at_least(0).check(pictures=pictures)
    check_min_area(write_min_area, write, config.instances)
    formats = written_formats(write)
    job = Job(
        out or OUT / f"{collection_name(config.images)}{config.share.suffix}",
        KIND,
        numbered=out is None,
        resume=resume,
        overwrite=overwrite,
        inputs=(
            config.images,
            config.examples,
            config.labels,
            config.classes,
            config.memory,
            config.backbone.source,
        ),
    )
    settings = SegmentationSettings(**config.settings)
    file = None if config.memory is None else Path(config.memory).expanduser()
    examples = None
    if file is None or not file.exists():
        settings = completed_for(config.backbone, settings)  # as in the training of the backbone
        if config.examples is not None:
            examples = _find_examples(config, settings)
            examples.reading = surveyed(examples)
            settings = replace(settings, range=examples.reading.range)
    known = {} if file is None else stored_reading(file).given
    reading = Reading(max_pixels=config.max_pixels, **{**known, **settings.given})
    images = open_targets(config.images, column=config.column, apart_from=out or OUT, reading=reading)
    require_readable(images, config.images, windows=not config.instances)
    collection = names_hash(images)
    images = images.part(config.share.of(range(len(images))))
    if not 0 <= suggestions <= len(images):
        raise InputError(f"--suggest must be from 0 to {len(images)}, the number of images, got {suggestions}")
    if file is not None:
        _check_memory_file(file, may_be_new=config.examples is not None)
    with ExitStack() as held:
        engine = held.enter_context(open_engine(config, writes_to=out or OUT))
        progress = held.enter_context(Phases(console))
        with nullcontext() if file is None or config.examples is None else memory_lock(file):
            memory, has_new, tasks = _open_memory(config, file, settings, examples, progress)
            _require_two_classes(memory)
            splitter = Splitter.of_names(config.instances, config.min_area, memory) if config.instances else None
            memory.fit(progress)
            describe_memory(memory, console)
            results = _Results(job, images, memory, config, splitter)
            results.require_writable(formats)
            held.enter_context(
                job.open(
                    results.identity(collection), command=command, share=str(config.share), changes=changes_between
                )
            )
            if file is not None and has_new:  # after all checks, so that a failed command leaves the file unchanged
                memory.save(file)
        # In this process, a small part loses less when it is interrupted, and costs nothing.
        size = config.batch_size if config.engine == "local" else part_size(len(images), most=_MOST_IMAGES)
        labeller = results.labeller()
        seconds = label_collection(results, images, labeller, progress, engine=engine, part_images=size)
        results.finish(results.about(command), seconds)
        if len(results.skipped) == len(images) and config.share.shares == 1:  # although one could be read at first
            raise Stopped(f"the images can no longer be read: see {SUMMARY} in {results.folder}")
        results.draw_overview(pictures)
        for each in formats:
            results.write(each, tasks, progress, min_area=write_min_area)
        if suggestions and results.records:
            _suggest(results, images, suggestions, progress)
        return results.segmented(time.perf_counter() - started, seconds)


# -------------------------------------------------------------------------------------------------------- memory


def _check_memory_file(file: Path, *, may_be_new: bool) -> None:
    if not may_be_new:
        require(file)
    if not file.parent.is_dir():
        raise FolderError(f"the folder of --memory {file} does not exist: create it, or choose another")
    if file.is_dir():
        raise FolderError(f"--memory {file} is a folder: give a file")
    if may_be_new:
        require_writable(file.parent, "--memory")


def _find_examples(
    config: SegmentConfig, settings: SegmentationSettings, known_classes: int | None = None
) -> LabelledExamples:
    return find_examples(
        config.examples or "",
        labels=config.labels,
        classes=config.classes,
        known_classes=known_classes,
        label_format=config.format,
        reading=replace(settings.reading, max_pixels=config.max_pixels),
    )


def _open_memory(
    config: SegmentConfig,
    file: Path | None,
    settings: SegmentationSettings,
    examples: LabelledExamples | None,
    progress: Phases,
) -> tuple[SegmentationMemory, bool, Mapping[str, Task]]:
    """Load the memory file or create a memory, and add the examples.

    Returns:
        The memory, whether examples are new, and what the tool of their labels knows of images.
    """
    device = resolve_device(config.device)
    options = {"device": device, "batch_size": config.batch_size}
    memory = None
    if file is not None and file.exists():
        memory = SegmentationMemory.load(file, config.backbone, changes=config.settings, **options)
    if config.examples is None:
        assert memory is not None  # `SegmentConfig` requires examples or a memory
        return memory, False, {}
    if memory is not None:
        examples = _find_examples(config, memory.settings, len(memory.classes))
    elif examples is None:
        examples = _find_examples(config, settings)
    if memory is None:
        memory = SegmentationMemory(
            config.backbone, classes=examples.new_classes, palette=examples.stated_palette, settings=settings, **options
        )
    elif (listed := examples.listed_classes) is not None and listed != memory.classes:
        raise DataError(
            f"the examples in {config.examples} have the classes {', '.join(listed)}, but the memory {file} has "
            f"{', '.join(memory.classes)}: use the same list for both, or create another memory"
        )
    memory.reading = examples.reading
    return memory, _add_examples(memory, examples, config, progress), examples.tasks


def _add_examples(
    memory: SegmentationMemory, examples: LabelledExamples, config: SegmentConfig, progress: Phases
) -> bool:
    """Add new examples to the memory; return whether the memory has changed."""
    changed = 0
    progress("examples", 0, len(examples))
    for start in range(0, len(examples), config.batch_size):
        part = range(start, min(len(examples), start + config.batch_size))
        changed += memory.extend([examples.example(number) for number in part])
        progress("examples", part[-1] + 1, len(examples))
    if changed < len(examples):
        log.info("already in the memory: %d of %s", len(examples) - changed, counted(len(examples), "example"))
    return changed > 0


def _require_two_classes(memory: SegmentationMemory) -> None:
    present = [name for name, count in zip(memory.classes, memory.holding, strict=True) if count]
    if len(present) == 1:
        raise DataError(
            f"the examples show only one class, {_named(present[0])}: label at least two. (In label maps, "
            f"{IGNORE_INDEX} means no class, unless all of them contain only 0 and {IGNORE_INDEX})"
        )


def describe_memory(memory: SegmentationMemory, console: Console) -> None:
    """Print the contents of the memory, the chosen probe, and its expected score."""
    about = (
        f"memory: {counted(len(memory), 'example')}, {counted(memory.patches, 'patch', 'patches')}, "
        f"{counted(len(memory.classes), 'class', 'classes')}"
    )
    for sentence in (about, *_describe_choice(memory)):
        console.print(sentence, markup=False, highlight=False)
    if memory.uncalibrated:
        log.warning("the confidence is not calibrated and may be far too high: %s", memory.uncalibrated)
    if memory.absent:
        log.warning("classes without examples, which are never predicted: %s", ", ".join(map(_named, memory.absent)))


def _describe_choice(memory: SegmentationMemory) -> list[str]:
    """Describe the chosen probe, its expected score, and the classes that need more examples."""
    choice, classes, holding = memory.fit(), memory.classes, memory.holding
    if choice.expected is None or choice.last_block is None:
        return [f"reads {choice.probe}; its score is unknown, because {memory.unmeasured}"]
    # With few examples of many classes, most classes are not measured, and often only the easiest are.
    score = f"{choice.expected:.0%} mIoU{choice.coverage(len(classes))}"
    compared = f"(nearest neighbours on the last block: {choice.last_block:.0%})"
    if len(memory) == 1:  # on CamVid the halves gave 42 %, new images 28 % (benchmarks/RESULTS.md)
        sentences = [
            f"reads {choice.probe}: {score} {compared} between the halves of the single example; "
            "new images reach much less. Add a second example for an estimate"
        ]
    else:
        sentences = [
            f"reads {choice.probe}: {score} expected from {len(memory)} examples {compared}; "
            f"measured by leaving out {choice.left_out}"
        ]
    weakest = sorted(choice.per_class, key=lambda label: choice.per_class[label])[:_WEAKEST]
    weak = [
        f"{_named(classes[label])}: {choice.per_class[label]:.0%} (in {counted(holding[label], 'example')})"
        for label in weakest
        if choice.per_class[label] < choice.expected
    ]
    if weak:
        sentences.append(f"weakest classes, which need more examples: {', '.join(weak)}")
    unmeasured = [_named(name) for c, name in enumerate(classes) if holding[c] and c not in choice.per_class]
    if unmeasured:
        sentences.append(f"not measured (in a single example only): {', '.join(unmeasured)}")
    return sentences


def _named(name: str) -> str:
    """Return the name of a class for a sentence."""
    return f"class {name}" if name.isdecimal() else name


# -------------------------------------------------------------------------------------------------------- images


def label_collection(
    results: LabelResults,
    images: ImageCollection,
    labeller: PixelLabeller[Any],
    progress: Phases,
    *,
    engine: Engine,
    part_images: int,
) -> float:
    """Label all images that are new or have changed, write their files, and record them.

    Args:
        results: folder of the results.
        images: the images.
        labeller: labels the images of a part.
        progress: progress display.
        engine: runs the work.
        part_images: number of images in a part; an interrupted part is labelled again.

    Returns:
        Duration in seconds.
    """
    done = results.resume(unit="images")
    parts = []
    for start in range(0, len(images), part_images):
        part = images.part(range(start, min(start + part_images, len(images))))
        names = map(part.name, range(len(part)))
        parts.append(ImagePart(part, [done[name].content if name in done else "" for name in names]))
    work = LabelParts(labeller, results.writer)
    progress("images", 0, len(images))
    begun = time.perf_counter()
    with closing(engine.run(work, parts)) as found:
        for part in found:
            results.skipped |= part.skipped
            results.reuse(done[name] for name in part.unchanged)
            results.add(part.records)
            progress("images", len(results.records) + len(results.skipped), len(images))
    return time.perf_counter() - begun


def _suggest(results: "_Results", images: ImageCollection, count: int, progress: Phases) -> None:
    """Write the names of the images to label next, and draw their present labels."""
    names = [name for name, record in results.records.items() if record.suffix != LARGE_SUFFIX]
    looked_at = [names[place] for place in spread(len(names), max(_SUGGESTED_FROM, count))]

    def decoded() -> Iterator[DecodedImage]:
        for done, name in enumerate(looked_at, start=1):
            yield decode_image(images.read(results.names[name]), images.reading)
            progress("images to label next", done, len(looked_at))

    chosen = [looked_at[index] for index in suggest(results.memory, decoded(), count)]
    write_text(results.folder / SUGGESTED, "".join(f"{name}\n" for name in chosen))
    results.draw(chosen, SUGGESTED_PICTURE)


class LabelledPart(NamedTuple):
    """Result of a part: records of newly labelled images, names of unchanged ones, and reasons for unreadable ones."""

    records: list[Record]
    unchanged: list[str]
    skipped: dict[str, str]


class LabelParts:
    """Labels the images of each part and writes their files; run by an engine."""

    def __init__(self, labeller: PixelLabeller[Any], writer: ResultWriter) -> None:
        self.labeller, self.writer = labeller, writer

    def __call__(self, parts: Iterable[ImagePart]) -> Generator[LabelledPart, None, None]:
        """Yield the result of each part, whose files are written."""
        labelled_next, written_next = tee(parts)
        threads = resolve_threads(self.labeller.workers)
        with closing(self.labeller.stream(labelled_next)) as labelled:
            written = prefetch(
                self._written,
                (each for _, images in labelled for each in images),
                threads=threads,
                ahead=2 * threads + self.labeller.batch_size,
                nbytes=lambda each, _: 0 if each.result is None else each.result.nbytes,
            )
            with closing(written):
                for part in written_next:
                    yield self._account(islice(written, len(part)))

    def _written(self, each: Streamed[_Labelled]) -> Record | Streamed[_Labelled]:
        """Write the files of an image; a name that cannot be written makes it unreadable."""
        if each.result is None:
            return each
        try:
            if isinstance(each.result, LabelledLargeImage):
                return self.writer.write_large(each.name, each.sha256, each.result)
            return self.writer.write(each.name, each.sha256, *each.result)
        except UnreadableImage as error:
            return Streamed(each.name, error=error)
        except OSError as error:
            if error.errno not in _OF_NAMES:
                raise
            reason = f"its results cannot be written: {error.strerror}"
            return Streamed(each.name, error=UnreadableImage(each.name, reason))

    @staticmethod
    def _account(written: Iterable[Record | Streamed[_Labelled]]) -> LabelledPart:
        """Sort the images of a part: newly labelled, unchanged, or unreadable."""
        part = LabelledPart([], [], {})
        for each in written:
            if isinstance(each, Record):
                part.records.append(each)
            elif each.unchanged:
                part.unchanged.append(each.name)
            else:
                part.skipped[each.name] = each.reason
        return part


# ------------------------------------------------------------------------------------------------------- results


class _Results(LabelResults):
    """The results of a memory."""

    def __init__(
        self,
        job: Job,
        images: ImageCollection,
        memory: SegmentationMemory,
        config: SegmentConfig,
        splitter: Splitter | None,
    ) -> None:
        super().__init__(job, images, memory.classes, memory.palette, splitter)
        self.memory, self.config = memory, config
        self.expected, self.uncalibrated = memory.fit().per_class, memory.uncalibrated
        self.place = place_of(images, config.images)

    def identity(self, collection: str) -> dict[str, Any]:
        """Return what must be equal to resume the results; `collection` is the hash of the names of all images."""
        memory = self.memory
        return {
            "folder": self.place,
            "collection": collection,
            "memory": memory.fingerprint,
            "examples": memory.names,
            "backbone": memory.backbone,
            "settings": asdict(memory.settings),
            "classes": self.classes,
            "choice": memory.fit().as_json(),
            **({"instances": self.split, "min_area": self.config.min_area} if self.split else {}),
        }

    def about(self, command: str) -> dict[str, Any]:
        """Describe the results for their readers."""
        memory = self.memory
        return {
            "command": command,
            "images": {"folder": self.place, "part": str(self.config.share), "found": len(self.images)},
            "memory": {
                "fingerprint": memory.fingerprint,
                "file": self.config.memory,
                "examples": memory.names,
                "patches": memory.patches,
            },
            "backbone": memory.backbone,
            "settings": asdict(memory.settings),
            "instances": self.split,
            "choice": memory.fit().as_json(),
            "confidence": "255 times the probability, 0 to 1, that the label is right"
            + (f"; not calibrated: {memory.uncalibrated}" if memory.uncalibrated else ""),
            "versions": versions(str(memory.encoder.device)),
        }

    def labeller(self) -> Labeller:
        """Return the unit of work; workers of another process open the memory from a file."""
        config, whole = self.config, self.splitter is not None
        if config.engine == "local":
            return Labeller(self.memory, batch_size=config.batch_size, workers=config.workers, whole=whole)
        file = self.folder / _MEMORY
        self.memory.save(file)
        options = {
            "batch_size": config.batch_size,
            "workers": config.workers,
            "device": config.device,
            "whole": whole,
        }
        return Labeller(file, config.backbone, **options)
