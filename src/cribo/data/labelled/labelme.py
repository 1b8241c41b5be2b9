"""Labels in LabelMe's format: a JSON file beside each image."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from cribo.base.errors import DataError, InputError
from cribo.base.files import read_json, write_text
from cribo.data.labelled.label_maps import Labelling
from cribo.data.labelled.regions import (
    Draw,
    Mask,
    Region,
    RegionImage,
    RegionSet,
    corners,
    ellipse,
    naming,
    part,
    things,
    trace,
)
from cribo.data.labelled.writing import as_json, stems

_NO_AREA = ("line", "linestrip")
_DAMAGED = (ValueError, OSError, SyntaxError)  # what Pillow raises


def is_labelme(content: object) -> bool:
    """Whether the content of a JSON file is in LabelMe's format."""
    return isinstance(content, Mapping) and isinstance(content.get("shapes"), list) and "imagePath" in content


def read_labelme(source: Path, files: list[Path]) -> RegionSet:
    """Read files in LabelMe's format.

    Raises:
        DataError: a file is not in this format, or a shape is invalid.
    """
    found = RegionSet(source, [], [source if source.is_dir() else source.parent])
    for file in files:
        content = read_json(file, limit_bytes=None)
        if not is_labelme(content):
            raise DataError(f"{file} is not in LabelMe's format: it must contain shapes and imagePath")
        height, width = content.get("imageHeight"), content.get("imageWidth")
        size = (height, width) if isinstance(height, int) and isinstance(width, int) else None
        regions: list[Region] = []
        for number, shape in enumerate(content["shapes"], start=1):
            name = f"shape {number} of {file.name}"
            with naming(file, name):
                regions += _regions(shape, name, size, found)
        stated = str(content["imagePath"]).replace("\\", "/")
        below = file.parent.relative_to(found.folders[0]) if file.parent.is_relative_to(found.folders[0]) else Path()
        # LabelMe writes paths relative to the JSON file, which may have moved together with its image.
        names = (str(PurePosixPath(below.as_posix(), PurePosixPath(stated).name)), PurePosixPath(stated).name)
        found.images.append(RegionImage(names, size, regions, file))
    return found


def _regions(shape: Any, name: str, size: tuple[int, int] | None, found: RegionSet) -> list[Region]:
    """Return the region of a shape; none if it has no area."""
    if not isinstance(shape, Mapping) or not isinstance(shape.get("label"), str) or not shape["label"].strip():
        raise InputError("a shape must have a label")
    label, kind = shape["label"].strip(), shape.get("shape_type") or "polygon"
    points = corners(shape.get("points") or [], "the points of a shape")
    if kind == "polygon":
        return found.outline(label, points, size=size, name=name)
    if kind in _NO_AREA:
        found.skipped.append(name)
        return []
    if kind in ("point", "points"):
        return [Region(label, points=tuple(points), name=name)]
    if len(points) != 2:
        raise InputError(f"a {kind} must have two points, got {len(points)}")
    (x0, y0), (x1, y1) = points
    if kind == "rectangle":
        return found.boxed(label, (min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)), name=name)
    if kind == "circle":
        radius = float(np.hypot(x1 - x0, y1 - y0))
        if radius == 0:
            found.skipped.append(name)
            return []
        return [Region(label, ellipse(x0, y0, radius, radius), name=name)]
    if kind == "mask":
        return [Region(label, _decoded(shape.get("mask"), round(x0), round(y0)), name=name)]
    raise InputError(f"the shape_type must be polygon, rectangle, circle, point, line, linestrip or mask, got {kind!r}")


def _decoded(text: object, left: int, top: int) -> Draw:
    """Return the function that draws a mask, a PNG in base64."""
    try:
        image = Image.open(io.BytesIO(base64.b64decode(str(text), validate=True)), formats=["PNG"])
    except (*_DAMAGED, Image.DecompressionBombError) as error:
        raise InputError(f"its mask must be a PNG in base64 ({error})") from error

    def decode() -> Mask:
        try:
            return np.array(image.convert("L")) > 0
        except _DAMAGED as error:
            raise InputError(f"its mask must be a PNG in base64 ({error})") from error

    return part(decode, left, top, (image.height, image.width))


def write_labelme(folder: Path, labelling: Labelling) -> int:
    """Write a JSON file for each image; regions with holes as masks, the others as polygons."""
    named = things(labelling.classes)
    for name, stem in stems(labelling.sizes).items():
        height, width = labelling.sizes[name]
        shapes = []
        for region in trace(labelling.labels(name).numpy(), named, labelling.instances_of(name)):
            shape: dict[str, Any] = {"label": named[region.label], "group_id": None, "flags": {}, "description": ""}
            if region.has_holes:
                h, w = region.mask.shape
                points = [[region.left, region.top], [region.left + w - 1, region.top + h - 1]]
                shape |= {"points": points, "shape_type": "mask", "mask": _encoded(region.mask)}
            else:
                shape |= {"points": [list(map(float, point)) for point in region.rings[0]], "shape_type": "polygon"}
            shapes.append(shape)
        content = {"version": "5.8.1", "flags": {}, "shapes": shapes, "imagePath": name, "imageData": None}
        path = folder / f"{stem}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, as_json({**content, "imageHeight": height, "imageWidth": width}))
    return 0


def _encoded(mask: Mask) -> str:
    file = io.BytesIO()
    Image.fromarray(mask.astype(np.uint8)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode("ascii")
