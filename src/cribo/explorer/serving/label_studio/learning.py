"""Annotations of Label Studio as examples of the memory: a queue, and a thread that learns them."""

import logging
import queue
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cribo.base.errors import DataError, InputError, UnreadableImage
from cribo.base.wording import counted, enumerated, is_utf8, printable
from cribo.data.labelled.inputs import DecodedImage, Example
from cribo.data.labelled.label_maps import IGNORE_INDEX
from cribo.data.labelled.label_studio import file_names, read_annotation
from cribo.data.labelled.regions import RegionSet, draw_regions, is_background, is_ignored
from cribo.data.labelled.scaling import Scaling
from cribo.explorer.access import Denied
from cribo.explorer.serving.growing import Change, GrowingMemory
from cribo.explorer.serving.label_studio.host import Host
from cribo.explorer.serving.label_studio.labelling import Labelling, class_of_labels
from cribo.explorer.serving.service import Service
from cribo.features.memory import SegmentationMemory
from cribo.features.memory.storage import memory_lock

log = logging.getLogger("cribo")

_NAME = re.compile(r".* \(task (\d+), annotation (\d+) of (\S+)\)", re.DOTALL)
_AT_ONCE = 8  # annotations for one choice of the probe, if so many are waiting
_MOST_WAITING = 10_000


@dataclass(frozen=True)
class Annotation:
    """A submitted annotation.

    Attributes:
        id: number in Label Studio.
        task: number of its task.
        content: the annotation, whose `result` has the regions of one image.
        address: of the image.
        file: name of the image.
        labelling: configuration of the project.
    """

    id: int
    task: int
    content: Mapping[str, Any]
    address: str
    file: str
    labelling: Labelling

    def __str__(self) -> str:
        return printable(f"annotation {self.id} of task {self.task} ({self.file:.80})")


@dataclass(frozen=True)
class Deleted:
    """Annotations that were deleted, or the annotations of tasks that were deleted."""

    annotations: frozenset[int] = frozenset()
    tasks: frozenset[int] = frozenset()

    def __str__(self) -> str:
        what, ids = ("annotation", self.annotations) if self.annotations else ("task", self.tasks)
        return f"deleted {what} {enumerated([*map(str, sorted(ids))])}"


@dataclass(frozen=True)
class Project:
    """All annotations of a project.

    Attributes:
        id: number of the project.
        labelling: its configuration.
    """

    id: int
    labelling: Labelling

    def __str__(self) -> str:
        return f"annotations of project {self.id}"


Event = Annotation | Deleted | Project


