"""Default colours of classes."""

from collections.abc import Sequence

import matplotlib as mpl

from cribo.data.segmentation import Colour, colour_map

_BACKGROUND: Colour = (0, 0, 0)
_STRONG, _LIGHT = "tab10", "tab20"  # the odd colours of tab20 are lighter variants of tab10


def default_palette(classes: Sequence[str]) -> list[Colour]:
    """Return colours that are distinct over photographs.

    For more than 20 classes, they are Pascal VOC's colours. Black is reserved for the background, which overlays do not
    paint.

    Args:
        classes: names of the classes; if the first is "background", it is black.

    Example:
        >>> default_palette(["background", "cell"]), default_palette(["sky", "road"])
        ([(0, 0, 0), (31, 119, 180)], [(31, 119, 180), (255, 127, 14)])
    """
    background = [_BACKGROUND] if classes and classes[0].lower() == "background" else []
    wanted = len(classes) - len(background)
    colours = [mpl.colormaps[_STRONG](number) for number in range(10)]
    colours += [mpl.colormaps[_LIGHT](number) for number in range(1, 20, 2)]
    if wanted > len(colours):
        return [*background, *colour_map(min(256, wanted + 1))[1:]]
    return [*background, *((round(255 * r), round(255 * g), round(255 * b)) for r, g, b, _ in colours[:wanted])]
