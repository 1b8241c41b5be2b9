"""The pixel size that a TIFF states: OME-XML, GeoTIFF, ImageJ, and the tags of its resolution."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

import tifffile

from cribo.data.readers import map_tags
from cribo.data.readers.scale import MAP_UNITS, MICROMETRES, PixelSize

_ACROSS, _DOWN, _UNIT = 282, 283, 296  # XResolution, YResolution, ResolutionUnit
_OF_UNIT = {2: 25_400.0, 3: 10_000.0, 4: 1000.0, 5: 1.0}  # micrometres; 4 and 5 are tifffile's
_OF_NAME = {
    "nm": 1e-3,
    "nanometer": 1e-3,
    "Å": 1e-4,
    **dict.fromkeys(("µm", "μm", "um", "micron", "microns", "micrometer", "\\u00B5m"), 1.0),
    "mm": 1e3,
    "millimeter": 1e3,
    "cm": 1e4,
    "centimeter": 1e4,
    "m": 1e6,
    "inch": 25_400.0,
    "in": 25_400.0,
}


def pixel_size_of_tiff(tiff: tifffile.TiffFile, tags: Mapping[int, Any]) -> PixelSize | None:
    """Return the pixel size of the full resolution of a TIFF; None if it states none.

    Args:
        tiff: the file.
        tags: values of the tags of its first page.
    """
    if tiff.is_ome:
        return _of_ome(tiff.ome_metadata or "")
    if scale := tags.get(map_tags.SCALE):
        return _positive(scale[1], scale[0], MAP_UNITS)
    if matrix := tags.get(map_tags.MATRIX):
        return _positive(math.hypot(matrix[1], matrix[5]), math.hypot(matrix[0], matrix[4]), MAP_UNITS)
    unit = _OF_UNIT.get(int(tags.get(_UNIT, 2)))
    if tiff.is_imagej:
        unit = _OF_NAME.get(str((tiff.imagej_metadata or {}).get("unit", "")).strip(), unit)
    down, across = _fraction(tags.get(_DOWN)), _fraction(tags.get(_ACROSS))
    return _positive(unit / down, unit / across, MICROMETRES) if unit and down and across else None


def _of_ome(text: str) -> PixelSize | None:
    """Return the pixel size of the first image in OME-XML."""
    with contextlib.suppress(ElementTree.ParseError, ValueError):
        pixels = ElementTree.fromstring(text).find("{*}Image/{*}Pixels")
        if pixels is not None:
            across, down = (
                float(pixels.get(f"PhysicalSize{axis}", "nan")) * _OF_NAME.get(pixels.get(unit, "µm"), math.nan)
                for axis, unit in (("X", "PhysicalSizeXUnit"), ("Y", "PhysicalSizeYUnit"))
            )
            return _positive(down, across, MICROMETRES)
    return None


def _fraction(value: Any) -> float:
    """Return a rational number of a tag; 0 if it is missing or invalid."""
    if not isinstance(value, tuple) or len(value) != 2 or not value[1]:
        return 0.0
    return value[0] / value[1]


def _positive(height: float, width: float, unit: str) -> PixelSize | None:
    return PixelSize(height, width, unit) if all(0 < side < math.inf for side in (height, width)) else None
