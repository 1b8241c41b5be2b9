"""The operations of a segmentation memory over HTTP."""

from collections.abc import Mapping
from dataclasses import asdict
from http import HTTPStatus
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cribo.base.packages import PACKAGE
from cribo.explorer.access import Denied
from cribo.explorer.serving.operations import Operation, Parameter
from cribo.explorer.serving.results import FEATURES, LABELS, Format, media_types
from cribo.explorer.serving.schemas import BINARY, array, integer, mapping, number, record, string
from cribo.explorer.serving.service import FIELD, Service

_PICTURE = {
    "image/*": BINARY,
    "application/octet-stream": BINARY,
    "multipart/form-data": record({FIELD: {"type": "string", "contentMediaType": "application/octet-stream"}}),
}
_OF_PICTURES = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.NOT_ACCEPTABLE,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.SERVICE_UNAVAILABLE,
)


def _format(request: Request, formats: Mapping[str, Format]) -> Format:
    """Return the format that the query or the Accept header of a request names; the first one by default."""
    name = request.query_params.get("format")
    if name is not None and name not in formats:
        raise Denied(HTTPStatus.BAD_REQUEST, f"format must be one of {', '.join(formats)}, got {name[:40]!r}.")
    if name is not None:
        return formats[name]
    accepted = [each.partition(";")[0].strip().lower() for each in request.headers.get("accept", "*/*").split(",")]
    for kind in accepted:
        for each in formats.values():
            if kind in ("*/*", each.media_type, f"{each.media_type.partition('/')[0]}/*"):
                return each
    raise Denied(
        HTTPStatus.NOT_ACCEPTABLE,
        f"Accept must be one of {', '.join(media_types(formats.values()))}, got {', '.join(accepted)[:80]!r}: or use "
        f"?format={next(iter(formats))}.",
    )


async def _segment(service: Service, request: Request) -> Response:
    return await service.compute(request, service.memory.segment, _format(request, LABELS).respond)


async def _features(service: Service, request: Request) -> Response:
    return await service.compute(request, service.memory.encode, _format(request, FEATURES).respond)


async def _memory(service: Service, request: Request) -> Response:
    memory = service.memory.memory
    choice = memory.fit() if len(memory) else None  # a new memory has no examples
    palette = [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in memory.palette]
    return JSONResponse(
        {
            "classes": memory.classes,
            "palette": palette,
            "examples": [
                {"name": name, "classes": memory.classes_of(number)} for number, name in enumerate(memory.names)
            ],
            "patches": memory.patches,
            "probe": "" if choice is None else str(choice.probe),
            "expected": None if choice is None else choice.expected,
            "uncalibrated": memory.uncalibrated,
            "settings": asdict(memory.settings),
            "fingerprint": memory.fingerprint,
            "problem": service.memory.problem,
        }
    )


async def _health(service: Service, request: Request) -> Response:
    file = service.memory
    state = "damaged" if file.problem else "current" if file.is_current else "changed"
    return JSONResponse(
        {
            "status": "degraded" if file.problem else "ok",
            "memory": state,
            "active": service.active,
            "device": str(file.device),
            "version": version(PACKAGE),
        }
    )


OPERATIONS = (
    Operation(
        *("POST", "/segment", "Label the pixels of a picture", _segment),
        media_types(LABELS.values()),
        description="The labels have the size of the picture. The picture is read as the examples of the memory were.",
        body=_PICTURE,
        parameters=[
            Parameter(
                "format",
                "runs: JSON with run lengths; polygons: JSON with polygons; png: a palette PNG of labels; confidence: "
                "a grey PNG of 255 times the confidence. By default, by the Accept header.",
                [*LABELS],
            )
        ],
        errors=_OF_PICTURES,
    ),
    Operation(
        *("POST", "/features", "Encode a picture", _features),
        media_types(FEATURES.values()),
        description="The features are those that the memory compares, of unit length in each block of the backbone.",
        body=_PICTURE,
        parameters=[
            Parameter(
                "format",
                "npy: a NumPy file of float32 (rows, columns, blocks, dimension) of the patches; vector: JSON with the "
                "global token. By default, by the Accept header.",
                [*FEATURES],
            )
        ],
        errors=_OF_PICTURES,
    ),
    Operation(
        *("GET", "/memory", "Describe the memory", _memory),
        {
            "application/json": record(
                {
                    "classes": array(string(), "names; label c is classes[c]"),
                    "palette": array(string(), "#rrggbb of each class"),
                    "examples": array(
                        record({"name": string(), "classes": mapping(number(), "share of each class")}),
                    ),
                    "patches": integer("number of labelled patches"),
                    "probe": string("what labels the patches; empty without examples"),
                    "expected": {
                        "type": ["number", "null"],
                        "description": "mIoU on left-out examples, 0 to 1; null if it cannot be measured",
                    },
                    "uncalibrated": string("why confidences are not calibrated; empty if they are"),
                    "settings": {"type": "object", "description": "settings of `cribo segment`"},
                    "fingerprint": string("of all on which labels depend"),
                    "problem": string("why the file, which has changed, cannot be read; empty if it can"),
                }
            )
        },
    ),
    Operation(
        *("GET", "/health", "Tell whether the server works", _health),
        {
            "application/json": record(
                {
                    "status": {"enum": ["ok", "degraded"]},
                    "memory": {
                        "enum": ["current", "changed", "damaged"],
                        "description": "changed: the file is read again with the next picture; damaged: the changed "
                        "file cannot be read, and the previous memory is still used",
                    },
                    "active": integer("number of pictures in progress"),
                    "device": string("of the backbone"),
                    "version": string("of cribo"),
                }
            )
        },
        is_public=True,
    ),
)
"""The operations of a memory; other tools' are tables of their own."""
