"""Outlines in pixels of an image: checks before they are drawn, and their drawing; shared by all formats."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from cribo.base.errors import DataError, InputError

BACKGROUND = "background"
"""The class of pixels outside all objects; it comes first."""

FAR = 10
"""Coordinates are at most this many times the longer side of their image away from its first corner."""

CORNERS = 3
"""Fewest corners of a polygon with an area."""

_SHARES = 1.5  # outlines and boxes below this, in pixels, are shares of width and height
_LONGEST = 4_000_000  # pixels along the border of an object: drawing takes about 100 bytes for each

Ring = Float[np.ndarray, "n 2"]
"""x and y of the corners of a polygon."""


def check_outline(rings: Iterable[Ring], height: int, width: int) -> None:
    """Check that polygons are near their image, and not too long to draw.

    Raises:
        InputError: a coordinate is far from the image, or the polygons are too long.
    """
    limit, length = FAR * max(height, width), 0.0
    for ring in rings:
        if len(ring) and (most := np.abs(ring).max()) > limit:
            raise InputError(
                f"coordinates must be pixels in the image of {width} x {height} or near it (at most {limit} from its "
                f"corner), got {most:.6g}"
            )
        length += float(np.abs(ring - np.roll(ring, 1, axis=0)).max(axis=1, initial=0).sum())
    longest = min(_LONGEST, 10_000 + 8 * height * width)
    if length > longest:
        raise InputError(
            f"its polygons are {length:.0f} pixels long, and {longest} is the limit: simplify them, or use run lengths"
        )


def meets_image(ring: Ring, height: int, width: int) -> bool:
    """Whether the bounding box of a polygon meets the image."""
    (left, top), (right, bottom) = ring.min(axis=0), ring.max(axis=0)
    return bool(left < width and right > 0 and top < height and bottom > 0)


def require_pixels(source: Path, extents: Collection[float]) -> None:
    """Raise DataError if most of the largest coordinates of outlines or boxes are shares of the image."""
    small = sum(extent <= _SHARES for extent in extents)
    if 2 * small > len(extents):
        raise DataError(
            f"{source}: {small} of {len(extents)} outlines or boxes are within the first pixel, so their coordinates "
            "seem normalised (0 to 1): this format has pixels; multiply x by the width of the image and y by its height"
        )


def require_size(file: Path, name: str, listed: tuple[int, int] | None, size: tuple[int, int]) -> None:
    """Raise DataError if the size (height, width) of an image differs from the one that a file of labels lists."""
    if listed is not None and listed != size:
        raise DataError(
            f"{file}: {name} must have the size of its file, {size[1]} x {size[0]}, got {listed[1]} x {listed[0]}"
        )


def simplified(ring: Ring, tolerance: float) -> Ring:
    """Return a closed polygon with fewer corners (Douglas and Peucker 1973).

    Args:
        ring: the polygon.
        tolerance: largest distance of a removed corner from the result, in pixels.
    """
    far = int(((ring - ring[0]) ** 2).sum(axis=1).argmax())
    closed, kept = np.concatenate([ring, ring[:1]]), np.zeros(len(ring) + 1, dtype=bool)
    kept[[0, far]] = True
    spans = [(0, far), (far, len(ring))]
    while spans:
        start, end = spans.pop()
        if end - start < 2:
            continue
        (dx, dy), between = closed[end] - closed[start], closed[start + 1 : end] - closed[start]
        length = float(np.hypot(dx, dy))
        if length:
            distances = np.abs(between[:, 0] * dy - between[:, 1] * dx) / length
        else:
            distances = np.hypot(between[:, 0], between[:, 1])
        farthest = int(distances.argmax())
        if distances[farthest] > tolerance:
            kept[place := start + 1 + farthest] = True
            spans += [(start, place), (place, end)]
    found = closed[:-1][kept[:-1]]
    return found if len(found) >= CORNERS else ring


def runs_of(rings: Iterable[Ring], height: int, width: int) -> Any:
    """Return the run lengths, in COCO's format, of the pixels in any of the polygons."""
    from faster_coco_eval.core import mask as coco

    parts: Any = coco.frPyObjects([ring.ravel().tolist() for ring in rings], height, width)
    return coco.merge(parts)


def pixels_of(runs: Any, height: int, width: int) -> Bool[np.ndarray, "h w"]:
    """Return the pixels of run lengths in COCO's format."""
    from faster_coco_eval.core import mask as coco

    return coco.decode(runs).astype(bool).reshape(height, width)
