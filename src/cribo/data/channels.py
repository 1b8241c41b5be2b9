"""Values of more than 8 bits per channel: their range, and their scaling to 8 bits."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Num, Real, UInt8

from cribo.base.errors import InputError
from cribo.base.wording import counted

FULL = 2**16 - 1
"""The largest value of 16 bits."""

_LEAST = 2**13  # of the brightest value of 16 bits; below, an image is nearly black
_DIM = 2**15


class Samples(NamedTuple):
    """The values of an image in its file.

    Attributes:
        bits: bits of a value.
        low: the value of black.
        high: the value of white, if the file states it.
        scale: factor from a decoded value to that in the file.
        white_is_zero: whether 0 is white.
    """

    bits: int = 8
    low: float = 0.0
    high: float | None = None
    scale: float = 1.0
    white_is_zero: bool = False


def grey_to_8_bits(
    values: Real[np.ndarray, "h w"], samples: Samples, limits: tuple[float, float] | None, name: str
) -> UInt8[np.ndarray, "h w"]:
    """Scale grey values of 9 to 32 bits to 8 bits.

    Args:
        values: decoded values.
        samples: the values in the file.
        limits: the values of black and white; by default, those that the file states.
        name: of the image in messages.

    Raises:
        InputError: the range of the values is unknown.
    """
    if samples.bits > 16:
        if limits is None:
            raise InputError(
                "signed or 32-bit pixels have no defined value range: give it with --range LOW,HIGH, or convert the "
                "file to 8 or 16 bits per channel"
            )
        grey = scaled(values, *limits)
    else:
        low, high = limits or (samples.low, samples.high)
        largest = float(values.max()) * samples.scale
        if high is None or (limits is None and largest > high):
            require_bright(round(largest), name)
            low, high = 0, FULL * samples.scale
        if (low, high) == (0, FULL * samples.scale):
            grey = (values >> 8).astype(np.uint8)  # as Pillow reads 16 bits per channel of RGB
        else:
            grey = scaled(np.arange(2**16) * samples.scale, low, high)[values]
    return 255 - grey if samples.white_is_zero else grey


def require_bright(largest: int, name: str, *, way: str | None = None) -> None:
    """Refuse an image of 16 bits that is nearly black, and count it if it is dark.

    Args:
        largest: its largest value.
        name: its name.
        way: what to do, for the error; by default, to give the range of its bits.

    Raises:
        InputError: no value reaches 2^13.
    """
    bits = max(9, largest.bit_length())
    if largest >= _LEAST:
        if largest < _DIM:
            DIM_IMAGES.add(name, largest)
        return
    if way is None:
        way = (
            f"give the range of its values with --range LOW,HIGH, such as --range 0,{2**bits - 1} for {bits} bits, or "
            "--range 0,65535 if it is a dark picture"
        )
    raise InputError(f"nearly black: the largest of its 16-bit values is {largest} of {FULL}; {way}")


def require_high_bits(limits: tuple[float, float]) -> None:
    """Raise InputError if a range needs the low bits of colour with 16 bits, of which only the high ones are read."""
    if limits[1] < _LEAST:
        raise InputError(
            f"only the 8 high bits of colour with 16 bits can be read, not values up to {limits[1]:g}: convert the "
            "file to 8 bits per channel, or give --range for grey images only"
        )


def scaled(values: Real[np.ndarray, "*size"], low: float, high: float) -> UInt8[np.ndarray, "*size"]:
    """Return values from `low` to `high` as 0 to 255."""
    grey = (values.astype(np.float32) - np.float32(low)) * np.float32(255 / (high - low))
    return np.nan_to_num(grey.clip(0, 255)).round().astype(np.uint8)


def is_data(values: Num[np.ndarray, "*size"], nodata: float | None) -> Bool[np.ndarray, "*size"]:
    """Return a mask of the values that are finite and not the nodata value."""
    found = np.isfinite(values) if values.dtype.kind == "f" else np.ones(values.shape, dtype=bool)
    if nodata is not None:
        found &= values != (values.dtype.type(nodata) if values.dtype.kind == "f" else nodata)  # rounded as stored
    return found


def has_data(values: Num[np.ndarray, "h w c"], nodata: float | None) -> Bool[np.ndarray, "h w"]:
    """Return a mask of the pixels with data in at least one channel (see `is_data`)."""
    return np.any(is_data(values, nodata), axis=-1)


class DimImages:
    """Counts the images of 16 bits that look dark because they may use fewer bits; one message reports them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._found: dict[str, int] = {}  # an image may be read repeatedly

    def add(self, name: str, largest: int) -> None:
        """Count an image whose largest value is below 2^15."""
        with self._lock:
            self._found[name] = largest

    def extend(self, found: Iterable[tuple[str, int]]) -> None:
        """Count the images that another process has taken."""
        for name, largest in found:
            self.add(name, largest)

    def take(self) -> list[tuple[str, int]]:
        """Return name and largest value of each image since the last call."""
        with self._lock:
            found, self._found = list(self._found.items()), {}
        return found

    def message(self) -> str | None:
        """Return the message about the images since the last call, or None without any."""
        if not (found := self.take()):
            return None
        largest = max(value for _, value in found)
        return (
            f"{counted(len(found), 'image')} with 16-bit values, such as {found[0][0]}, look dark: the largest value "
            f"is {largest} of {FULL}. If the values have fewer bits, give their range with --range LOW,HIGH, such as "
            f"--range 0,{2 ** largest.bit_length() - 1}"
        )


DIM_IMAGES = DimImages()
"""The dark images of this process."""
