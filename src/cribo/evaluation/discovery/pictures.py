"""Pictures and box file of discovered objects."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cribo.colours import rgb
from cribo.evaluation.discovery.discovery import Discovered
from cribo.evaluation.pages import draw_box, show_image, write_pages
from cribo.evaluation.pictures import RIGHT, WRONG, draw_rows
from cribo.files import write_json

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

    def draw(index: int, axes: Sequence[Axes]) -> tuple[str, str]:
        image = images.load(index)
        for part in axes:
            show_image(part, image)
        boxes = images.boxes(index)
        for corners, crowd in zip(boxes.corners.tolist(), boxes.crowd.tolist(), strict=True):
            draw_box(axes[0], corners, _OBJECT, dashed=crowd)
        for part, discovered in zip(axes[1:], found.values(), strict=True):
            _draw_object(part, discovered, index)
        verdicts = (f"{_TITLES[name]} {'right' if part.right[index] else 'wrong'}" for name, part in found.items())
        return images.name(index), ", ".join(verdicts)

    return draw_rows(
        indices,
        draw,
        aspects=[images.load(index).shape[1] / images.load(index).shape[2] for index in indices],
        headings=("objects", *(_TITLES[name] for name in found)),
        handles=[
            Line2D([], [], color=_OBJECT, label="annotated object"),
            Line2D([], [], color=rgb(RIGHT), label="found, IoU ≥ 0.5"),
            Line2D([], [], color=rgb(WRONG), label="not an object"),
            Line2D([], [], color="white", marker="o", markeredgecolor="black", linestyle="none", label="seed"),
        ],
    )


def _draw_object(axes: Axes, discovered: Discovered, index: int) -> None:
    part, box = discovered.objects[index], discovered.boxes[index].tolist()
    height, width = part.mask.shape
    down, across = discovered.patches[index].tolist()
    tint = np.zeros((*part.mask.shape, 4))
    tint[part.mask] = (0.1, 0.4, 1.0, 0.45)
    limits = axes.get_xlim(), axes.get_ylim()
    axes.imshow(tint, extent=(-0.5, width * across - 0.5, height * down - 0.5, -0.5), interpolation="nearest")
    axes.set(xlim=limits[0], ylim=limits[1])
    draw_box(axes, box, rgb(RIGHT if discovered.right[index] else WRONG))
    row, column = part.seed
    axes.plot(
        (column + 0.5) * across - 0.5,
        (row + 0.5) * down - 0.5,
        marker="o",
        markersize=4,
        color="white",
        markeredgecolor="black",
    )
