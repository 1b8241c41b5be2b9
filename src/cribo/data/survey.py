"""The range of values of a collection, from some of its images."""

from __future__ import annotations

import logging
import posixpath
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from cribo.base.errors import MissingPackage, TooManyPixels, UnreadableImage
from cribo.base.wording import counted, option_text
from cribo.data.config import Reading, spread
from cribo.data.reading import ImageContent, kind_of_name, open_picture, open_windows

if TYPE_CHECKING:
    from jaxtyping import Float, Real

    from cribo.data.sources.collection import ImageCollection
    from cribo.data.sources.images import EncodedImages

log = logging.getLogger("cribo")

_MOST_IMAGES = 16
_MOST_VALUES = 2**16  # of a channel of an image
_WINDOW, _WINDOWS = 256, 8  # side of the windows of a large image in pixels, and windows per axis
_PERCENTILES = (0.1, 99.9)


def surveyed(images: ImageCollection | EncodedImages) -> Reading:
    """Return how the images of a collection are read, with a range of values if nothing states it.

    Up to 16 evenly spread images are decoded, if their kind may have more than 8 bits; 64 windows of large ones. If
    nothing states the values of black and white, and its reading does not give them, they are the percentiles 0.1 and
    99.9 of the finite values: of each of its `channels`, of all channels together for RGB, whose balance is kept. They
    are logged.

    >>> surveyed(open_collection("cells", reading=Reading(channels=(0, 2)))).range  # doctest: +SKIP
    (108.0, 3014.0, 97.0, 1460.0)
    """
    reading = images.reading
    if reading.range is not None:
        return reading
    deep = [index for index in range(len(images)) if _may_be_deep(posixpath.splitext(images.name(index))[1])]
    some = [deep[place] for place in spread(len(deep), _MOST_IMAGES)]
    found = [values for index in some if (values := _values(images, index)) is not None]
    if not found:
        return reading
    if reading.channels is None:
        found = [values.reshape(-1, 1) for values in found]
    limits = percentile_limits(np.concatenate(found))
    reading = replace(reading, range=tuple(limits.ravel().tolist()))
    log.info(
        "values from %s become black to white, the percentiles 0.1 and 99.9 of %s: choose others with --range %s",
        *(_described(limits, reading), counted(len(found), "image"), option_text(reading.range)),
    )
    return reading


@cache
def _may_be_deep(extension: str) -> bool:
    kind = kind_of_name(f"image{extension}")
    return kind is None or kind.bits > 8


def _values(images: ImageCollection | EncodedImages, index: int) -> Real[np.ndarray, "n c"] | None:
    """Return evenly spread values of an image whose range is unknown; None for other images."""
    try:
        file = images.read(index)
        try:
            with open_picture(file, reading=images.reading) as picture:
                values, valid = picture.unscaled(), picture.valid()
            if values is not None:
                values = values.reshape(-1, values.shape[-1]) if valid is None else values[valid]
        except TooManyPixels:
            values = _values_of_windows(file, images.reading)
    except (UnreadableImage, MissingPackage, OSError):
        return None
    return None if values is None else values[:: max(1, -(-len(values) // _MOST_VALUES))]


def _values_of_windows(file: ImageContent, reading: Reading) -> Real[np.ndarray, "n c"] | None:
    """Return the values of evenly spaced windows of a large image."""
    with open_windows(file, reading=reading) as picture:
        if picture is None:
            return None
        tops, lefts = map(_starts, picture.size())
        height, width = (min(side, _WINDOW) for side in picture.size())
        parts = [picture.unscaled_window(top, left, height, width) for top in tops for left in lefts]
    found = [part for part in parts if part is not None]
    return np.concatenate(found) if found else None


def _starts(side: int) -> list[int]:
    """Return the starts of windows along a side, including both ends."""
    return np.unique(np.linspace(0, max(0, side - _WINDOW), _WINDOWS).astype(int)).tolist()


def percentile_limits(values: Real[np.ndarray, "n c"]) -> Float[np.ndarray, "c 2"]:
    """Return the values of black and white of each channel: the percentiles 0.1 and 99.9, to four digits."""
    limits = np.empty((values.shape[1], 2))
    for channel, column in enumerate(values.T):
        finite = column[np.isfinite(column)]
        low, high = np.percentile(finite, _PERCENTILES) if len(finite) else (0.0, 1.0)
        low, high = float(f"{low:.4g}"), float(f"{high:.4g}")
        limits[channel] = low, high if high > low else low + 1
    return limits


def _described(limits: Float[np.ndarray, "c 2"], reading: Reading) -> str:
    ranges = [f"{low:g} to {high:g}" for low, high in limits]
    if reading.channels is None:
        return ranges[0]
    return ", ".join(f"{each} ({reading.channel_name(place)})" for place, each in enumerate(ranges))
