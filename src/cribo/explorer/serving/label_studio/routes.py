"""The operations of an ML backend of Label Studio 1.x, from its requests (`label_studio.ml.api_connector`)."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cribo.base.errors import DataError, InputError
from cribo.base.wording import enumerated, printable
from cribo.data.labelled.inputs import DecodedImage
from cribo.explorer.access import Denied
from cribo.explorer.serving.label_studio.host import Host
from cribo.explorer.serving.label_studio.labelling import Labelling, differences, read_labelling
from cribo.explorer.serving.label_studio.learning import (
    Deleted,
    Event,
    Learner,
    Project,
    annotation_of,
    annotations_of,
    number_of,
)
from cribo.explorer.serving.label_studio.predictions import model_version, nothing, predicted
from cribo.explorer.serving.operations import Operation
from cribo.explorer.serving.schemas import Schema, array, integer, number, record, string
from cribo.explorer.serving.service import Service

log = logging.getLogger("cribo")

_MOST_TASKS = 1000


class MLBackend:
    """The ML backend of a host of Label Studio.

    Args:
        service: what the routes of the server share; its memory is a `GrowingMemory`.
        host: the host.

    Attributes:
        learner: learns annotations.
    """

    def __init__(self, service: Service, host: Host) -> None:
        self._service, self._host = service, host
        self.learner = Learner(service, host)
        self._described: tuple[str, ...] = ()

    def close(self) -> None:
        """Finish what is being learned."""
        self.learner.close()

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The table of operations; `GET /health` is that of the server."""
        return (
            Operation(
                *("POST", "/setup", "Label Studio: prepare for a project", self._setup),
                {
                    "application/json": record(
                        {
                            "model_version": _VERSION,
                            "new_labels": array(string(), "labels of the project that are no classes of the memory"),
                            "other_classes": array(string(), "classes of the memory that the project does not label"),
                        }
                    )
                },
                description="Checks the labelling configuration (`schema`).",
                body=_json({"schema": _CONFIG}),
                errors=_ERRORS,
            ),
            Operation(
                *("POST", "/predict", "Label Studio: predict the regions of tasks", self._predict),
                {"application/json": record({"results": array(_PREDICTION), "model_version": _VERSION})},
                description="Images are fetched from the host of --label_studio; of others, only data: URIs are read. "
                "If the image of one of many tasks cannot be read, its prediction has no regions, and an error.",
                body=_json({"label_config": _CONFIG, "tasks": array(_TASK, f"up to {_MOST_TASKS}")}),
                errors=(*_ERRORS, HTTPStatus.SERVICE_UNAVAILABLE),
            ),
            Operation(
                *("POST", "/webhook", "Label Studio: learn an annotation, or forget it", self._webhook),
                {"application/json": _LEARNING},
                description="Annotations are learned after the response: /versions shows a new version then. "
                "START_TRAINING learns all annotations of a project. Other actions are ignored.",
                body=_json({"action": string("such as ANNOTATION_CREATED")}),
                errors=(*_ERRORS, HTTPStatus.SERVICE_UNAVAILABLE),
            ),
            Operation(
                *("POST", "/train", "Label Studio: learn annotations", self._train),
                {"application/json": _LEARNING},
                body=_json({"label_config": _CONFIG, "annotations": array(_TASK, "tasks with annotations")}),
                errors=(*_ERRORS, HTTPStatus.SERVICE_UNAVAILABLE),
            ),
            Operation(
                *("GET", "/versions", "Label Studio: list the version of the memory", self._versions),
                {"application/json": record({"versions": array(_VERSION), "learning": _WAITING})},
            ),
        )

    async def _setup(self, service: Service, request: Request) -> Response:
        labelling = _labelling((await service.json(request)).get("schema"))
        memory = service.memory.memory
        lacking, others = differences(labelling.labels, memory.classes)
        self._describe(lacking, others)
        return JSONResponse({"model_version": model_version(memory), "new_labels": lacking, "other_classes": others})

    def _describe(self, lacking: list[str], others: list[str]) -> None:
        """Log how labels and classes differ; Label Studio sends its setup before each prediction."""
        if (described := (*lacking, "/", *others)) == self._described:
            return
        self._described = described
        if lacking:
            log.info("labels that are no classes of the memory yet: %s", printable(enumerated(lacking)))
        if others:
            log.info("classes of the memory that the project does not label: %s", printable(enumerated(others)))

    async def _predict(self, service: Service, request: Request) -> Response:
        content = await service.json(request)
        labelling, tasks = _labelling(content.get("label_config")), content.get("tasks")
        if not isinstance(tasks, list) or not 1 <= len(tasks) <= _MOST_TASKS:
            raise Denied(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                f"tasks must be a list of 1 to {_MOST_TASKS} tasks, got {tasks!r:.60}.",
            )
        if not len(service.memory.memory) and service.memory.is_current:
            results = [nothing(service.memory.memory) for _ in tasks]
        else:
            async with service.admitted():
                results = await self._predictions(request, tasks, labelling)
        return JSONResponse({"results": results, "model_version": results[-1]["model_version"]})

    async def _predictions(self, request: Request, tasks: list[Any], labelling: Labelling) -> list[dict[str, Any]]:
        """Return the prediction of each task; raise the first error if no image can be used."""
        service = self._service

        async def one(task: Any) -> dict[str, Any]:
            def read() -> DecodedImage:
                data = task.get("data") if isinstance(task, Mapping) else None
                return service.decode(self._host.image(labelling.address(data)))

            def encode(labelled: Any) -> dict[str, Any]:
                return predicted(labelled, labelling)

            return await service.process(request, read, service.memory.segment, encode)

        found = await asyncio.gather(*map(one, tasks), return_exceptions=True)
        errors = [each for each in found if isinstance(each, BaseException)]
        of_images = [each for each in errors if isinstance(each, Denied) and each.status in _OF_IMAGES]
        if len(errors) > len(of_images) or len(errors) == len(found):
            raise next((each for each in errors if each not in of_images), errors[0])
        for task, each in zip(tasks, found, strict=True):
            if isinstance(each, BaseException):
                log.warning("no prediction for task %s: %s", _number(task), printable(str(each)))
        return [
            {**nothing(service.memory.memory), "error": str(each)} if isinstance(each, BaseException) else each
            for each in found
        ]

    async def _webhook(self, service: Service, request: Request) -> Response:
        content = await service.json(request)
        with _unprocessable():
            events = _events(content)
        return self._learn(events)

    async def _train(self, service: Service, request: Request) -> Response:
        content = await service.json(request)
        labelling, tasks = _labelling(content.get("label_config")), content.get("annotations")
        if not isinstance(tasks, list):
            raise Denied(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                f"annotations must be a list of tasks with annotations, got {tasks!r:.40}.",
            )
        with _unprocessable():
            annotations = annotations_of((task for task in tasks if isinstance(task, Mapping)), labelling)
        return self._learn(annotations)

    def _learn(self, events: list[Any]) -> Response:
        try:
            self.learner.add(events)
        except InputError as error:
            raise Denied(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}.", {"retry-after": "60"}) from error
        return JSONResponse({"learning": self.learner.waiting})

    async def _versions(self, service: Service, request: Request) -> Response:
        return JSONResponse({"versions": [model_version(service.memory.memory)], "learning": self.learner.waiting})