class Learner:
    """Learns annotations in a thread, in the order of their arrival; those that wait together at once.

    Label Studio waits for one second when it sends an annotation, so they are learned after its request.

    Args:
        service: what the routes of the server share; its memory grows.
        host: where the images are.
    """

    def __init__(self, service: Service, host: Host) -> None:
        assert isinstance(service.memory, GrowingMemory)
        self._service, self._memory, self._host = service, service.memory, host
        self._waiting: queue.Queue[Event | None] = queue.Queue()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="cribo-learner", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of unfinished events."""
        return self._waiting.unfinished_tasks

    def add(self, events: Sequence[Event]) -> None:
        """Learn events later.

        Raises:
            DataError: too many are waiting.
        """
        if self.waiting + len(events) > _MOST_WAITING:
            raise DataError(f"{self.waiting} annotations are waiting, and {_MOST_WAITING} is the limit: wait for them")
        for event in events:
            self._waiting.put(event)

    def join(self) -> None:
        """Wait until all events are finished."""
        self._waiting.join()

    def close(self) -> None:
        """Finish the annotations in progress, and discard those that wait."""
        self._is_closing = True
        self._waiting.put(None)
        self._thread.join()
        self._host.close()

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            events = [event]
            while len(events) < _AT_ONCE and not self._waiting.empty():
                if (following := self._waiting.get()) is None:
                    self._waiting.put(None)
                    break
                events.append(following)
            if self._is_closing:
                log.warning(
                    "%s were not learned before the end: start the training in Label Studio when the server runs again",
                    counted(len(events) + self._waiting.qsize() - 1, "annotation"),
                )
                return
            try:
                self._learn(events)
            except Exception:
                log.exception("error while learning annotations of Label Studio")
            finally:
                for _ in events:
                    self._waiting.task_done()

    def _learn(self, events: Iterable[Event]) -> None:
        changes: list[tuple[Event, Change]] = []
        for event in events:
            if isinstance(event, Project):
                self._apply(changes)
                changes = []
                self._learn_project(event)
            elif isinstance(event, Deleted):
                changes.append((event, partial(forget, deleted=event, host=self._host.name)))
            elif (change := self._example(event)) is not None:
                changes.append((event, change))
        self._apply(changes)

    def _learn_project(self, project: Project) -> None:
        try:
            annotations = annotations_of(self._host.tasks(project.id), project.labelling)
        except (InputError, OSError) as error:
            _report(project, error)
            return
        log.info("learning %s of project %d", counted(len(annotations), "annotation"), project.id)
        for start in range(0, len(annotations), _AT_ONCE):
            if self._is_closing:
                return
            self._learn(annotations[start : start + _AT_ONCE])

    def _example(self, annotation: Annotation) -> Change | None:
        """Return the change that adds an annotation; None if its image cannot be read."""
        try:
            image = self._service.decode(self._host.image(annotation.address))
        except (InputError, UnreadableImage, ImportError, OSError) as error:
            _report(annotation, self._service.as_denied(error))
            return None
        return partial(learn, annotation=annotation, image=image, host=self._host.name)

    def _apply(self, changes: Sequence[tuple[Event, Change]]) -> None:
        """Change the memory file, and report what could not be learned."""
        if not changes:
            return
        # Locked in this thread: while another command has the lock, the server still labels images.
        with memory_lock(self._memory.file):
            computed = [self._service.submit(self._memory.change, change) for _, change in changes]
            wait(computed)
        has_changed = False
        for (event, _), future in zip(changes, computed, strict=True):
            if (error := future.exception()) is not None:
                _report(event, error)
            else:
                has_changed |= future.result()
        if has_changed:
            expected = self._memory.memory.fit().expected if len(self._memory.memory) else None
            log.info(
                "learned from Label Studio: the memory has %s, expected mIoU %s",
                counted(len(self._memory.memory), "example"),
                "unknown" if expected is None else f"{expected:.1%}",
            )


def _report(event: Event, error: BaseException) -> None:
    if isinstance(error, InputError | OSError | Denied):
        log.warning("%s not learned: %s", event, error)
    else:
        log.error("%s not learned", event, exc_info=error)


def learn(memory: SegmentationMemory, *, annotation: Annotation, image: DecodedImage, host: str) -> bool:
    """Add an annotation to a memory; it replaces an example with the same pixels, or of the same task.

    Labels that are no classes of the memory become classes. Pixels without a label are background if the memory has
    this class, and have none otherwise.

    Raises:
        DataError: the regions are invalid, or label no pixel.
    """
    found = RegionSet(Path(f"annotation {annotation.id}"), [], [])
    regions = read_annotation(annotation.content, found, names=(annotation.file,), task=str(annotation.task))
    drawn = dict.fromkeys(region.label for region in regions.regions)
    matched = class_of_labels(drawn, memory.classes)
    fresh = [label for label in drawn if label not in matched and not is_ignored(label)]
    if invalid := [label for label in fresh if not label.strip() or not is_utf8(label)]:
        raise DataError(f"a label must be a text, got {invalid[0]!r:.40}")
    if fresh:
        memory.add_classes(fresh)
        log.info("new classes: %s", printable(enumerated(fresh)))
        matched |= {label: label for label in fresh}
    labels = {label: memory.classes.index(own) for label, own in matched.items()}
    labels |= {label: IGNORE_INDEX for label in drawn if label not in labels}
    rest = next((place for place, each in enumerate(memory.classes) if is_background(each)), IGNORE_INDEX)
    size = image.pixels.shape[1], image.pixels.shape[2]
    label_map = draw_regions(regions, Scaling.unscaled(size), labels, name=annotation.file, rest=rest).map
    name = f"{annotation.file} (task {annotation.task}, annotation {annotation.id} of {host})"
    changed = memory.extend([Example(image, label_map, name)]) > 0
    if changed:
        others = [place for place in _places(memory, host, tasks={annotation.task}) if memory.names[place] != name]
        if others:  # the task had another image
            memory.remove(others)
    return changed


def forget(memory: SegmentationMemory, *, deleted: Deleted, host: str) -> bool:
    """Remove the examples of deleted annotations from a memory.

    Raises:
        DataError: no example would be left.
    """
    places = _places(memory, host, annotations=deleted.annotations, tasks=deleted.tasks)
    if places:
        memory.remove(places)
    return bool(places)


def _places(
    memory: SegmentationMemory,
    host: str,
    *,
    annotations: Iterable[int] = (),
    tasks: Iterable[int] = (),
) -> list[int]:
    """Return the indices of the examples of some annotations or tasks of a host."""
    found = [_NAME.fullmatch(name) for name in memory.names]
    return [
        place
        for place, match in enumerate(found)
        if match is not None and match[3] == host and (int(match[2]) in annotations or int(match[1]) in tasks)
    ]


# -------------------------------------------------------------------------------------------------------- requests


def annotations_of(tasks: Iterable[Mapping[str, Any]], labelling: Labelling) -> list[Annotation]:
    """Return the last annotation that was not cancelled of each task that has one.

    Raises:
        DataError: a task or an annotation is invalid.
    """
    found = []
    for task in tasks:
        annotations = task.get("annotations")
        done = [
            each
            for each in (annotations if isinstance(annotations, list) else [])
            if isinstance(each, Mapping) and not each.get("was_cancelled")
        ]
        if done:
            found.append(annotation_of(done[-1], task, labelling))
    return found


def annotation_of(annotation: object, task: object, labelling: Labelling) -> Annotation:
    """Return an annotation of a request.

    Raises:
        DataError: it is invalid.
    """
    if not isinstance(annotation, Mapping) or not isinstance(task, Mapping):
        raise DataError(f"an annotation and its task must be objects, got {annotation!r:.40} and {task!r:.40}")
    number, address = number_of(task, "task"), labelling.address(task.get("data"))
    return Annotation(
        id=number_of(annotation, "annotation"),
        task=number,
        content=labelling.own(annotation),
        address=address,
        file=_file_name(address) or f"image of task {number}",
        labelling=labelling,
    )


def _file_name(address: str) -> str:
    """Return the name of an uploaded file; empty without one."""
    if address[:5].lower() == "data:":
        return ""
    names = file_names(address)
    return names[1] if len(names) == 3 else names[0]  # without the prefix of uploaded files


def number_of(value: object, what: str) -> int:
    """Return the id of an object of a request.

    Raises:
        DataError: it has none.
    """
    found = value.get("id") if isinstance(value, Mapping) else None
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < 2**63:
        raise DataError(f"the {what} must have a number as id, got {found!r:.40}")
    return found
