"""Damaged or hostile files in COCO's format: each gives labels and boxes, or the error for invalid data."""

import contextlib
import copy
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.fuzz.profile import fuzzed

from cribo.base.errors import InputError
from cribo.data.labelled.coco import CocoLabels
from cribo.data.labelled.detection import BoxedImages

FUZZED = fuzzed(2)
HEIGHT, WIDTH = 24, 40
CONTENT: dict[str, Any] = {
    "images": [{"id": 1, "file_name": "a.png", "height": HEIGHT, "width": WIDTH}, {"id": 2, "file_name": "b.png"}],
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 1, "bbox": [2, 2, 8, 8], "segmentation": [[2, 2, 10, 2, 10, 10]]},
        {
            "id": 2,
            "image_id": 1,
            "category_id": 2,
            "bbox": [0, 0, 2, 24],
            "area": 48,
            "iscrowd": 0,
            "segmentation": {"size": [HEIGHT, WIDTH], "counts": [0, 48, 912]},
        },
        {"id": 3, "image_id": 2, "category_id": 1, "bbox": [9, 9, 9, 9], "segmentation": [[9, 9, 18, 9, 18, 18]]},
    ],
    "categories": [{"id": 1, "name": "one"}, {"id": 2, "name": "two"}],
}
LEAST, MOST = -(10**30), 10**30
numbers = st.one_of(
    st.integers(-50, 50),
    st.integers(LEAST, MOST),
    st.floats(-60, 60),
    st.floats(),
    st.sampled_from([1e7, 2**31, 2**63]),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8), st.sampled_from(["0", "1", "a.png", "b\\a.png"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=9), st.dictionaries(st.sampled_from(["size", "counts", "x"]), inner, max_size=3)
    ),
    max_leaves=20,
)
polygons = st.lists(st.lists(numbers, max_size=24), max_size=4)
runs = st.fixed_dictionaries(
    {
        "size": st.sampled_from([[HEIGHT, WIDTH], [WIDTH, HEIGHT], [2**40, 2**40], [HEIGHT]]),
        "counts": st.one_of(st.lists(numbers, max_size=8), st.text(st.characters(min_codepoint=40, max_codepoint=120))),
    }
)
boxes = st.lists(numbers, min_size=3, max_size=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / f"{name}.png")
    return tmp_path


def read(folder: Path, content: bytes) -> None:
    """Read a file by both readers within a bounded amount of memory."""
    path = folder / "a.json"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        for read_valid in (labels_are_valid, boxes_are_valid):
            with contextlib.suppress(InputError):
                read_valid(path)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def labels_are_valid(path: Path) -> None:
    labels = CocoLabels(path)
    for index in range(len(labels)):
        found = labels.labels(index)
        assert found.shape == (HEIGHT, WIDTH)
        assert set(found.unique().tolist()) <= {*range(len(labels.classes)), labels.ignore_index}


def boxes_are_valid(path: Path) -> None:
    images = BoxedImages(path)
    for index in range(len(images)):
        corners = images.boxes(index).corners
        height, width = images.size(index)
        assert (corners[:, :2] < corners[:, 2:]).all()
        assert (corners >= 0).all()
        assert (corners[:, 2] <= width).all()
        assert (corners[:, 3] <= height).all()


@FUZZED
@given(data=st.data())
def test_any_value_anywhere_gives_labels_or_an_error(folder: Path, data: st.DataObject) -> None:
    content = copy.deepcopy(CONTENT)
    for _ in range(data.draw(st.integers(1, 2))):
        entry = data.draw(st.sampled_from(content[data.draw(st.sampled_from([*content]))]))
        entry[data.draw(st.sampled_from([*entry]))] = data.draw(values)
    read(folder, json.dumps(content).encode())


@FUZZED
@given(outline=st.one_of(polygons, runs, st.lists(numbers, max_size=12)), box=boxes, crowd=st.sampled_from([0, 1, "1"]))
def test_any_outline_gives_labels_or_an_error(folder: Path, outline: Any, box: Any, crowd: Any) -> None:
    content = copy.deepcopy(CONTENT)
    content["annotations"][0].update(segmentation=outline, bbox=box, iscrowd=crowd)
    read(folder, json.dumps(content).encode())


@FUZZED
@given(place=st.integers(0, 10**6), insert=st.binary(max_size=4), cut=st.booleans())
def test_damaged_bytes_give_labels_or_an_error(folder: Path, place: int, insert: bytes, cut: bool) -> None:
    content = json.dumps(CONTENT).encode()
    place %= len(content)
    read(folder, content[:place] + insert + (b"" if cut else content[place + 1 :]))


@FUZZED
@given(mask=st.lists(st.booleans(), min_size=HEIGHT * WIDTH // 8, max_size=HEIGHT * WIDTH // 8))
def test_compressed_runs_of_any_mask_are_read(folder: Path, mask: list[bool]) -> None:
    """The text of the library that writes COCO's format is read exactly."""
    from faster_coco_eval.core import mask as coco

    pixels = np.repeat(np.array(mask), 8).reshape(HEIGHT, WIDTH)
    if not pixels.any():
        return
    encoded: Any = coco.encode(np.asfortranarray(pixels, dtype=np.uint8))
    content = copy.deepcopy(CONTENT)
    outline = {"size": [HEIGHT, WIDTH], "counts": encoded["counts"].decode()}
    content["annotations"] = [content["annotations"][0] | {"segmentation": outline}]
    (folder / "a.json").write_text(json.dumps(content))
    np.testing.assert_array_equal(CocoLabels(folder / "a.json").labels(0), pixels)
