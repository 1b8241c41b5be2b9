"""Labels in Label Studio's JSON, read: polygons, brush strokes, boxes, ellipses and key points of tasks."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
from jaxtyping import UInt8

from cribo.base.errors import DataError, InputError
from cribo.base.files import read_json
from cribo.data.labelled.coco import is_number
from cribo.data.labelled.regions import Draw, Region, RegionImage, RegionSet, corners, ellipse, naming
from cribo.data.reading import EXTENSIONS

_UPLOADED = re.compile(r"^[0-9a-f]{8}-")  # in front of the names of uploaded files
_LABELS = ("polygonlabels", "brushlabels", "rectanglelabels", "ellipselabels", "keypointlabels", "labels")


def is_label_studio(content: object) -> bool:
    """Whether the content of a JSON file is an export of tasks."""
    return isinstance(content, list) and any(
        isinstance(task, Mapping)
        and isinstance(task.get("data"), Mapping)
        and ("annotations" in task or "predictions" in task)
        for task in content[:1]
    )


def read_label_studio(path: Path) -> RegionSet:
    """Read an export of tasks as JSON. Of a task, the last annotation that was not cancelled counts.

    Tasks without annotations are left out; predictions are no annotations.

    Raises:
        DataError: the file is not such an export (JSON-MIN is another format), or a region is invalid.
    """
    content = read_json(path, limit_bytes=None)
    if not is_label_studio(content):
        raise DataError(f"{path} is not an export of Label Studio as JSON: each task must have data and annotations")
    found = RegionSet(path, [], [path.parent, path.parent / "images"])
    for number, task in enumerate(content):
        data = task.get("data") if isinstance(task, Mapping) else None
        if not isinstance(data, Mapping):
            raise DataError(f"{path}: task {number} has no data")
        names = _names(data, path)
        annotations = _mappings(task.get("annotations") or [], f"{path}: the annotations of task {number}")
        done = [each for each in annotations if not each.get("was_cancelled")]
        if not done:
            found.unlabelled.append(RegionImage(names, None, [], path, id=str(task.get("id", ""))))
            continue
        found.images.append(read_annotation(done[-1], found, names=names, task=str(task.get("id", ""))))
    return found


def read_annotation(
    annotation: Mapping[str, Any], found: RegionSet, *, names: tuple[str, ...], task: str = ""
) -> RegionImage:
    """Read the regions of an annotation.

    Args:
        annotation: the annotation, whose `result` is a list.
        found: where its labels come from; regions without an area are added to its `skipped`.
        names: possible file names of its image, the likeliest first.
        task: its id.

    Raises:
        DataError: a region is invalid.
    """
    size, regions = None, list[Region]()
    what = f"the result of {f'task {task}' if task else names[0]}"
    for place, result in enumerate(_mappings(annotation.get("result") or [], f"{found.source}: {what}"), start=1):
        what = f"region {result.get('id', place)} of {names[0]}"
        with naming(found.source, what):
            size = _size(result) or size
            regions += _regions(result, what, found)
    return RegionImage(names, size, regions, found.source, id=task)


def _mappings(value: object, what: str) -> list[Mapping[str, Any]]:
    """Return a list of dictionaries, or raise DataError."""
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise DataError(f"{what} must be a list of objects, got {value!r:.60}")
    return value


def _names(data: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Return the possible file names of a task's image."""
    texts = [str(data[key]) for key in sorted(data, key=lambda key: key != "image") if isinstance(data[key], str)]
    images = [
        text for text in texts if PurePosixPath(urlsplit(text).path).suffix.lower() in EXTENSIONS or "?d=" in text
    ]
    if not images:
        raise DataError(f"{path}: a task must have an image in its data, got {', '.join(data) or 'nothing'}")
    return file_names(images[0])


def file_names(address: str) -> tuple[str, ...]:
    """Return the possible file names of an image by its URL in a task.

    Raises:
        DataError: it is no URL.

    Example:
        >>> file_names("/data/upload/1/0f3c2a19-my%20street.jpg")
        ('0f3c2a19-my street.jpg', 'my street.jpg', 'data/upload/1/0f3c2a19-my street.jpg')
    """
    try:
        url = urlsplit(address)
    except ValueError as error:
        raise DataError(f"a task must have the address of an image, got {address!r:.60} ({error})") from error
    stated = unquote(parse_qs(url.query)["d"][0] if "d" in parse_qs(url.query) else url.path).lstrip("/")
    name = PurePosixPath(stated).name
    return tuple(dict.fromkeys((name, _UPLOADED.sub("", name), stated)))


def _size(result: Mapping[str, Any]) -> tuple[int, int] | None:
    height, width = result.get("original_height"), result.get("original_width")
    return (height, width) if isinstance(height, int) and isinstance(width, int) else None


