"""Labels in CVAT's XML format, "CVAT for images 1.1": one file for all images."""

import math
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import quoteattr

import numpy as np

from cribo.base.errors import DataError, InputError
from cribo.base.files import require_regular, write_whole
from cribo.data.labelled.label_maps import Labelling
from cribo.data.labelled.regions import (
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


def read_root(path: Path) -> ET.Element:
    """Return the root of an XML file.

    Raises:
        DataError: the file is not XML.
    """
    require_regular(path)
    try:
        return ET.parse(path).getroot()
    except (ET.ParseError, ValueError) as error:
        raise DataError(f"{path} is not XML ({error})") from error


def is_cvat(root: ET.Element) -> bool:
    """Whether the root of an XML file is that of CVAT's format for images."""
    return root.tag == "annotations" and root.find("image") is not None


def read_cvat(path: Path) -> RegionSet:
    """Read a file in the format CVAT for images 1.1; images without shapes are left out.

    Raises:
        DataError: the file is not in this format, or a shape is invalid.
    """
    root = read_root(path)
    if not is_cvat(root):
        raise DataError(f"{path} is not in the format CVAT for images 1.1: its root must be annotations, with images")
    listed = [name.text or "" for name in root.iterfind("./meta//labels/label/name")]
    found = RegionSet(path, [], [path.parent, path.parent / "images"], classes=listed or None)
    for image in root.iterfind("image"):
        name, size = image.get("name", ""), (_whole(image, "height", path), _whole(image, "width", path))
        if not name:
            raise DataError(f"{path}: an image without a name")
        shapes = sorted((each for each in image if each.tag != "tag"), key=lambda each: _order(each, path))
        regions: list[Region] = []
        stated = RegionImage((name,), size, regions, path, id=image.get("id", ""), split=image.get("subset", ""))
        if not shapes:
            found.unlabelled.append(stated)
            continue
        for number, shape in enumerate(shapes, start=1):
            what = f"{shape.tag} {number} of {name}"
            with naming(path, what):
                regions += _regions(shape, what, size, found)
        found.images.append(stated)
    return found


def _whole(element: ET.Element, name: str, path: Path) -> int:
    value = element.get(name, "")
    if not value.isdecimal() or int(value) < 1:
        raise DataError(f"{path}: the {name} of {element.get('name') or element.tag} must be a number, got {value!r}")
    return int(value)


def _order(shape: ET.Element, path: Path) -> int:
    """Return the z-order of a shape, 0 by default."""
    try:
        return int(shape.get("z_order") or 0)
    except ValueError:
        raise DataError(f"{path}: z_order must be a whole number, got {shape.get('z_order')!r:.60}") from None


def _numbers(shape: ET.Element, *names: str) -> list[float]:
    try:
        found = [float(shape.get(name, "")) for name in names]
    except ValueError:
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        raise InputError(f"{', '.join(names)} must be numbers")
    return found


def _regions(shape: ET.Element, what: str, size: tuple[int, int], found: RegionSet) -> Iterator[Region]:
    """Yield the region of a shape; none if it has no area."""
    label = shape.get("label", "").strip()
    if not label:
        raise InputError("a shape must have a label")
    if shape.tag == "polygon":
        ring = _points(shape)
        yield from found.outline(label, ring, size=size, name=what)
    elif shape.tag == "box":
        left, top, right, bottom = _numbers(shape, "xtl", "ytl", "xbr", "ybr")
        yield from found.boxed(label, (left, top, right, bottom), name=what)
    elif shape.tag == "ellipse":
        x, y, rx, ry = _numbers(shape, "cx", "cy", "rx", "ry")
        if rx <= 0 or ry <= 0:
            found.skipped.append(what)
            return
        turn = _numbers(shape, "rotation")[0] if shape.get("rotation") else 0.0
        yield Region(label, ellipse(x, y, rx, ry, turn), name=what)
    elif shape.tag == "mask":
        left, top, width, height = (int(each) for each in _numbers(shape, "left", "top", "width", "height"))
        rle = shape.get("rle", "")
        yield Region(label, part(lambda: _decoded(rle, height, width), left, top, (height, width)), name=what)
    elif shape.tag == "points":
        yield Region(label, points=tuple(_points(shape)), name=what)
    else:  # lines, skeletons, cuboids
        found.skipped.append(what)


def _points(shape: ET.Element) -> list[tuple[float, float]]:
    """Return the points of a shape: x,y;x,y;..."""
    return corners([point.split(",") for point in shape.get("points", "").split(";")])


def _decoded(text: str, height: int, width: int) -> Mask:
    """Return the mask of run lengths along the rows, of which the first is outside the mask."""
    try:
        counts = np.array([int(part) for part in text.split(",")], dtype=np.int64)
    except (ValueError, OverflowError):
        raise InputError("rle must be whole numbers") from None
    if (counts < 0).any() or counts.sum(dtype=np.float64) != height * width:
        raise InputError(f"the sum of rle must be {width} x {height} pixels, got {counts.sum(dtype=np.float64):.0f}")
    return np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(height, width)


def write_cvat(path: Path, labelling: Labelling) -> int:
    """Write a file in the format CVAT for images 1.1; regions with holes as masks, the others as polygons."""
    named = things(labelling.classes)

    def write(into: Path) -> None:
        with into.open("w", encoding="utf-8") as file:
            file.write('<?xml version="1.0" encoding="utf-8"?>\n<annotations>\n<version>1.1</version>\n')
            labels = "".join(f"<label><name>{_escaped(name)}</name></label>" for name in named.values())
            file.write(f"<meta><job><labels>{labels}</labels></job></meta>\n")
            for number, (name, (height, width)) in enumerate(labelling.sizes.items()):
                stated = f"id={quoteattr(labelling.task(name).id or str(number))} name={quoteattr(name)}"
                if split := labelling.task(name).split:
                    stated += f" subset={quoteattr(split)}"
                file.write(f'<image {stated} width="{width}" height="{height}">\n')
                for order, region in enumerate(
                    trace(labelling.labels(name).numpy(), named, labelling.instances_of(name))
                ):
                    common = f'label={quoteattr(named[region.label])} source="auto" occluded="0" z_order="{order}"'
                    if region.has_holes:
                        h, w = region.mask.shape
                        place = f'left="{region.left}" top="{region.top}" width="{w}" height="{h}"'
                        file.write(f'<mask {common} rle="{_encoded(region.mask)}" {place}></mask>\n')
                    else:
                        points = ";".join(f"{x:.1f},{y:.1f}" for x, y in region.rings[0])
                        file.write(f'<polygon {common} points="{points}"></polygon>\n')
                file.write("</image>\n")
            file.write("</annotations>\n")

    write_whole(path, write)
    return 0


def _encoded(mask: Mask) -> str:
    flat = np.concatenate([[False], mask.ravel()])
    ends = np.flatnonzero(np.diff(flat))
    counts = np.diff(np.concatenate([[0], ends, [mask.size]]))
    return ", ".join(map(str, counts.tolist()))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
