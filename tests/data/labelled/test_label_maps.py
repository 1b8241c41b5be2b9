from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cribo.base.errors import DataError
from cribo.data.labelled.label_maps import ClassList, LabelColours, LabelValues, class_indices, read_classes

COLOURS = np.array([[255, 0, 0], [0, 255, 0], [9, 9, 9]], dtype=np.uint8)
INDICES = np.array([[0, 1, 2], [2, 1, 0]], dtype=np.uint8)
LISTED = LabelColours(("red", "green"), ((255, 0, 0), (0, 255, 0)), ((9, 9, 9),), "classes.txt")


def test_values_are_formatted_as_ranges() -> None:
    assert str(LabelValues((7, 8, 11, 12, 13), ignored=(0, 9, 255))) == (
        "in 7..8, 11..13 (5 classes) or 0, 9, 255 (ignored)"
    )
    assert str(LabelValues((0, 255), ignored=())) == "in 0, 255 (2 classes)"


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "I;16"])
def test_grey_values_in_any_mode_are_class_indices(mode: str) -> None:
    image = Image.fromarray(INDICES.astype(np.uint16)) if mode == "I;16" else Image.fromarray(INDICES).convert(mode)
    np.testing.assert_array_equal(class_indices(3).read(image, "a.png").labels, INDICES)


def test_the_palette_of_masks_belongs_to_their_classes() -> None:
    image = Image.fromarray(np.array([[0, 255]], dtype=np.uint8)).convert("P")
    image.putpalette([1, 2, 3] + 254 * [7, 7, 7] + [4, 5, 6])
    assert LabelValues((0, 255), ignored=()).read(image, "a.png").palette == ((1, 2, 3), (4, 5, 6))


def test_classes_are_read_by_their_colours() -> None:
    coloured, expected = Image.fromarray(COLOURS[INDICES]), np.where(INDICES == 2, 255, INDICES)
    for image in (coloured, coloured.quantize(), coloured.convert("RGBA")):
        np.testing.assert_array_equal(LISTED.read(image, "a.png").labels, expected)
    transparent = np.array(coloured.convert("RGBA"))
    transparent[0, 0] = (1, 2, 3, 0)
    expected[0, 0] = 255
    np.testing.assert_array_equal(LISTED.read(Image.fromarray(transparent), "a.png").labels, expected)


def test_unlisted_colours_are_refused() -> None:
    pixels = COLOURS[INDICES]
    pixels[0] = (17, 34, 51)
    pixels[1, 0] = (1, 1, 2)
    message = (
        r"a\.png: the colour #112233 of 3 of 6 pixels \(and 1 other colour\) is not in classes\.txt, which lists red "
        r"#ff0000, green #00ff00: add it, with the name ignore for pixels without a class$"
    )
    with pytest.raises(DataError, match=message):
        LISTED.read(Image.fromarray(pixels), "a.png")
    with pytest.raises(DataError, match=r"or remove the colours from classes\.txt if the values are class indices"):
        LISTED.read(Image.fromarray(INDICES), "a.png")
    with pytest.raises(DataError, match=r"must be colours of 8 bits per channel, as classes\.txt lists colours"):
        LISTED.read(Image.fromarray(INDICES.astype(np.uint16)), "a.png")


def test_lists_of_classes(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_text("traffic light\n\nroad 66\n")
    assert read_classes(path) == ClassList(["traffic light", "road 66"])
    path.write_text("# two classes\ntraffic light\n # and\nroad 66\n")
    assert read_classes(path) == ClassList(["traffic light", "road 66"])
    path.write_text("# colours\ntraffic light 255 0 0\nroad,0, 255,0\nignore #090909\n")
    names = ("traffic light", "road")
    assert read_classes(path) == ClassList([*names], LabelColours(names, LISTED.classes, LISTED.ignored, str(path)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("road 0 0 256", "colours must be 0 to 255, got 'road 0 0 256'"),
        ("road 0 0 0\nsky", "'sky' has no colour, but other lines have: add #rrggbb, or remove all colours"),
        ("road 0 0 16\nsky #000010", "road and sky have the same colour, #000010"),
        ("ignore 0 0 0", "must name 1 to 255 classes, got 0"),
    ],
)
def test_invalid_colours_of_classes_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "classes.txt").write_text(text)
    with pytest.raises(DataError, match=rf"classes\.txt:? {message}"):
        read_classes(tmp_path / "classes.txt")
