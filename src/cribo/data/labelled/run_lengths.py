"""Masks as run lengths in COCO's format, read without trusting the numbers; does not import torch."""

import numpy as np
from jaxtyping import Bool, Int64

from cribo.base.errors import InputError

_CHARACTERS = 7  # of a number in compressed run lengths; 5 bits each


def decompressed(text: str | bytes) -> Int64[np.ndarray, " n"]:
    """Return the counts in compressed text: numbers of 5 bits per character, from the fourth on as differences.

    Raises:
        InputError: the text is not of this form. Counts may still be negative.
    """
    encoded = text.encode("utf-8", "replace") if isinstance(text, str) else text
    codes = np.frombuffer(encoded, dtype=np.uint8).astype(np.int64) - ord("0")
    ends = np.flatnonzero(codes & 32 == 0)
    starts = np.concatenate([[0], ends + 1])[:-1]
    broken = len(codes) == 0 or codes.min() < 0 or codes.max() > 63 or not len(ends) or ends[-1] != len(codes) - 1
    if broken or (ends - starts).max() >= _CHARACTERS:
        raise InputError(f"counts of run lengths are not compressed text of COCO's format, got {text!r:.60}")
    places = np.arange(len(codes)) - np.repeat(starts, ends + 1 - starts)
    numbers = np.add.reduceat((codes & 31) << (5 * places), starts)
    numbers -= np.where(codes[ends] & 16, np.int64(1) << (5 * (places[ends] + 1)), 0)
    numbers[1::2], numbers[2::2] = numbers[1::2].cumsum(), numbers[2::2].cumsum()
    return numbers


def require_counts(counts: Int64[np.ndarray, " n"], size: tuple[int, int]) -> None:
    """Raise InputError if counts are negative or do not fill a mask of (height, width)."""
    pixels, total = size[0] * size[1], counts.sum(dtype=np.float64)  # float64 does not overflow
    if (counts < 0).any() or total != pixels:
        negative = f" and {counts.min()}" if (counts < 0).any() else ""
        raise InputError(
            f"counts of run lengths must be numbers >= 0 whose sum is {pixels}, the pixels of the image, got a sum of "
            f"{total:.0f}{negative}"
        )


def mask_of(counts: Int64[np.ndarray, " n"], size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """Return the mask of (height, width) of valid counts, which go down the columns and start outside the mask."""
    return np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(size, order="F")
