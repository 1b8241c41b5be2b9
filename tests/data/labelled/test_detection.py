import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from cribo.base.errors import DataError, MissingData
from cribo.data.labelled.detection import BoxedImages, open_detection

CATEGORIES = [{"id": 90, "name": "late"}, {"id": 7, "name": "early"}]


def annotation(bbox: Any, category: Any = 7, image: Any = 5, **more: Any) -> dict[str, Any]:
    return {"id": 3, "image_id": image, "category_id": category, "bbox": bbox, **more}


def write(folder: Path, annotations: list[dict[str, Any]], name: str = "a.json", **changes: Any) -> Path:
    """Write three images of 12 x 10 pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    for image in ("one", "two", "three"):
        Image.new("RGB", (12, 10), "blue").save(folder / f"{image}.png")
    content: dict[str, Any] = {
        "images": [
            {"id": number, "file_name": f"{image}.png", "height": 10, "width": 12}
            for number, image in ((5, "one"), (2, "two"), (9, "three"))
        ],
        "annotations": annotations,
        "categories": CATEGORIES,
        **changes,
    }
    (folder / name).write_text(json.dumps(content))
    return folder / name


BOX = annotation([2, 3, 4, 5])


def test_classes_are_sorted_by_id_and_images_without_objects_are_kept(tmp_path: Path) -> None:
    images = BoxedImages(write(tmp_path, [annotation([1, 2, 3, 4], 90, 9), BOX, annotation([0, 0, 12, 10], 90)]))
    assert (images.classes, images.category_ids) == (["early", "late"], [7, 90])
    assert [images.name(index) for index in range(len(images))] == ["one.png", "two.png", "three.png"]
    assert [len(images.boxes(index)) for index in range(3)] == [2, 0, 1]
    assert images.boxes(0).labels.tolist() == [0, 1]
    assert images.boxes(0).corners.tolist() == [[2, 3, 6, 8], [0, 0, 12, 10]]
    assert images.boxes(2).corners.tolist() == [[1, 2, 4, 6]]
    assert (images.image_ids[2], images.num_boxes, images.most_boxes) == (9, 3, 2)
    assert images.load(1).shape == (3, 10, 12)


def test_boxes_are_clipped_to_their_image(tmp_path: Path) -> None:
    images = BoxedImages(write(tmp_path, [annotation([-2, -3, 5.5, 100]), annotation([11, 9, 7, 7])]))
    assert images.boxes(0).corners.tolist() == [[0, 0, 3.5, 10], [11, 9, 12, 10]]


@pytest.mark.parametrize("box", [[2, 3, 0, 5], [2, 3, 4, 0], [12, 3, 4, 5], [2, -9, 4, 9]])
def test_empty_and_outside_boxes_are_dropped_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, box: list[int]
) -> None:
    with caplog.at_level(logging.WARNING, "cribo"):
        images = BoxedImages(write(tmp_path, [BOX, annotation(box, id=77), annotation(box, id=78)]))
    assert images.num_boxes == 1
    (message,) = caplog.messages
    assert "dropped 2 of 3 boxes, which are empty or outside the image" in message
    assert message.endswith(f"the first is annotation 77 of one.png, {box}")


def test_crowds_and_areas_are_read(tmp_path: Path) -> None:
    boxes = BoxedImages(
        write(tmp_path, [annotation([2, 3, 4, 5], iscrowd=1), annotation([2, 3, 4, 5], area=7.5)])
    ).boxes(0)
    assert boxes.crowd.tolist() == [True, False]
    assert boxes.areas.tolist() == [20, 7.5]


def test_a_subset_keeps_classes_and_ids(tmp_path: Path) -> None:
    part = BoxedImages(write(tmp_path, [BOX, annotation([1, 2, 3, 4], 90, 9)])).subset([2, 1])
    assert (len(part), part.name(0), part.image_ids[1], part.classes) == (2, "three.png", 2, ["early", "late"])
    assert part.boxes(0).labels.tolist() == [1]
    assert part.subset([1]).name(0) == "two.png"


def test_sizes_that_are_not_listed_are_read_from_the_files(tmp_path: Path) -> None:
    file = write(tmp_path, [annotation([-2, 3, 100, 5])], images=[{"id": 5, "file_name": "one.png"}])
    assert BoxedImages(file).boxes(0).corners.tolist() == [[0, 3, 12, 8]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"annotations": []}, "has no boxes in its 3 images"),
        ({"annotations": [annotation([1, 1, 0, 2])]}, "has no boxes in its 3 images"),
        ({"annotations": [{"image_id": 5, "category_id": 7}]}, "annotation without id has no bbox"),
        ({"annotations": [annotation([1, 2, 3])]}, r"bbox of annotation 3 must be .* got \[1, 2, 3\]"),
        ({"annotations": [annotation([1, 2, -3, 4])]}, r"width and height >= 0, got \[1, 2, -3, 4\]"),
        ({"annotations": [annotation([1, float("nan"), 3, 4])]}, r"got \[1, nan, 3, 4\]"),
        ({"annotations": [annotation([1, 2, float("inf"), 4])]}, r"got \[1, 2, inf, 4\]"),
        ({"annotations": [annotation(["1", 2, 3, 4])]}, r"got \['1', 2, 3, 4\]"),
        ({"annotations": [annotation({"x": 1})]}, "got {'x': 1}"),
        ({"annotations": [annotation([1, 2, 3, 4], area=-1)]}, "area of annotation 3 must be a number >= 0, got -1"),
        ({"annotations": [annotation([1, 2, 3, 4], 8)]}, "category 8, which is not listed; listed: 7, 90"),
        ({"annotations": [annotation([1, 2, 3, 4], image=6)]}, "image 6, which is not listed"),
        ({"categories": []}, "category 7, which is not listed; listed: none"),
        ({"categories": [], "annotations": []}, "lists no categories"),
        ({"categories": [{"id": 7, "name": "a"}, {"id": 8, "name": "a"}]}, "'a' 2 times"),
        ({"images": []}, "lists no images"),
        ({"images": [{"id": 5, "file_name": "one.png", "width": 0, "height": 10}]}, "integers > 0, got 0 and 10"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        BoxedImages(write(tmp_path, changes.pop("annotations", [BOX]), **changes))


def test_a_file_whose_size_differs_from_the_listed_one_is_refused(tmp_path: Path) -> None:
    images = BoxedImages(write(tmp_path, [BOX]))
    Image.new("RGB", (10, 12)).save(tmp_path / "two.png")
    with pytest.raises(DataError, match=r"two.png must have the size of its file, 10 x 12, got 12 x 10"):
        images.load(1)


def test_missing_images_are_reported(tmp_path: Path) -> None:
    file = write(tmp_path, [BOX])
    (tmp_path / "two.png").unlink()
    with pytest.raises(MissingData, match=r"1 of the 3 images .* the first is 'two.png'"):
        BoxedImages(file)


LAYOUTS = [
    ("annotations/instances_train2017.json", "train2017", "annotations/instances_val2017.json", "val2017"),
    (
        "annotations/instances_train2017.json",
        "images/train2017",
        "annotations/instances_val2017.json",
        "images/val2017",
    ),
    ("instances_train.json", "images/train", "instances_val.json", "images/val"),
    ("annotations/instances_train.json", "train", "annotations/instances_val.json", "val"),
    ("train/_annotations.coco.json", "train", "valid/_annotations.coco.json", "valid"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_detected(tmp_path: Path, layout: tuple[str, str, str, str]) -> None:
    train, train_images, val, val_images = layout
    for file, folder, boxes in ((train, train_images, [BOX, BOX]), (val, val_images, [BOX])):
        written = write(tmp_path / folder, boxes)
        (tmp_path / file).parent.mkdir(exist_ok=True)
        written.rename(tmp_path / file)
    splits = open_detection(tmp_path)
    assert (splits.train.num_boxes, splits.val.num_boxes) == (2, 1)
    assert splits.val.path(0) == str(tmp_path / val_images / "one.png")
    assert splits.name == ("coco" if "2017" in train else "folder")


def test_files_can_be_given_explicitly(tmp_path: Path) -> None:
    train, val = write(tmp_path / "here", [BOX], "t.json"), write(tmp_path / "there", [BOX, BOX], "v.json")
    val.rename(tmp_path / "v.json")
    splits = open_detection(
        train_annotations=train, val_annotations=tmp_path / "v.json", val_images=str(tmp_path / "there")
    )
    assert (splits.train.num_boxes, splits.val.num_boxes, splits.root) == (1, 2, tmp_path / "here")


def test_splits_must_have_the_same_categories(tmp_path: Path) -> None:
    train = write(tmp_path, [BOX], "t.json")
    others = [{"id": 90, "name": "late"}, {"id": 7, "name": "earlier"}, {"id": 8, "name": "more"}]
    val = write(tmp_path, [BOX], "v.json", categories=others)
    with pytest.raises(DataError, match="got 2 that differ: 7 is early for training and earlier for validation"):
        open_detection(train_annotations=train, val_annotations=val)


def test_roots_without_annotations(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.root .* is required"):
        open_detection()
    with pytest.raises(MissingData, match="did you mean"):
        open_detection(tmp_path.with_name(f"{tmp_path.name}x"))
    write(tmp_path, [BOX], "instances_train.json")
    with pytest.raises(MissingData, match=r"no annotations of the val split .* set data.val_annotations"):
        open_detection(tmp_path)


def test_the_boxes_of_real_images(camvid: Path) -> None:
    folder = camvid.parent / "bccd"
    if not folder.is_dir():
        pytest.skip("needs the blood cells in ../shared/data/bccd")
    splits = open_detection(folder)
    assert (len(splits.train), len(splits.val), splits.train.num_boxes, splits.val.num_boxes) == (205, 87, 2804, 1137)
    assert splits.val.classes == ["Platelets", "RBC", "WBC"]
    for images in (splits.train, splits.val):
        for index in range(len(images)):
            corners = images.boxes(index).corners
            assert (corners[:, 2:] > corners[:, :2]).all()
            assert (corners >= 0).all()
            assert (corners <= torch.tensor([640, 480, 640, 480])).all()
    assert re.fullmatch(r"BloodImage_\d+\.jpg", splits.val.name(3))


def test_there_may_be_more_categories_than_a_label_map_holds(tmp_path: Path) -> None:
    categories = [{"id": number, "name": f"kind {number}"} for number in range(1, 1204)]
    images = BoxedImages(write(tmp_path, [annotation([2, 3, 4, 5], 1203)], categories=categories))
    assert len(images.classes) == 1203
    assert images.boxes(0).labels.tolist() == [1202]
