"""Pictures and box file of discovered objects."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cribo.base.colours import rgb
from cribo.base.drawing import line_handle, marker_handle, panel_grid, title_row
from cribo.base.files import write_json
from cribo.evaluation.discovery.discovery import Discovered
from cribo.evaluation.pages import draw_box, show_image, write_pages
from cribo.evaluation.pictures import RIGHT, WRONG

_OBJECT = "#F0E442"
_TITLES = {"lost": "LOST", "tokencut": "TokenCut"}


def write_objects(found: Mapping[str, Discovered], images: Any, folder: Path, *, number: int) -> None:
    """Write `boxes.json`, and pictures of six images each: `objects.png`, `objects-2.png`, ...

    Args:
        found: found objects, by method.
        images: images of the objects.
        folder: output folder.
        number: number of images to draw.
    """
    boxes = {
        method: {images.name(index): [round(side, 2) for side in box] for index, box in enumerate(part.boxes.tolist())}
        for method, part in found.items()
    }
    write_json(folder / "boxes.json", boxes)
    write_pages(folder, "objects", range(len(images)), lambda part: draw_objects(part, found, images), number=number)


def draw_objects(indices: Sequence[int], found: Mapping[str, Discovered], images: Any) -> Figure:
    """Draw annotated objects, and the objects found by each method: patches in blue, box and seed.

    Args:
        indices: indices of the images, at least one.
        found: found objects, by method.
        images: images of the objects.
    """
    figure, rows = panel_grid(
        [images.load(index).shape[1:] for index in indices],
        ("objects", *(_TITLES[name] for name in found)),
        row_titles=True,
        handles=[
            line_handle("annotated object", _OBJECT),
            line_handle("found, IoU ≥ 0.5", rgb(RIGHT)),
            line_handle("not an object", rgb(WRONG)),
            marker_handle("seed", "white", "black"),
        ],
    )
    for row, index in zip(rows, indices, strict=True):
        verdicts = (f"{_TITLES[name]} {'right' if part.right[index] else 'wrong'}" for name, part in found.items())
        title_row(row, images.name(index), ", ".join(verdicts))
        image = images.load(index)
        for axes in row:
            show_image(axes, image)
        boxes = images.boxes(index)
        for corners, crowd in zip(boxes.corners.tolist(), boxes.crowd.tolist(), strict=True):
            draw_box(row[0], corners, _OBJECT, dashed=crowd)
        for axes, discovered in zip(row[1:], found.values(), strict=True):
            _draw_object(axes, discovered, index)
    return figure


def _draw_object(axes: Axes, discovered: Discovered, index: int) -> None:
    part, (down, across) = discovered.objects[index], discovered.patches[index].tolist()
    height, width = part.mask.shape
    tint = np.zeros((height, width, 4))
    tint[part.mask] = (0.1, 0.4, 1.0, 0.45)
    axes.imshow(tint, extent=(-0.5, width * across - 0.5, height * down - 0.5, -0.5), interpolation="nearest")
    draw_box(axes, discovered.boxes[index].tolist(), rgb(RIGHT if discovered.right[index] else WRONG))
    seed = [(place + 0.5) * side - 0.5 for place, side in zip(part.seed, (down, across), strict=True)]
    axes.plot(*reversed(seed), "o", markersize=4, color="white", markeredgecolor="black")
