"""Colours are told apart with normal and with deficient colour vision."""

from itertools import combinations

import pytest
from coloraide import Color
from matplotlib import colormaps

from cribo.base.colours import Colour, class_colours, colour_map, distinct_colours, rgb

VISION = ["normal", "protan", "deutan"]


def least_distance(colours: list[Colour], vision: str) -> float:
    """The smallest CIEDE2000 distance between any two colours as they are seen."""
    seen = [Color("srgb", rgb(colour)) for colour in colours]
    if vision != "normal":
        seen = [colour.filter(vision).clip() for colour in seen]
    return min(one.delta_e(other, method="2000") for one, other in combinations(seen, 2))


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize(("count", "least"), [(8, 11.5), (16, 11.5), (20, 10)])
def test_any_two_colours_differ(vision: str, count: int, least: float) -> None:
    assert least_distance(distinct_colours(count), vision) > least


def test_evenly_spaced_hues_and_the_colours_of_pascal_voc_do_not() -> None:
    hues: list[Colour] = []
    for number in range(8):
        red, green, blue, _ = (int(255 * part) for part in colormaps["gist_rainbow"](number / 8))
        hues.append((red, green, blue))
    for colours in (hues, colour_map(9)[1:]):
        assert least_distance(colours, "protan") < 3


def test_further_colours_extend_the_list() -> None:
    most = distinct_colours(255)
    assert len(set(most)) == 255
    assert (0, 0, 0) not in most
    assert distinct_colours(21) == most[:21]


def test_only_a_background_in_the_first_place_is_black() -> None:
    assert class_colours(["Background", "road"]) == [(0, 0, 0), *distinct_colours(1)]
    assert class_colours(["road", "background"]) == distinct_colours(2)
    assert class_colours([]) == []


def test_the_colour_map_equals_pascal_voc() -> None:
    colours = colour_map(256)
    assert len(set(colours)) == 256
    assert [colours[c] for c in (1, 8, 15, 20, 255)] == [
        (128, 0, 0),
        (64, 0, 0),
        (192, 128, 128),
        (0, 64, 128),
        (224, 224, 192),
    ]
    with pytest.raises(ValueError, match=r"count must be in 0\.\.256 .*, got 257"):
        colour_map(257)
