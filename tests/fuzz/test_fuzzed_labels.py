"""Any value anywhere in the labels of other tools, and any damaged byte, gives labels or an error that names it."""

import base64
import contextlib
import copy
import io
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.fuzz.profile import fuzzed
from tests.fuzz.test_fuzzed_coco import HEIGHT, WIDTH, values

from cribo.base.errors import InputError, UnreadableImage
from cribo.data.labelled.formats import find_examples
from cribo.data.labelled.label_studio_writing import encoded

FUZZED = fuzzed(2)
MASK = np.eye(HEIGHT, WIDTH, dtype=bool)
SIZE = {"original_width": WIDTH, "original_height": HEIGHT}


def png() -> str:
    file = io.BytesIO()
    Image.fromarray(MASK[:4, :4].astype(np.uint8)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


RING, HOLE = [[2, 2], [10, 2], [10, 10], [2, 2]], [[6, 3], [8, 3], [8, 5], [6, 3]]
OTHER = [[20, 2], [30, 2], [30, 10], [20, 2]]
JSON: dict[str, Any] = {
    "label-studio": [
        {
            "id": 1,
            "data": {"image": "/data/upload/1/0f3c2a19-a.png"},
            "annotations": [
                {
                    "result": [
                        {**SIZE, "value": {"points": [[1, 1], [50, 1], [50, 50]], "polygonlabels": ["one"]}},
                        {**SIZE, "value": {"format": "rle", "rle": encoded(MASK), "brushlabels": ["two"]}},
                        {**SIZE, "value": {"x": 1, "y": 1, "radiusX": 9, "radiusY": 5, "ellipselabels": ["two"]}},
                        {
                            **SIZE,
                            "value": {
                                "x": 1,
                                "y": 1,
                                "width": 9,
                                "height": 5,
                                "rotation": 9,
                                "rectanglelabels": ["one"],
                            },
                        },
                    ]
                }
            ],
        }
    ],
    "labelme": {
        "imagePath": "a.png",
        "imageHeight": HEIGHT,
        "imageWidth": WIDTH,
        "shapes": [
            {"label": "one", "points": RING[:3], "shape_type": "polygon"},
            {"label": "two", "points": [[4, 4], [8, 4]], "shape_type": "circle"},
            {"label": "two", "points": [[4, 4], [7, 7]], "shape_type": "mask", "mask": png()},
            {"label": "two", "points": [[4, 4], [8, 4]], "shape_type": "rectangle"},
        ],
    },
    "geojson": {
        "type": "FeatureCollection",
        "image": "a.png",
        "features": [
            {"properties": {"class": "one"}, "geometry": {"type": "Polygon", "coordinates": [RING, HOLE]}},
            {"properties": {"name": "two"}, "geometry": {"type": "MultiPolygon", "coordinates": [[OTHER]]}},
            {"properties": {"name": "two"}, "geometry": {"type": "Point", "coordinates": [1, 2]}},
        ],
    },
}
CVAT = (
    "<annotations><meta><job><labels><label><name>one</name></label></labels></job></meta>"
    f'<image id="1" name="a.png" width="{WIDTH}" height="{HEIGHT}">'
    '<polygon label="one" points="2,2;10,2;10,10" z_order="1"></polygon>'
    '<mask label="one" rle="1, 2, 1" left="3" top="5" width="2" height="2"></mask>'
    '<ellipse label="one" cx="10" cy="10" rx="4" ry="2"></ellipse></image></annotations>'
)
FILES = {
    **{f"{name}.json": json.dumps(content) for name, content in JSON.items()},
    "cvat.xml": CVAT,
    "labels/a.txt": "0 .1 .1 .5 .1 .5 .5\n1 .5 .5 .2 .2\n",
    "data.yaml": "train: images\nnames: [one, two]\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "images/a.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / name)
    return tmp_path


def read(folder: Path, name: str, content: bytes) -> None:
    """Read a file within a bounded amount of memory."""
    for other in FILES:
        (folder / other).unlink(missing_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    if "/" in name or name.endswith(".yaml"):
        (folder / "labels").mkdir(exist_ok=True)
        for other in ("labels/a.txt", "data.yaml"):
            (folder / other).write_text(FILES[other])
    (folder / name).write_bytes(content)
    tracemalloc.start()
    try:
        with contextlib.suppress(InputError, UnreadableImage):
            found = find_examples(folder / "data.yaml" if "/" in name else folder / name)
            for index in range(len(found)):
                labels = found.labels(index)
                assert labels.shape == (HEIGHT, WIDTH)
                assert set(labels.unique().tolist()) <= {*range(len(found.classes)), 255}
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def nodes(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each place in a JSON document: a list or dictionary, and a key of it."""
    keys = content.keys() if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        yield content, key
        yield from nodes(content[key])


@pytest.mark.parametrize("name", JSON)
def test_the_valid_files_are_read(folder: Path, name: str) -> None:
    (folder / "a.json").write_text(json.dumps(JSON[name]))
    assert set(find_examples(folder / "a.json").labels(0).unique().tolist()) == {0, 1, 2}


@FUZZED
@given(data=st.data())
def test_any_value_anywhere_gives_labels_or_an_error(folder: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*JSON]))
    content = copy.deepcopy(JSON[name])
    for _ in range(data.draw(st.integers(1, 2))):
        parent, key = data.draw(st.sampled_from([*nodes(content)]))
        parent[key] = data.draw(values)
    read(folder, f"{name}.json", json.dumps(content).encode())


@FUZZED
@given(name=st.sampled_from([*FILES]), place=st.integers(0, 10**6), insert=st.binary(max_size=4), cut=st.booleans())
def test_damaged_bytes_give_labels_or_an_error(folder: Path, name: str, place: int, insert: bytes, cut: bool) -> None:
    content = FILES[name].encode()
    place %= len(content)
    read(folder, name, content[:place] + insert + (b"" if cut else content[place + 1 :]))
