"""Labels of images that are read at a pixel size: those of annotation files are at full resolution."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.data.readers.test_scale import write_pyramid

from cribo.base.errors import DataError
from cribo.data.config import Reading
from cribo.data.labelled.formats import LABEL_FORMATS, find_examples
from cribo.data.labelled.label_maps import Labelling
from cribo.data.labelled.scaling import Scaling, resized, scaling_of

FULL, READ = (120, 200), (30, 50)
AT_4 = Reading(pixel_size=2.0)  # pixels of 0.5 micrometres
CLASSES = ["background", "cell"]
SQUARE = (40, 20, 120, 80)  # left, top, right, bottom at full resolution
EXPECTED = np.zeros(READ, np.uint8)
EXPECTED[5:20, 10:30] = 1


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image of 200 x 120 pixels in a folder of its own."""
    (tmp_path / "images").mkdir()
    values = np.random.default_rng(0).integers(0, 256, (*FULL, 3), dtype=np.uint8)
    return write_pyramid(tmp_path / "images" / "a.tif", values)


def full_map() -> np.ndarray:
    left, top, right, bottom = SQUARE
    found = np.zeros(FULL, np.uint8)
    found[top:bottom, left:right] = 1
    return found


def labels_of(image: Path, source: Path, **options: Any) -> np.ndarray:
    found = find_examples(image.parent, labels=source, reading=AT_4, **options)
    return found.labels(0).numpy()


def test_nearest_pixels() -> None:
    scaling = Scaling((6, 4), (3, 8))
    assert scaling.nearest(0).tolist() == [1, 3, 5]
    assert scaling.nearest(1).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    values = torch.arange(24).view(6, 4)
    np.testing.assert_array_equal(resized(values, (3, 8)), values[[1, 3, 5]][:, [0, 0, 1, 1, 2, 2, 3, 3]])
    assert resized(values, (6, 4)) is values


def test_the_full_size_has_no_limit_of_pixels(image: Path) -> None:
    assert scaling_of(image, AT_4) == Scaling(FULL, READ)
    assert scaling_of(image, Reading(pixel_size=2.0, max_pixels=5000)) == Scaling(FULL, READ)
    assert scaling_of(image, Reading()) == Scaling(FULL, FULL)


def test_label_maps_of_both_sizes_are_read(image: Path, tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.mkdir()
    Image.fromarray(full_map()).save(maps / "a.png")
    np.testing.assert_array_equal(labels_of(image, maps), EXPECTED)
    other = np.random.default_rng(1).integers(0, 2, READ, dtype=np.uint8)
    Image.fromarray(other).save(maps / "a.png")
    np.testing.assert_array_equal(labels_of(image, maps), other)
    Image.fromarray(other[:, :40]).save(maps / "a.png")
    with pytest.raises(DataError, match="--pixel_size"):
        labels_of(image, maps)


def annotations(kind: str) -> Any:
    """Return COCO annotations of the square, as a polygon, as run lengths or as a box."""
    left, top, right, bottom = SQUARE
    flat = full_map().ravel(order="F")
    ends = [0, *(np.flatnonzero(np.diff(flat)) + 1).tolist(), flat.size]
    shape = {
        "polygon": {"segmentation": [[left, top, right, top, right, bottom, left, bottom]]},
        "runs": {"segmentation": {"size": list(FULL), "counts": np.diff(ends).tolist()}},
        "box": {"bbox": [left, top, right - left, bottom - top]},
    }[kind]
    return {
        "images": [{"id": 1, "file_name": "a.tif", "height": FULL[0], "width": FULL[1]}],
        "categories": [{"id": 1, "name": "cell"}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, **shape}],
    }


@pytest.mark.parametrize("kind", ["polygon", "runs"])
def test_outlines_of_coco_are_scaled(image: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "coco.json").write_text(json.dumps(annotations(kind)))
    np.testing.assert_array_equal(labels_of(image, tmp_path / "coco.json"), EXPECTED)


def test_boxes_of_coco_are_scaled(image: Path, tmp_path: Path) -> None:
    (tmp_path / "coco.json").write_text(json.dumps(annotations("box")))
    found = find_examples(image.parent, labels=tmp_path / "coco.json", reading=AT_4).label_map(0)
    assert [box.corners for box in found.boxes] == [(10, 5, 30, 20)]
    np.testing.assert_array_equal(found.labels, np.where(EXPECTED, 255, 0))


def test_the_listed_size_is_that_of_the_file(image: Path, tmp_path: Path) -> None:
    content = annotations("polygon")
    content["images"][0] |= {"height": READ[0], "width": READ[1]}
    (tmp_path / "coco.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="200 x 120"):
        labels_of(image, tmp_path / "coco.json")


CVAT = """<annotations><meta><job><labels><label><name>cell</name></label></labels></job></meta>
<image id="0" name="a.tif" width="200" height="120">{}</image></annotations>"""


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ('<polygon label="cell" points="40,20;120,20;120,80;40,80"></polygon>', EXPECTED),
        ('<mask label="cell" rle="0, 4800" left="40" top="20" width="80" height="60"></mask>', EXPECTED),
        (
            '<ellipse label="cell" cx="100" cy="60" rx="80" ry="40" rotation="0"></ellipse>',
            [[((x - 24.5) / 20) ** 2 + ((y - 14.5) / 10) ** 2 <= 1 for x in range(50)] for y in range(30)],
        ),
        (
            '<points label="cell" points="100,60"></points>',
            [[1 if x in (24, 25) and y in (14, 15) else 255 for x in range(50)] for y in range(30)],
        ),
    ],
)
def test_shapes_of_cvat_are_scaled(image: Path, tmp_path: Path, shape: str, expected: Any) -> None:
    (tmp_path / "a.xml").write_text(CVAT.format(shape))
    np.testing.assert_array_equal(labels_of(image, tmp_path / "a.xml"), expected)


WRITTEN = [name for name, row in LABEL_FORMATS.items() if row.write is not None and not row.on_map]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_at_a_pixel_size_is_read_at_any(image: Path, tmp_path: Path, name: str) -> None:
    row = LABEL_FORMATS[name]
    assert row.write is not None
    place = tmp_path / row.written
    if not place.suffix:
        place.mkdir()
    values = torch.from_numpy(EXPECTED)
    written = values if row.any_resolution else resized(values, FULL)
    row.write(place, Labelling({"a.tif": FULL}, CLASSES, lambda _: written))
    source = image.parent
    options: dict[str, Any] = {"labels": place}
    if name == "label-studio":  # results are predictions, which somebody must accept
        place.write_text(place.read_text().replace('"predictions"', '"annotations"'))
    elif name == "voc":
        options = {"labels": place / "SegmentationClass", "classes": place / "classes.txt"}
    elif name == "yolo":
        (place / "images").mkdir()
        source.rename(place / "images" / "train")
        source, options = place, {}
    for reading, expected in ((AT_4, EXPECTED), (Reading(), full_map())):
        found = find_examples(source, **options, reading=reading)
        np.testing.assert_array_equal(found.labels(0), expected)