def _number(task: object) -> str:
    """Format the id of a task for error messages."""
    return f"{task.get('id')!r:.20}" if isinstance(task, Mapping) else "?"


def _labelling(config: object) -> Labelling:
    with _unprocessable():
        return read_labelling(config)


@contextmanager
def _unprocessable() -> Iterator[None]:
    """Turn an InputError into a response with status 422."""
    try:
        yield
    except InputError as error:
        raise Denied(HTTPStatus.UNPROCESSABLE_ENTITY, f"{error}.") from error


def _events(content: Mapping[str, Any]) -> list[Event]:
    """Return what a webhook changes.

    Raises:
        DataError: the content is invalid.
    """
    action = content.get("action")
    if not isinstance(action, str):
        raise DataError(f"action must be a text, such as ANNOTATION_CREATED, got {action!r:.40}")
    if action in ("ANNOTATIONS_DELETED", "TASKS_DELETED"):
        what = "annotations" if action == "ANNOTATIONS_DELETED" else "tasks"
        ids = frozenset(number_of(each, "annotation or task") for each in _listed(content.get(what)))
        return [Deleted(**{what: ids})] if ids else []
    if action not in ("ANNOTATION_CREATED", "ANNOTATION_UPDATED", "ANNOTATIONS_CREATED", "START_TRAINING"):
        return []
    project = content.get("project")
    labelling = read_labelling(project.get("label_config") if isinstance(project, Mapping) else None)
    if action == "START_TRAINING":
        return [Project(number_of(project, "project"), labelling)]
    annotations, tasks = _listed(content.get("annotation")), _listed(content.get("task"))
    events: list[Event] = []
    if len(annotations) != len(tasks):
        raise DataError(f"each annotation must have its task, got {len(annotations)} and {len(tasks)}")
    for annotation, task in zip(annotations, tasks, strict=True):
        if isinstance(annotation, Mapping) and annotation.get("was_cancelled"):
            events.append(Deleted(annotations=frozenset({number_of(annotation, "annotation")})))
        else:
            events.append(annotation_of(annotation, task, labelling))
    return events


def _listed(value: object) -> list[Any]:
    """Wrap a single object in a list."""
    return value if isinstance(value, list) else [value]


def _json(fields: Mapping[str, Schema]) -> Mapping[str, Schema]:
    return {"application/json": record(fields)}


_CONFIG = string("XML with BrushLabels, PolygonLabels or RectangleLabels for an Image")
_VERSION = string("version of the memory, which changes with its examples")
_TASK: Schema = {"type": "object", "description": "a task of Label Studio, with its data"}
_WAITING = integer("number of annotations that are being learned")
_LEARNING = record({"learning": _WAITING})
_PREDICTION = record(
    {
        "model_version": _VERSION,
        "score": number("mean confidence, 0 to 1"),
        "result": array({"type": "object"}, "regions in Label Studio's format"),
    }
)
_OF_IMAGES = (
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)
_ERRORS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)
