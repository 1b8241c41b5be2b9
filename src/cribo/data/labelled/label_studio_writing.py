"""Labels in Label Studio's JSON, written: brush strokes, polygons and boxes of predictions."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cribo.base.files import write_whole
from cribo.data.labelled.label_maps import Labelling
from cribo.data.labelled.outlines import simplified
from cribo.data.labelled.regions import Mask, Traced, things

_RUN_BITS = (3, 4, 8, 16)  # of the lengths of runs
_TOLERANCE = 0.001  # of polygons, relative to the longer side of the image, and at least a pixel


class Control(NamedTuple):
    """A tag of a labelling configuration with which regions of an image are labelled.

    Attributes:
        type: of its results, such as brushlabels.
        name: its name.
        image: name of the tag of the image.
    """

    type: str
    name: str = "label"
    image: str = "image"

    def result(
        self, number: int, label: str, value: Mapping[str, Any], size: tuple[int, int], score: float | None = None
    ) -> dict[str, Any]:
        """Return a region.

        Args:
            number: of the region in its task.
            label: its class.
            value: its shape, as `brush`, `polygon` or `box` return it.
            size: height and width of the image.
            score: confidence, 0 to 1; None for none.
        """
        height, width = size
        common = {"id": f"{number}", "type": self.type, "from_name": self.name, "to_name": self.image}
        place = {"original_width": width, "original_height": height, "image_rotation": 0}
        scored = {} if score is None else {"score": score}
        return {**common, **place, "value": {**value, self.type: [label]}, **scored}


def brush(mask: Mask) -> dict[str, Any]:
    """Return the value of a brush stroke."""
    return {"format": "rle", "rle": encoded(mask)}


def polygon(region: Traced, size: tuple[int, int]) -> dict[str, Any]:
    """Return the value of a polygon, in percent of the image: the outer border of a region, simplified.

    Polygons of Label Studio have no holes, and each corner is a handle to drag.
    """
    height, width = size
    corners = simplified(np.array(region.rings[0], dtype=np.float64), max(1.0, _TOLERANCE * max(size)))
    return {"points": (100 * corners / (width, height)).tolist(), "closed": True}


def box(region: Traced, size: tuple[int, int]) -> dict[str, Any]:
    """Return the value of a rectangle around a region, in percent of the image."""
    (height, width), (h, w) = size, region.mask.shape
    return {
        "x": 100 * region.left / width,
        "y": 100 * region.top / height,
        "width": 100 * w / width,
        "height": 100 * h / height,
        "rotation": 0,
    }


OUTLINES: Mapping[str, Callable[[Traced, tuple[int, int]], dict[str, Any]]] = {
    "polygonlabels": polygon,
    "rectanglelabels": box,
}
"""The shape of a connected region by the type of a tag; brush strokes have all pixels of a class."""


def encoded(mask: Mask) -> list[int]:
    """Return a mask as Label Studio's packed run lengths."""
    flat = mask.ravel()
    ends = np.concatenate([np.flatnonzero(np.diff(flat)) + 1, [flat.size]])
    starts = np.concatenate([[0], ends[:-1]])
    bits = [f"{4 * flat.size:032b}", f"{7:05b}", *(f"{size - 1:04b}" for size in _RUN_BITS)]
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        left, value = 4 * (end - start), 255 if flat[start] else 0
        while left:
            length = min(left, 2 ** _RUN_BITS[-1])
            kind = next(number for number, size in enumerate(_RUN_BITS) if length <= 2**size)
            bits.append(f"1{kind:02b}{length - 1:0{_RUN_BITS[kind]}b}{value:08b}")
            left -= length
    text = "".join(bits)
    text += "0" * (-len(text) % 8)
    return list(int(text, 2).to_bytes(len(text) // 8, "big"))


def write_label_studio(path: Path, labelling: Labelling) -> int:
    """Write tasks with predictions as brush strokes, one for each class of an image or for each of its instances."""
    named, control = things(labelling.classes), Control("brushlabels")

    def tasks() -> Iterator[dict[str, Any]]:
        for name, (height, width) in labelling.sizes.items():
            results = []
            for label, mask in labelling.masks(name, named):
                stroke = control.result(len(results), named[label], brush(mask), (height, width))
                results.append(stroke)
            task: dict[str, Any] = {
                "data": {"image": name},
                "predictions": [{"model_version": "cribo", "result": results}],
            }
            if (own := labelling.task(name).id).isdecimal():
                task = {"id": int(own), **task}
            yield task

    def write(into: Path) -> None:
        with into.open("w", encoding="utf-8") as file:
            file.write("[")
            for number, task in enumerate(tasks()):
                file.write(f"{',' if number else ''}\n{json.dumps(task)}")
            file.write("\n]\n")

    write_whole(path, write)
    return 0