def _regions(result: Any, what: str, found: RegionSet) -> Iterator[Region]:
    """Yield the region of a result; none if it has no area or is no region."""
    value = result.get("value") if isinstance(result, Mapping) else None
    labels = (
        next((value[key] for key in _LABELS if isinstance(value.get(key), list)), None)
        if isinstance(value, Mapping)
        else None
    )
    if value is None or labels is None:  # choices, texts, relations
        return
    if len(labels) != 1 or not isinstance(labels[0], str):
        raise InputError(f"a region must have one label, got {labels!r:.60}")
    label, size = labels[0], _size(result)
    if size is None:
        raise InputError("it must have original_width and original_height")
    height, width = size

    def percent(*names: str) -> list[float]:
        return [number / 100 for number in _numbers(value, *names)]

    if "points" in value:
        ring = [(x * width / 100, y * height / 100) for x, y in corners(value["points"])]
        if any(abs(x) > 2 * width or abs(y) > 2 * height for x, y in ring):
            raise InputError("the corners of a polygon must be in percent of the image")
        yield from found.outline(label, ring, size=size, name=what)
    elif "rle" in value:
        yield Region(label, _drawn(value["rle"]), name=what)
    elif "radiusX" in value:
        x, y, rx, ry = percent("x", "y", "radiusX", "radiusY")
        if rx <= 0 or ry <= 0:
            found.skipped.append(what)
            return
        (turn,) = _numbers({"rotation": value.get("rotation") or 0}, "rotation")
        yield Region(label, ellipse(x * width, y * height, rx * width, ry * height, turn), name=what)
    elif "keypointlabels" in value:
        x, y = percent("x", "y")
        yield Region(label, points=((x * width, y * height),), name=what)
    else:
        x, y, w, h = percent("x", "y", "width", "height")
        if w <= 0 or h <= 0:
            found.skipped.append(what)
            return
        (turn,) = _numbers({"rotation": value.get("rotation") or 0}, "rotation")
        if turn:
            yield from found.outline(
                label,
                _turned(x * width, y * height, w * width, h * height, turn),
                size=size,
                name=what,
            )
        else:
            box = (x * width, y * height, (x + w) * width, (y + h) * height)
            yield from found.boxed(label, box, name=what)


def _numbers(value: Mapping[str, Any], *names: str) -> list[float]:
    """Return some fields, which must be finite numbers."""
    if not all(is_number(value.get(name)) and math.isfinite(value[name]) for name in names):
        raise InputError(f"{', '.join(names)} must be numbers")
    return [float(value[name]) for name in names]


def _turned(x: float, y: float, w: float, h: float, degrees: float) -> list[tuple[float, float]]:
    """Return the corners of a rectangle that is rotated clockwise around its first corner."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return [(x + a * cos - b * sin, y + a * sin + b * cos) for a, b in ((0, 0), (w, 0), (w, h), (0, h))]


def _drawn(packed: object) -> Draw:
    """Return the function that draws brush strokes: pixels that are not transparent."""
    return lambda height, width: decoded(packed, 4 * height * width).reshape(height, width, 4)[..., 3] > 0


# ------------------------------------------------------------------------------------------------------ brush strokes


def decoded(packed: object, expected: int) -> UInt8[np.ndarray, " n"]:
    """Return the expected number of values in Label Studio's packed run lengths: RGBA of all pixels, row after row.

    32 bits of the number of values; 5 of the bits of a value, less 1; four times 4 of the bits of a length, less 1.
    Then, for each block: whether it is a run; which of the four; the length less 1; the value of a run, or all values.

    Raises:
        InputError: the numbers are not of this form.
    """
    if not isinstance(packed, list) or not all(isinstance(byte, int) and 0 <= byte < 256 for byte in packed):
        raise InputError("rle must be a list of bytes")
    bits, at = "".join(f"{byte:08b}" for byte in packed), 0

    def read(count: int) -> int:
        nonlocal at
        at += count
        if at > len(bits):
            raise InputError("rle ends too early")
        return int(bits[at - count : at], 2)

    total, word = read(32), read(5) + 1
    sizes = [read(4) + 1 for _ in range(4)]
    if word > 8 or total != expected:
        raise InputError(f"rle must have {expected} values of 8 bits, got {total} of {word}")
    parts: list[UInt8[np.ndarray, " n"]] = []
    done = 0
    while done < total:
        is_run = read(1)
        length = read(sizes[read(2)]) + 1
        if is_run:
            parts.append(np.full(length, read(word), dtype=np.uint8))
        else:
            parts.append(np.array([read(word) for _ in range(length)], dtype=np.uint8))
        done += length
    found = np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)
    if len(found) != total:
        raise InputError(f"rle must have {total} values, got {len(found)}")
    return found
