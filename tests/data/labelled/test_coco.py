import json
import logging
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faster_coco_eval.core import mask as coco
from PIL import Image

from cribo.base.errors import DataError, MissingData
from cribo.data.labelled.coco import CocoLabels, find_coco

SQUARE = [2, 2, 8, 2, 8, 8, 2, 8]  # pixels 2 to 7 in both directions
CATEGORIES = [{"id": 90, "name": "late"}, {"id": 7, "name": "early"}]


def annotation(segmentation: Any, category: int = 7, **more: Any) -> dict[str, Any]:
    return {"id": 1, "image_id": 5, "category_id": category, "segmentation": segmentation, **more}


def write(folder: Path, annotations: list[dict[str, Any]], name: str = "a.json", **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), "blue").save(folder / "one.png")
    content: dict[str, Any] = {
        "images": [{"id": 5, "file_name": "one.png", "height": 10, "width": 12}],
        "annotations": annotations,
        "categories": CATEGORIES,
        **changes,
    }
    (folder / name).write_text(json.dumps(content))
    return folder / name


def square() -> np.ndarray:
    mask = np.zeros((10, 12), dtype=np.uint8)
    mask[2:8, 2:8] = 1
    return mask


def test_classes_are_sorted_by_id(tmp_path: Path) -> None:
    labels = CocoLabels(write(tmp_path, [annotation([SQUARE], 90)]))
    assert labels.classes == ["background", "early", "late"]
    assert (len(labels), labels.name(0), labels.load(0).shape) == (1, "one.png", (3, 10, 12))
    assert torch.equal(labels.labels(0), torch.from_numpy(square() * 2))


def test_polygons_and_both_types_of_run_lengths_agree(tmp_path: Path) -> None:
    compressed = coco.encode(np.asfortranarray(square()))
    flat = square().T.ravel()  # run lengths are column-major
    ends = np.flatnonzero(np.diff(np.concatenate(([0], flat)))).tolist()
    runs = np.diff([0, *ends, len(flat)]).tolist()
    segmentations: list[Any] = [
        [SQUARE],
        {"size": [10, 12], "counts": compressed["counts"].decode()},
        {"size": [10, 12], "counts": runs},
    ]
    for segmentation in segmentations:
        assert torch.equal(CocoLabels(write(tmp_path, [annotation(segmentation)])).labels(0), torch.tensor(square()))


def test_smaller_objects_cover_larger_ones_and_crowds(tmp_path: Path) -> None:
    inner, all_of_it = [4, 4, 6, 4, 6, 6, 4, 6], [0, 0, 12, 0, 12, 10, 0, 10]
    objects = [annotation([inner], 90), annotation([SQUARE], 7), annotation([all_of_it], 90, iscrowd=1)]
    for order in (objects, objects[::-1]):
        expected = np.full((10, 12), 255)
        expected[2:8, 2:8] = 1
        expected[4:6, 4:6] = 2
        assert torch.equal(CocoLabels(write(tmp_path, order)).labels(0), torch.tensor(expected, dtype=torch.uint8))


def test_an_object_of_several_polygons(tmp_path: Path) -> None:
    labels = CocoLabels(write(tmp_path, [annotation([[0, 0, 2, 0, 2, 2, 0, 2], [9, 7, 12, 7, 12, 10, 9, 10]])])).labels(
        0
    )
    assert int(labels.sum()) == 4 + 9
    assert labels[0, 0] == labels[9, 11] == 1


def test_images_without_objects_are_background(tmp_path: Path) -> None:
    assert not CocoLabels(write(tmp_path, [])).labels(0).any()


def test_images_in_the_default_or_another_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "set", [])
    (tmp_path / "set" / "images").mkdir()
    (tmp_path / "set" / "one.png").rename(tmp_path / "set" / "images" / "one.png")
    assert CocoLabels(path).path(0) == str(tmp_path / "set" / "images" / "one.png")
    (tmp_path / "set" / "images").rename(tmp_path / "elsewhere")
    assert CocoLabels(path, tmp_path / "elsewhere").load(0).shape == (3, 10, 12)
    with pytest.raises(
        MissingData, match=r"1 of the 1 images of .*a\.json are not in .*set or .*images, .* 'one\.png'"
    ):
        CocoLabels(path)


