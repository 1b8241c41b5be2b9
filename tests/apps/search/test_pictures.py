"""The contact sheets of a search."""

from pathlib import Path

import numpy as np
import pytest
from faster_coco_eval.core import mask as coco_mask
from PIL import Image

from cribo.apps.search.database import FoundObject, IndexedImage
from cribo.apps.search.duplicates import DuplicatePair
from cribo.apps.search.pictures import write_pairs, write_sheet
from cribo.apps.search.queries import Query, Region
from cribo.features.objects import GridMask, ImageObject

RED, BLUE = (220, 20, 20), (20, 20, 220)


def write_halves(path: Path, size: tuple[int, int] = (120, 160), *, turned: bool = False) -> Path:
    """Write an image of (height, width) with a red upper and a blue lower half, rotated by EXIF if `turned`."""
    pixels = np.zeros((*size, 3), dtype=np.uint8)
    pixels[: size[0] // 2], pixels[size[0] // 2 :] = RED, BLUE
    image, exif = Image.fromarray(pixels), Image.Exif()
    if turned:
        image, exif[0x0112] = image.transpose(Image.Transpose.ROTATE_90), 6
    image.save(path, exif=exif)
    return path


def upper_half(size: tuple[int, int] = (120, 160)) -> ImageObject:
    patches = np.zeros((8, 8), dtype=np.uint8, order="F")
    patches[:4] = 1
    mask = GridMask((8, 8), coco_mask.encode(patches)["counts"], size)
    return ImageObject(0, np.ones(2, dtype=np.float32), mask, (0, 0, size[1], size[0] // 2), size[0] * size[1] // 2)


def a_query(path: Path, regions: int = 1) -> Query:
    one = upper_half()
    return Query(path, None, (120, 160), [Region(f"object {n}", one.vector, one.box, one) for n in range(regions)])


def found_in(name: str, size: tuple[int, int] = (120, 160)) -> FoundObject:
    return FoundObject(0.5, IndexedImage(name, 1, 1, 1, "", *size, 1, ""), upper_half(size))


def read(path: Path) -> np.ndarray:
    return np.array(Image.open(path)).astype(int)


def count(sheet: np.ndarray, colour: tuple[int, int, int]) -> int:
    """Count the pixels close to a colour, with tolerance for JPEG compression."""
    return int((np.abs(sheet - colour).max(axis=2) < 25).sum())


@pytest.mark.parametrize("turned", [False, True])
def test_only_the_objects_keep_their_colours(tmp_path: Path, turned: bool) -> None:
    query = a_query(write_halves(tmp_path / "query.png"))
    nothing = read(write_sheet(tmp_path / "empty.png", query, [[]], {}, tmp_path.joinpath))
    write_halves(tmp_path / "found.jpg", turned=turned)
    sheet = read(write_sheet(tmp_path / "sheet.png", query, [[found_in("found.jpg")]], {}, tmp_path.joinpath))
    assert sheet.shape[1] == nothing.shape[1] == 1200
    half = 186 * 140 / 2  # pixels of the upper half of a result
    assert 0.85 * half < count(sheet, RED) - count(nothing, RED) < half
    assert count(sheet, BLUE) == 0


def test_images_that_changed_or_are_gone_have_no_object(tmp_path: Path) -> None:
    query = a_query(write_halves(tmp_path / "query.png"))
    write_halves(tmp_path / "changed.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    found = [found_in(f"{name}.png") for name in ("changed", "gone", "broken")]
    states = {"changed.png": "changed", "gone.png": "missing", "broken.png": "changed"}
    sheet = read(write_sheet(tmp_path / "sheet.png", query, [found], states, tmp_path.joinpath))
    assert count(sheet[:, 400:], RED) == 0
    room = 186 * 140
    assert 1.7 * room < (sheet == 230).all(axis=2).sum() < 2 * room  # without their notes


@pytest.mark.parametrize("size", [(20, 900), (900, 20), (2, 2)])
def test_images_of_any_shape_fit_into_their_cells(tmp_path: Path, size: tuple[int, int]) -> None:
    query = a_query(write_halves(tmp_path / "query.png"))
    name = f"{'long name ' * 20}.png"
    write_halves(tmp_path / name, size)
    one = found_in(name, size)
    sheet = read(write_sheet(tmp_path / "sheet.png", query, [[one]], {name: "changed"}, tmp_path.joinpath))
    assert (sheet[70:, 595:] == 255).all()  # only the title is drawn to the right of the first result


def test_the_number_of_rows_is_limited(tmp_path: Path) -> None:
    path = write_halves(tmp_path / "query.png")
    heights = []
    for regions in (16, 20):
        found = [[found_in("query.png")] * 7] * regions
        heights.append(
            read(write_sheet(tmp_path / "sheet.png", a_query(path, regions), found, {}, tmp_path.joinpath)).shape[0]
        )
    assert heights[0] == heights[1]
    heights = []
    for number in (0, 1, 32, 40):
        pairs = [DuplicatePair(0.99, "query.png", "gone.png")] * number
        heights.append(read(write_pairs(tmp_path / "pairs.png", pairs, tmp_path.joinpath)).shape[0])
    assert heights[0] < heights[1] < heights[2] == heights[3]
