"""Results as responses: a table of formats, by name and by media type."""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.responses import JSONResponse, Response

from cribo.data.labelled.label_maps import IGNORE_INDEX, write_labels
from cribo.data.labelled.regions import trace
from cribo.explorer.painting import to_runs
from cribo.explorer.serving.memory_file import Features, Labelled
from cribo.explorer.serving.schemas import (
    BINARY,
    Schema,
    array,
    integer,
    mapping,
    number,
    record,
    string,
)
from cribo.features.memory.pixels import write_confidence


@dataclass(frozen=True)
class Format:
    """A format of results.

    Attributes:
        media_type: of the response.
        schema: of the response, for OpenAPI.
        respond: encodes a result.
    """

    media_type: str
    schema: Schema
    respond: Callable[[Any], Response]


def _labels_png(labelled: Labelled) -> Response:
    content = io.BytesIO()
    write_labels(labelled.found.labels, labelled.memory.palette, content)
    return Response(content.getvalue(), media_type="image/png")


def _confidence_png(labelled: Labelled) -> Response:
    content = io.BytesIO()
    write_confidence(labelled.found.confidence, content)
    return Response(content.getvalue(), media_type="image/png")


def _runs(labelled: Labelled) -> Response:
    return JSONResponse({**_about(labelled), "runs": to_runs(labelled.found.labels)})


def _polygons(labelled: Labelled) -> Response:
    labels, classes = labelled.found.labels.numpy(), labelled.memory.classes
    polygons = [
        {"class": classes[region.label], "rings": region.rings} for region in trace(labels, range(len(classes)))
    ]
    return JSONResponse({**_about(labelled), "polygons": polygons})


def _about(labelled: Labelled) -> dict[str, Any]:
    """Return the size of an image, and the share and mean confidence of each class."""
    found, memory = labelled.found, labelled.memory
    height, width = found.labels.shape
    places = {name: found.labels == memory.classes.index(name) for name in found.shares}
    confidence = {name: float(found.confidence[place].mean()) for name, place in places.items()}
    return {
        "width": width,
        "height": height,
        "classes": memory.classes,
        "shares": dict(found.shares),
        "confidence": {"mean": float(found.confidence.mean()), "classes": confidence},
        "calibrated": not memory.uncalibrated,
        "memory": memory.fingerprint,
    }


def _npy(features: Features) -> Response:
    content = io.BytesIO()
    np.save(content, features.patches.numpy(), allow_pickle=False)
    return Response(content.getvalue(), media_type="application/octet-stream")


def _vector(features: Features) -> Response:
    rows, columns, blocks, dim = features.patches.shape
    return JSONResponse({"global": features.global_token.tolist(), "patches": [rows, columns, blocks, dim]})


_ABOUT = {
    "width": integer("in pixels"),
    "height": integer("in pixels"),
    "classes": array(string(), "names; label c is classes[c]"),
    "shares": mapping(number(), "share of the pixels, 0 to 1, of each class that occurs"),
    "confidence": record(
        {"mean": number("0 to 1"), "classes": mapping(number(), "mean over the pixels of each class")}
    ),
    "calibrated": {"type": "boolean", "description": "whether confidences are calibrated on the examples"},
    "memory": string("fingerprint of the memory that predicted the labels"),
}

LABELS = {
    "runs": Format(
        "application/json",
        record(
            {
                **_ABOUT,
                "runs": array(
                    integer(), f"label, length, label, length, and so on, row by row; {IGNORE_INDEX} is no class"
                ),
            }
        ),
        _runs,
    ),
    "polygons": Format(
        "application/json",
        record(
            {
                **_ABOUT,
                "polygons": array(
                    record(
                        {
                            "class": string("name of the class"),
                            "rings": array(
                                array(array(integer())), "(x, y) of the outer border, then of the holes, on pixel edges"
                            ),
                        }
                    )
                ),
            }
        ),
        _polygons,
    ),
    "png": Format("image/png", BINARY, _labels_png),
    "confidence": Format("image/png", BINARY, _confidence_png),
}
"""Formats of labels. An Accept header selects the first format of its media type."""

FEATURES = {
    "npy": Format("application/octet-stream", BINARY, _npy),
    "vector": Format(
        "application/json",
        record(
            {
                "global": array(number(), "the global token of the image"),
                "patches": array(integer(), "rows, columns, blocks and dimension of the features in the format npy"),
            }
        ),
        _vector,
    ),
}
"""Formats of features."""


def media_types(formats: Iterable[Format]) -> dict[str, Schema]:
    """Return the schema of each media type of some formats."""
    found: dict[str, list[Schema]] = {}
    for each in formats:
        if each.schema not in found.setdefault(each.media_type, []):
            found[each.media_type].append(each.schema)
    return {kind: schemas[0] if len(schemas) == 1 else {"anyOf": schemas} for kind, schemas in found.items()}
