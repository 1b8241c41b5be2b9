import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faster_coco_eval.core import mask as coco
from PIL import Image

from cribo.data.coco import CocoLabels, is_coco
from cribo.data.images import DataError, MissingData

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
        ([annotation([]) | {"bbox": [0, 0, 2, 2]}], {}, "annotation 1 has no segmentation: boxes do not give"),
        ([], {"images": []}, "lists no images"),
        ([], {"categories": [{"id": 1}]}, "entry 0 of its categories lacks name"),
        ([], {"categories": None}, "not in COCO's format: it must contain the lists images, annotations, categories"),
        ([], {"categories": [{"id": 1, "name": "x"}, {"id": 2, "name": "x"}]}, "must name each class once, got 'x' 2"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, annotations: list, changes: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        CocoLabels(write(tmp_path, annotations, **changes))


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        ([[1, 1, 4, 1]], "a polygon must have at least three corners"),
        ([[1, 1, 4, 1, 5, 5, 6]], "a polygon must have at least three corners"),
        ({"size": [12, 10], "counts": [120]}, r"must have size \[10, 12\] \(height, width\), got \[12, 10\]"),
        ({"size": [10, 12], "counts": [3, 400]}, "the outline of annotation 1 is invalid"),
        ({"size": [10, 12], "counts": "zzzzz"}, "the outline of annotation 1 is invalid"),
        ({"size": [10, 12]}, "the outline of annotation 1 is invalid"),
    ],
)
def test_invalid_outlines_are_refused(tmp_path: Path, segmentation: Any, message: str) -> None:
    labels = CocoLabels(write(tmp_path, [annotation(segmentation)]))
    with pytest.raises(DataError, match=message):
        labels.labels(0)


def test_an_image_whose_size_differs_from_the_listed_one_is_refused(tmp_path: Path) -> None:
    labels = CocoLabels(write(tmp_path, []))
    Image.new("RGB", (10, 12)).save(tmp_path / "one.png")
    with pytest.raises(DataError, match=r"one\.png must have the size of its file, 10 x 12, got 12 x 10"):
        labels.labels(0)


def test_cocos_format_is_recognised(tmp_path: Path) -> None:
    assert is_coco(write(tmp_path, []))
    for text in ("[]", "{}", "no json", '{"images": {}, "annotations": [], "categories": []}'):
        (tmp_path / "b.json").write_text(text)
        assert not is_coco(tmp_path / "b.json")
    assert not is_coco(tmp_path / "missing.json")


def test_a_category_named_background_is_the_background(tmp_path: Path) -> None:
    categories = [{"id": 1, "name": "Background"}, {"id": 2, "name": "cell"}]
    path = write(tmp_path, [annotation([SQUARE], 2)], categories=categories)
    assert CocoLabels(path).classes == ["background", "cell"]
    assert torch.equal(CocoLabels(path).labels(0), torch.from_numpy(square()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"categories": [*CATEGORIES, {"id": 7, "name": "other"}]}, "id 7 occurs twice in its categories"),
        ({"categories": [*CATEGORIES, {"id": "8", "name": "other"}]}, "must be all numbers or all strings, got '8'"),
        ({"images": [{"id": 5, "file_name": "one.png"}, {"id": 5, "file_name": "one.png"}]}, "id 5 occurs twice"),
        ({"images": [{"id": None, "file_name": "one.png"}]}, "got None"),
        (
            {"annotations": [{**annotation([SQUARE]), "image_id": [5]}]},
            r"annotation 1 refers to image \[5\], which",
        ),
    ],
)
def test_ambiguous_ids_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        CocoLabels(write(tmp_path, changes.pop("annotations", []), **changes))
