"""Painting of pictures as NumPy arrays: tinted, outlined and striped regions."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Int, UInt8

from cribo.base.colours import Colour

STRIPES = (215, 165)
"""The two greys of the stripes that mark unlabelled pixels."""

MARK: Colour = (85, 255, 255)
"""Colour of outlines over photographs, drawn with a dark edge. Few photographs and no heat map contain it."""

_EDGE: Colour = (20, 20, 20)
_TINT = 0.6  # opacity of a colour over a grey picture
_PLACED = 64  # longer side, in pixels, at which the places of numbers are found


def as_picture(image: UInt8[np.ndarray, "c h w"]) -> UInt8[np.ndarray, "h w 3"]:
    """Return an image of C channels as an RGB picture for people: its first three channels; of two, blue is black.

    >>> as_picture(np.full((2, 1, 1), 9, dtype=np.uint8)).tolist()
    [[[9, 9, 0]]]
    """
    shown = image[:3]
    if len(shown) < 3:
        shown = np.concatenate((shown, np.zeros_like(image, shape=(3 - len(shown), *image.shape[1:]))))
    return shown.transpose(1, 2, 0)


def paint_regions(
    picture: UInt8[np.ndarray, "h w 3"], labels: Int[np.ndarray, "h w"], colours: Mapping[int, Colour]
) -> UInt8[np.ndarray, "h w 3"]:
    """Tint and outline the regions in `colours`; fade the other pixels to grey."""
    painted = _faded(picture)
    for region, colour in colours.items():
        inside = labels == region
        painted[inside] = tint(picture[inside], np.array(colour))
        painted[inside & ~_eroded(inside, 1)] = colour
    return painted


def tint(picture: UInt8[np.ndarray, "*size 3"], colours: Int[np.ndarray, "#*size 3"]) -> UInt8[np.ndarray, "*size 3"]:
    """Return a picture in shades of one colour, or of a colour per pixel.

    It keeps half of its contrast: otherwise, a dark colour over bright pixels equals a bright colour over dark ones.
    """
    grey = 64 + 0.5 * picture.mean(axis=-1, keepdims=True)
    return np.rint((1 - _TINT) * grey + _TINT * colours).astype(np.uint8)


def outline_region(
    picture: UInt8[np.ndarray, "h w 3"],
    inside: Bool[np.ndarray, "h w"],
    colour: Colour = MARK,
    *,
    width: int | None = None,
) -> UInt8[np.ndarray, "h w 3"]:
    """Outline a region, which keeps its own colours, with a dark edge; fade the other pixels to grey.

    Args:
        picture: the picture.
        inside: pixels of the region.
        colour: colour of the outline.
        width: width of the outline in pixels; by default 1 % of the shorter side.
    """
    width = width or max(1, min(picture.shape[:2]) // 100)
    painted, outside = _faded(picture), ~inside
    painted[outside & ~_eroded(outside, 2 * width)] = _EDGE
    painted[outside & ~_eroded(outside, width)] = colour
    painted[inside] = picture[inside]
    return painted


def _faded(picture: UInt8[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "h w 3"]:
    grey = 0.4 * picture.mean(axis=2, keepdims=True) + 90
    return np.rint(grey).astype(np.uint8).repeat(3, axis=2)


def _eroded(inside: Bool[np.ndarray, "h w"], width: int) -> Bool[np.ndarray, "h w"]:
    """Erode a mask by `width` pixels; pixels outside the picture count as part of the mask."""
    for axis in (0, 1):
        margins = [(width, width) if each == axis else (0, 0) for each in (0, 1)]
        padded = np.pad(inside, margins, constant_values=True)
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * width + 1, axis=axis)
        inside = np.logical_and.reduce(windows, axis=-1)
    return inside


def region_places(labels: Int[np.ndarray, "h w"]) -> dict[int, tuple[float, float, float]]:
    """Return (x, y, radius), in pixels, of a place deep inside each region and its distance to others.

    Example:
        >>> region_places(np.array([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0]]))
        {0: (3.0, 1.0, 1.0), 1: (1.0, 1.0, 2.0)}
    """
    step = max(1, -(-max(labels.shape) // _PLACED))
    first = step // 2
    small = labels[first::step, first::step]
    places = {}
    for region in np.unique(small).tolist():
        inside = np.pad(small == region, 1)
        depth = np.zeros(inside.shape, dtype=int)
        while inside.any():
            depth += inside
            inside = _eroded(inside, 1)
        radius = depth.max()
        deepest = np.argwhere(depth == radius) - 1.0  # without the padding
        row, column = deepest[np.square(deepest - deepest.mean(axis=0)).sum(axis=1).argmin()].tolist()
        places[region] = (first + step * column, first + step * row, step * float(radius))
    return places


def paint_classes(
    labels: UInt8[np.ndarray, "h w"], palette: Sequence[Colour], ignore_index: int
) -> UInt8[np.ndarray, "h w 3"]:
    """Colour each pixel by its class; draw stripes where the label is `ignore_index`."""
    colours = np.zeros((256, 3), dtype=np.uint8)
    colours[: len(palette)] = np.array(palette).reshape(-1, 3)
    painted = colours[labels]
    unlabelled = labels == ignore_index
    painted[unlabelled] = stripes(labels.shape)[unlabelled]
    return painted


def stripes(size: Sequence[int]) -> UInt8[np.ndarray, "h w 3"]:
    """Return diagonal grey stripes of size (height, width), which mark unlabelled pixels."""
    width = max(2, size[1] // 60)
    diagonal = (np.arange(size[0])[:, None] + np.arange(size[1])) // width % 2
    return np.where(diagonal == 0, *STRIPES).astype(np.uint8)[..., None].repeat(3, axis=2)
