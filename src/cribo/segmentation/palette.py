"""Colours of classes where the examples bring none."""

from collections.abc import Sequence

import matplotlib as mpl

from cribo.data.segmentation import Colour, colour_map

_BACKGROUND: Colour = (0, 0, 0)
_STRONG, _LIGHT = "tab10", "tab20"  # the second one's odd colours are the first one's, lightened


def default_palette(classes: Sequence[str]) -> list[Colour]:
    """Colours that are told apart over a photograph, for up to 20 classes; then Pascal VOC's.

    Black is the background's alone, which overlays leave unpainted.

    Args:
        classes: names; a first one called background is black.

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
