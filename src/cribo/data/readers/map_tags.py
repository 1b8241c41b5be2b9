"""Tags with the map coordinates of a GeoTIFF (OGC GeoTIFF 1.1, section 7), which are copied to its label maps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cribo.data.readers.headers import NODATA

SCALE, MATRIX = 33550, 34264
"""ModelPixelScale and ModelTransformation."""

_TIEPOINTS, _KEYS, _DOUBLES, _TEXTS = 33922, 34735, 34736, 34737
_DOUBLE, _ASCII, _SHORT = 12, 2, 3  # types of tags
_TYPES = {SCALE: _DOUBLE, _TIEPOINTS: _DOUBLE, MATRIX: _DOUBLE, _KEYS: _SHORT, _DOUBLES: _DOUBLE, _TEXTS: _ASCII}
_RASTER_TYPE, _IS_POINT = 1025, 2

ExtraTag = tuple[int, int, int, Any, bool]
"""Code, type, count, value, and whether only the first page has the tag, as tifffile takes it."""


def map_tags(tags: Mapping[int, Any], factors: tuple[float, float]) -> tuple[ExtraTag, ...]:
    """Return the coordinate tags of a resized image; empty if it has no coordinates.

    Args:
        tags: values of the tags of the image, by their code.
        factors: height and width of a resized pixel, in original pixels.
    """
    found = {code: tags[code] for code in _TYPES if code in tags}
    if _KEYS not in found or not (MATRIX in found or {SCALE, _TIEPOINTS} <= found.keys()):
        return ()
    down, across = factors
    # The origin is the corner of the first pixel or, with PixelIsPoint, its centre.
    start = 0.5 if _is_point(found[_KEYS]) else 0.0
    if SCALE in found:
        width, height, *others = found[SCALE]
        found[SCALE] = (width * across, height * down, *others)
    if _TIEPOINTS in found:
        points = [found[_TIEPOINTS][place : place + 6] for place in range(0, len(found[_TIEPOINTS]), 6)]
        found[_TIEPOINTS] = tuple(
            number
            for column, row, *others in points
            for number in ((column + start) / across - start, (row + start) / down - start, *others)
        )
    if MATRIX in found:
        rows = [found[MATRIX][place : place + 4] for place in range(0, 16, 4)]
        shifts = start * (across - 1), start * (down - 1)
        found[MATRIX] = tuple(
            number
            for x, y, z, origin in rows
            for number in (x * across, y * down, z, origin + x * shifts[0] + y * shifts[1])
        )
    # tifffile appends the terminating null of a text, and counts.
    return tuple(
        (code, _TYPES[code], 0 if code == _TEXTS else len(value), value, True) for code, value in found.items()
    )


def nodata_tag(value: int) -> ExtraTag:
    """Return the tag that declares a nodata value."""
    return NODATA, _ASCII, 0, str(value), True


def _is_point(keys: tuple[int, ...]) -> bool:
    """Whether the raster type is PixelIsPoint: coordinates refer to the centres of pixels."""
    entries = (keys[place : place + 4] for place in range(4, len(keys), 4))
    return any(entry[0] == _RASTER_TYPE and entry[3] == _IS_POINT for entry in entries)
