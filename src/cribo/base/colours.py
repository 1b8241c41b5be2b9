"""Colours of objects, clusters and classes in pictures, distinct also with colour vision deficiency."""

from collections.abc import Sequence

from cribo.base.errors import InputError

Colour = tuple[int, int, int]
"""Red, green and blue in 0..255."""

BLACK: Colour = (0, 0, 0)
"""Colour of the background, which overlays do not paint."""

# The first seven are the palette of Okabe and Ito ("Color universal design", 2008). Each of the others is the farthest
# from those before it, among colours that are neither grey nor nearly white or black. With normal vision, protanopia
# and deuteranopia, any two differ by at least 10 in CIEDE2000 (tests/base/test_colours.py).
_DISTINCT = (
    *("0072b2", "e69f00", "009e73", "cc79a7", "56b4e9", "d55e00", "f0e442"),
    *("771122", "bbeecc", "553355", "55ffff", "1100cc", "336655", "aa2200", "3388ff", "ddbb88"),
    *("775577", "dd99aa", "996644", "ee6677"),
)

LINE_COLOURS = tuple(f"#{colour}" for colour in (*_DISTINCT[:6], "000000"))
"""Colours of lines on white: Okabe and Ito's, with black in place of yellow, which is too light."""


def distinct_colours(count: int) -> list[Colour]:
    """Return the first `count` of a list of distinct colours.

    The first 20 are also distinct with protanopia and deuteranopia. The others are those of Pascal VOC: nobody tells so
    many colours apart, so pictures also number their regions.

    Example:
        >>> distinct_colours(2)
        [(0, 114, 178), (230, 159, 0)]
    """
    own = [_parse(colour) for colour in _DISTINCT]
    return [*own, *(colour for colour in colour_map(256)[1:] if colour not in own)][:count]


def class_colours(classes: Sequence[str], given: Sequence[Colour] = ()) -> list[Colour]:
    """Return a distinct colour for each class; a first class named "background" is black.

    Args:
        classes: names of the classes.
        given: colours of the first classes.

    Example:
        >>> class_colours(["background", "cell"]), class_colours(["sky", "road"])
        ([(0, 0, 0), (0, 114, 178)], [(0, 114, 178), (230, 159, 0)])
    """
    background = [BLACK] if classes and classes[0].lower() == "background" else []
    distinct = [*background, *distinct_colours(len(classes) - len(background))]
    return [*given, *distinct[len(given) :]][: len(classes)]


def colour_map(count: int) -> list[Colour]:
    """Return the first `count` colours of Pascal VOC's colour map, which starts with black.

    The bits of a class index are assigned to red, green and blue in turn, from the highest bit of each down, so that
    similar indices get different colours.

    Raises ValueError if `count` is not in 0..256.

    >>> colour_map(3)
    [(0, 0, 0), (128, 0, 0), (0, 128, 0)]
    """
    if not 0 <= count <= 256:
        raise InputError(f"count must be in 0..256 (there are 256 colours), got {count}")

    def channel(number: int, first_bit: int) -> int:
        return sum((number >> (3 * step + first_bit) & 1) << (7 - step) for step in range(3))

    return [(channel(c, 0), channel(c, 1), channel(c, 2)) for c in range(count)]


def rgb(colour: Colour) -> tuple[float, float, float]:
    """Return a colour with red, green and blue in 0-1, as matplotlib expects it."""
    red, green, blue = colour
    return red / 255, green / 255, blue / 255


def _parse(colour: str) -> Colour:
    red, green, blue = bytes.fromhex(colour)
    return red, green, blue