@pytest.mark.parametrize(
    ("annotations", "changes", "message"),
    [
        ([annotation([SQUARE], 8)], {}, r"annotation 1 refers to category 8, which is not listed; listed: 7, 90"),
        ([annotation([SQUARE]) | {"image_id": 6}], {}, "annotation 1 refers to image 6, which is not listed"),
        ([annotation([])], {}, "boxes are needed"),
        ([annotation([]) | {"bbox": [0, 0, 2, 0]}], {}, "boxes are needed"),
        ([annotation([]) | {"bbox": [12, 0, 2, 2]}], {}, "The first is annotation 1"),
        ([annotation([]) | {"bbox": [1, 2, 3]}], {}, "bbox must be"),
        ([annotation([[1, 1, 4, 1]])], {}, "polygons of three or more corners"),
        ([annotation([[40, 1, 44, 1, 44, 4]])], {}, "The first is annotation 1"),
        ([annotation([SQUARE], iscrowd=1)], {}, "all 1 annotation are crowds"),
        ([annotation([SQUARE], iscrowd="yes")], {}, "iscrowd of annotation 1 must be 0 or 1, got 'yes'"),
        ([annotation([[x / 12 for x in SQUARE]])], {}, r"normalised \(0 to 1\)"),
        ([], {"images": [{"id": 5, "file_name": None}]}, "the file_name of image 5 must be text, got None"),
        ([], {"images": [{"id": 5, "file_name": "one.png", "height": 0, "width": 12}]}, "must be integers > 0"),
        ([], {"images": []}, "lists no images"),
        ([], {"categories": [{"id": 1}]}, "entry 0 of its categories lacks name"),
        ([], {"categories": None}, "not in COCO's format: it must contain the lists images, annotations, categories"),
        ([], {"categories": [{"id": 1, "name": "x"}, {"id": 2, "name": "x"}]}, "must name each class once, got 'x' 2"),
        ([], {"categories": [*CATEGORIES, {"id": 7, "name": "other"}]}, "id 7 occurs twice in its categories"),
        ([], {"categories": [*CATEGORIES, {"id": "7", "name": "other"}]}, "id '7' occurs twice in its categories"),
        ([], {"categories": [*CATEGORIES, {"id": 7.5, "name": "other"}]}, "got 7.5"),
        ([], {"images": 2 * [{"id": 5, "file_name": "one.png"}]}, "id 5 occurs twice"),
        ([], {"images": [{"id": None, "file_name": "one.png"}]}, "got None"),
        ([{**annotation([SQUARE]), "image_id": [5]}], {}, r"annotation 1 refers to image \[5\]"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, annotations: list, changes: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        CocoLabels(write(tmp_path, annotations, **changes))


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        ([[1, 1, 4, 1, 5, 5, 6]], "a polygon must be a list of x and y"),
        ([[1, 1, 4, 1, 5, float("nan")]], "got nan"),
        ([[1, 1, 4, 1, 5, float("inf")]], "got inf"),
        ([[0, 0, 1e7, 0, 1e7, 1e7]], "coordinates must be pixels in the image of 12 x 10"),
        ([[0, 0, 10**400, 0, 5, 5]], "coordinates must be pixels in the image of 12 x 10"),
        ([["1", 0, 8, 0, 5, 5]], "got '1'"),
        ([SQUARE, 5], "a polygon must be a list of x and y"),
        ([[-100, 0, 100, 0] * 200], "pixels long"),
        ("text", "segmentation must be polygons or run lengths, got 'text'"),
        ({"size": [12, 10], "counts": [120]}, r"must have size \[10, 12\] \(height, width\), got \[12, 10\]"),
        ({"size": [10, 12], "counts": [3, 400]}, "whose sum is 120"),
        ({"size": [10, 12], "counts": [121, -1]}, "got a sum of 120 and -1"),
        ({"size": [10, 12], "counts": [119.5, 0.5]}, "must be numbers >= 0"),
        ({"size": [10, 12], "counts": "zzzzz"}, "compressed text"),
        ({"size": [10, 12], "counts": "é"}, "compressed text"),
        ({"size": [10, 12]}, "counts of run lengths must be whole numbers or compressed text, got None"),
        ({"counts": [120]}, "run lengths must have size"),
    ],
)
def test_invalid_outlines_are_refused_before_they_are_drawn(tmp_path: Path, segmentation: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"the outline of annotation 1 of one\.png is invalid: .*{message}"):
        CocoLabels(write(tmp_path, [annotation([SQUARE]), annotation(segmentation)]))


def test_an_image_whose_size_differs_from_the_listed_one_is_refused(tmp_path: Path) -> None:
    labels = CocoLabels(write(tmp_path, []))
    Image.new("RGB", (10, 12)).save(tmp_path / "one.png")
    with pytest.raises(DataError, match=r"one\.png must have the size of its file, 10 x 12, got 12 x 10"):
        labels.labels(0)


def test_cocos_format_is_recognised(tmp_path: Path) -> None:
    path = write(tmp_path, [])
    for text in ("[]", "{}", '{"images": {}, "annotations": [], "categories": []}'):
        (tmp_path / "b.json").write_text(text)
        assert find_coco(tmp_path) == ([path], [])
    for text in ("no json", path.read_text()[:-9], "[" * 100_000):
        (tmp_path / "b.json").write_text(text)
        found, damaged = find_coco(tmp_path)
        assert found == [path]
        assert len(damaged) == 1
        assert str(tmp_path / "b.json") in str(damaged[0])


def test_a_category_named_background_is_the_background(tmp_path: Path) -> None:
    categories = [{"id": 1, "name": "Background"}, {"id": 2, "name": "cell"}]
    path = write(tmp_path, [annotation([SQUARE], 2)], categories=categories)
    assert CocoLabels(path).classes == ["background", "cell"]
    assert torch.equal(CocoLabels(path).labels(0), torch.from_numpy(square()))


OF_EXPORTS = {
    "flat polygon": lambda content: content["annotations"][0].update(segmentation=SQUARE),
    "crowd as text": lambda content: content["annotations"][0].update(iscrowd="0"),
    "crowd is null": lambda content: content["annotations"][0].update(iscrowd=None),
    "id as text": lambda content: content["images"][0].update(id="5"),
    "ids as fractions": lambda content: content["annotations"][0].update(image_id=5.0, category_id=7.0),
    "sizes are null": lambda content: content["images"][0].update(height=None, width=None),
    "sizes as fractions": lambda content: content["images"][0].update(height=10.0, width=12.0),
    "no sizes": lambda content: [content["images"][0].pop(side) for side in ("height", "width")],
    "backslashes": lambda content: content["images"][0].update(file_name=".\\one.png"),
    "a part of two corners": lambda content: content["annotations"][0]["segmentation"].append([1, 1, 9, 9]),
    "no outline beside others": lambda content: content["annotations"].append(annotation([])),
    "a null outline beside others": lambda content: content["annotations"].append(annotation(None)),
    "two corners beside others": lambda content: content["annotations"].append(annotation([[1, 1, 5, 5]])),
    "an outline outside the image": lambda content: content["annotations"].append(annotation([[50, 1, 55, 5, 50, 5]])),
}


@pytest.mark.parametrize("name", OF_EXPORTS)
def test_files_of_other_tools_are_read_where_their_meaning_is_clear(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, [annotation([SQUARE])])
    content = json.loads(path.read_text())
    OF_EXPORTS[name](content)
    path.write_text(json.dumps(content))
    assert torch.equal(CocoLabels(path).labels(0), torch.from_numpy(square()))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_byte_order_marks_are_read(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path, [annotation([SQUARE])])
    path.write_text(path.read_text(), encoding=encoding)
    assert torch.equal(CocoLabels(path).labels(0), torch.from_numpy(square()))


def test_skipped_objects_and_crowds_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("cribo").propagate = True
    with caplog.at_level(logging.INFO, "cribo"):
        CocoLabels(write(tmp_path, [annotation([SQUARE]), annotation([]), annotation([SQUARE], iscrowd=1)]))
    assert "1 of 3 annotations are crowds" in caplog.text
    assert "skipped 1 of 3 annotations" in caplog.text


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_names_in_another_unicode_form_are_found(tmp_path: Path, form: Any) -> None:
    other = "NFD" if form == "NFC" else "NFC"
    name = unicodedata.normalize(form, "über/café.png")
    path = write(tmp_path, [annotation([SQUARE])], images=[{"id": 5, "file_name": name}])
    on_disk = tmp_path / unicodedata.normalize(other, name)
    on_disk.parent.mkdir()
    (tmp_path / "one.png").rename(on_disk)
    assert Path(CocoLabels(path).path(0)) == on_disk


def test_run_lengths_are_those_of_the_library(tmp_path: Path) -> None:
    """Compressed text of many lengths and signs is read as the library that writes it reads it."""
    generator = np.random.default_rng(0)
    for size in ((3, 7), (40, 30), (700, 500)):
        Image.new("RGB", (size[1], size[0])).save(tmp_path / "large.png")
        mask = np.repeat(np.repeat(generator.random((10, 10)) < 0.5, 70, 0), 50, 1)[: size[0], : size[1]]
        counts = coco.encode(np.asfortranarray(mask, dtype=np.uint8))["counts"].decode()
        entry = annotation({"size": list(size), "counts": counts})
        path = write(tmp_path, [entry], images=[{"id": 5, "file_name": "large.png"}])
        np.testing.assert_array_equal(CocoLabels(path).labels(0), mask)
