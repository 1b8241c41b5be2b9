"""Limits on the pixels and the number of images; does not import torch."""

MAX_PIXELS = 2 * 89_478_485
"""Default limit of width x height: the size at which Pillow refuses to open an image."""


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` indices below `count`, evenly spaced.

    Example:
        >>> spread(10, 3), spread(2, 3)
        ([0, 3, 6], [0, 1])
    """
    number = min(count, most)
    return [place * count // number for place in range(number)]
