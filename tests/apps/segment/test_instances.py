import csv
import json
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from cribo.apps.segment.instances import Instances, Splitter, split_instances
from cribo.apps.segment.merging import merge_segmentations
from cribo.apps.segment.run import segment_images
from cribo.base.errors import ConfigError, FolderError, InputError
from cribo.data.labelled.coco import CocoLabels
from cribo.data.labelled.formats import find_examples
from cribo.features.memory.memory import Segmentation
from cribo.features.memory.settings import SegmentationSettings

from .test_run import FIRST, config, files, folder, segment, summary  # noqa: F401 (a fixture)

Mask = np.ndarray


def grid(height: int, width: int) -> tuple[Mask, Mask]:
    rows, columns = np.mgrid[:height, :width].astype(float)
    return rows, columns


def disc(size: tuple[int, int], row: float, column: float, radius: float) -> Mask:
    rows, columns = grid(*size)
    return (rows - row) ** 2 + (columns - column) ** 2 <= radius**2


def rod(size: tuple[int, int], degrees: float, length: float, width: float) -> Mask:
    rows, columns = grid(*size)
    rows, columns = rows - size[0] / 2, columns - size[1] / 2
    angle = np.radians(degrees)
    along, across = columns * np.cos(angle) + rows * np.sin(angle), rows * np.cos(angle) - columns * np.sin(angle)
    return (np.abs(along) <= length / 2) & (np.abs(across) <= width / 2)


def split(mask: Mask, **options: float) -> Instances:
    labels = torch.from_numpy(mask.astype(np.uint8))
    return split_instances(labels, torch.ones(labels.shape), [1], **options)


def test_touching_discs_are_split_where_they_touch() -> None:
    size = (60, 120)
    centres = {(30, 20): 18, (30, 52): 18, (30, 84): 16}
    mask = np.any([disc(size, *centre, radius) for centre, radius in centres.items()], axis=0)
    found = split(mask)
    assert len(found.found) == 3
    numbers = found.numbers.numpy()
    np.testing.assert_array_equal(numbers > 0, mask)
    for centre, radius in centres.items():
        own = numbers == numbers[centre]
        alone = disc(size, *centre, radius)
        assert (own & alone).sum() / (own | alone).sum() > 0.93


def test_a_small_object_is_split_from_a_large_one() -> None:
    size = (80, 110)
    found = split(disc(size, 40, 40, 32) | disc(size, 40, 78, 8))
    assert len(found.found) == 2
    assert min(each.area for each in found.found) == pytest.approx(disc(size, 40, 78, 8).sum(), rel=0.25)


@pytest.mark.parametrize("degrees", [0, 7, 23, 45, 71])
@pytest.mark.parametrize("width", [3, 8, 15])
def test_objects_without_a_neck_stay_whole(degrees: float, width: float) -> None:
    size = (120, 120)
    assert len(split(rod(size, degrees, 90, width)).found) == 1
    rows, columns = grid(*size)
    angle = np.radians(degrees)
    along, across = (
        (columns - 60) * np.cos(angle) + (rows - 60) * np.sin(angle),
        (rows - 60) * np.cos(angle) - (columns - 60) * np.sin(angle),
    )
    assert len(split((along / 50) ** 2 + (across / (3 * width)) ** 2 <= 1).found) == 1


def test_small_gaps_do_not_split_an_object() -> None:
    size = (70, 70)
    mask = disc(size, 35, 35, 30)
    for row in range(12, 60, 9):
        mask &= ~disc(size, row, 35, 2)  # a row of gaps through the middle
    found = split(mask)
    assert [each.area for each in found.found] == [mask.sum()]


@pytest.mark.parametrize("seed", range(6))
def test_instances_are_connected_and_cover_the_class(seed: int) -> None:
    noise = np.random.default_rng(seed).random((90, 110))
    mask = ndimage.gaussian_filter(noise, 3) > 0.5
    found = split(mask)
    numbers = found.numbers.numpy()
    np.testing.assert_array_equal(numbers > 0, mask)
    assert len(found.found) == numbers.max()
    for number, each in enumerate(found.found, start=1):
        own = numbers == number
        parts = np.zeros(own.shape, dtype=np.int32)
        ndimage.label(own, output=parts)
        assert parts.max() == 1
        rows, columns = np.nonzero(own)
        box = columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1
        assert (each.area, each.box) == (own.sum(), box)


def test_small_instances_and_other_classes_have_no_number() -> None:
    labels = torch.zeros(40, 60, dtype=torch.uint8)
    labels[5:15, 5:15] = 1
    labels[5:15, 15:25] = 2  # beside it
    labels[30:33, 30:33] = 1
    labels[20:30, 40:50] = 255
    confidence = torch.full((40, 60), 0.5)
    confidence[5:10, 5:15] = 0.9
    found = split_instances(labels, confidence, [1], min_area=10)
    (only,) = found.found
    assert (only.label, only.area, only.box) == (1, 100, (5, 5, 10, 10))
    assert only.confidence == pytest.approx(0.7)
    assert torch.equal(found.numbers > 0, (labels == 1) & (torch.arange(40) < 20)[:, None])
    assert len(split_instances(labels, confidence, [1, 2], min_area=9).found) == 3


def test_by_default_instances_are_as_large_as_a_patch() -> None:
    settings = SegmentationSettings(scale=0.5)
    splitter = pickle.loads(pickle.dumps(Splitter((1,), None, 8, settings)))
    labels = torch.zeros(64, 64, dtype=torch.uint8)
    labels[:16, :16] = labels[32:47, 32:47] = 1  # a patch of the reduced image has 16 x 16 pixels

    assert [each.area for each in splitter(Segmentation(labels, torch.ones(64, 64), {})).found] == [256]


# ------------------------------------------------------------------------------------------------------ the command


def test_written_instances(folder: Path) -> None:  # noqa: F811
    out = folder / "out"
    write = ("coco", "yolo", "labelme", "cvat", "geojson", "label-studio")
    cars = config(folder, instances=("car", "sky"), min_area=20)
    done = segment_images(cars, out=out, pictures=2, write=write)
    with Image.open(out / "instances" / "1.png") as image:
        assert image.mode == "I;16"
        numbers = np.array(image)
    with Image.open(out / "labels" / "1.png") as image:
        labels = np.array(image)
    sure = np.array(Image.open(out / "confidence" / "1.png")) / 255
    assert (numbers > 0).sum() == np.isin(labels, (1, 2)).sum()
    with (out / "instances.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["image"] == "1.bmp"]
    assert [row["class"] for row in rows] == ["sky", "car", "car"]  # FIRST has cars in two places
    for row in rows:
        own = numbers == int(row["instance"])
        assert {*labels[own]} == {["road", "sky", "car", "tree"].index(row["class"])}
        assert int(row["area"]) == own.sum()
        assert float(row["confidence"]) == pytest.approx(sure[own].mean(), abs=0.003)
    first = summary(out)[0]
    assert (first["sky instances"], first["car instances"]) == ("1", "2")
    areas = [int(row["area"]) for row in rows if row["class"] == "car"]
    assert float(first["car mean area"]) == pytest.approx(np.mean(areas), abs=0.1)
    assert "road instances" not in first
    everything = [*csv.DictReader((out / "instances.csv").read_text().splitlines())]
    counts = Counter(row["class"] for row in everything)
    assert {name: own.count for name, own in done.instances.items()} == counts
    assert done.instances["car"].per_image == counts["car"] / 3

    # One annotation for each instance, and for classes without instances as before.
    coco = json.loads((out / "coco.json").read_text())
    named = {each["id"]: each["name"] for each in coco["categories"]}
    found = Counter(named[each["category_id"]] for each in coco["annotations"] if each["image_id"] == 1)
    assert found == {"road": 1, "sky": 1, "car": 2}
    np.testing.assert_array_equal(CocoLabels(out / "coco.json", folder / "images").labels(0).numpy(), labels + 1)
    shapes = json.loads((out / "labelme" / "1.json").read_text())["shapes"]
    lines = (out / "yolo" / "labels" / "train" / "1.txt").read_text().splitlines()
    for names in (
        [shape["label"] for shape in shapes],
        [["road", "sky", "car", "tree"][int(line[0])] for line in lines],
    ):
        assert Counter(names)["car"] == 2
    strokes = json.loads((out / "label-studio.json").read_text())[0]["predictions"][0]["result"]
    assert sum(each["value"]["brushlabels"] == ["car"] for each in strokes) == 2
    again = find_examples(folder / "images", labels=out / "labelme")
    assert len(again) == 3


def test_touching_instances_are_written_apart(tmp_path: Path) -> None:
    from cribo.data.labelled.formats import LABEL_FORMATS
    from cribo.data.labelled.label_maps import Labelling

    labels = torch.zeros(8, 12, dtype=torch.uint8)
    labels[2:6, 1:11] = 1
    numbers = torch.zeros(8, 12, dtype=torch.int32)
    numbers[2:6, 1:5], numbers[2:6, 5:11] = 1, 2
    labelling = Labelling({"a.png": (8, 12)}, ["background", "cell"], lambda _: labels, {}, lambda _: numbers)
    for name in ("coco", "labelme", "yolo", "cvat", "geojson", "label-studio"):
        row = LABEL_FORMATS[name]
        assert row.write is not None
        (tmp_path / row.written).mkdir() if "." not in row.written else None
        row.write(tmp_path / row.written, labelling)
    areas = [each["area"] for each in json.loads((tmp_path / "coco.json").read_text())["annotations"]]
    assert areas == [16, 24]
    assert len(json.loads((tmp_path / "labelme" / "a.json").read_text())["shapes"]) == 2
    assert len(json.loads((tmp_path / "geojson" / "a.geojson").read_text())["features"]) == 2
    assert len((tmp_path / "yolo" / "labels" / "train" / "a.txt").read_text().splitlines()) == 2
    assert (tmp_path / "cvat.xml").read_text().count("<polygon") == 2
    (task,) = json.loads((tmp_path / "label-studio.json").read_text())
    assert len(task["predictions"][0]["result"]) == 2


def test_instances_are_resumed_and_merged(folder: Path) -> None:  # noqa: F811
    segment(folder, out="whole", instances=("car",))
    (folder / "whole" / "instances" / "1.png").unlink()  # a lost file is written again
    done = segment(folder, out="whole", resume=True, instances=("car",))
    assert (done.images, done.reused) == (3, 2)
    assert segment(folder, out="whole", resume=True, instances=("car",)).instances == done.instances
    for number in (1, 2):
        segment(folder, out=f"p{number}", part=f"{number}/2", instances=("car",))
    merged = merge_segmentations([folder / "p1", folder / "p2"], out=folder / "all")
    assert merged.instances == done.instances
    whole, joined = files(folder / "whole"), files(folder / "all")
    assert {*whole} - {"about.json", "cribo.json", ".lock"} <= {*joined}
    for name in ("summary.csv", "instances.csv", "instances/sub/3.png"):
        assert whole[name] == joined[name]
    with pytest.raises(FolderError, match=r"instances was car, is sky"):
        segment(folder, out="whole", resume=True, instances=("sky",))
    with pytest.raises(FolderError, match="instances was car, is no class"):
        segment(folder, out="whole", resume=True)


def test_results_without_instances_are_as_before(folder: Path) -> None:  # noqa: F811
    segment(folder)
    names = {*files(folder / "out")}
    assert not any("instances" in name for name in names)
    assert not any("instances" in name for name in summary(folder / "out")[0])


def test_invalid_options(folder: Path) -> None:  # noqa: F811
    with pytest.raises(InputError, match=r"--instances must be one or more of road, sky, car, tree, got 'cell'"):
        segment(folder, instances=("car", "cell"))
    assert not (folder / "out").exists()
    with pytest.raises(ConfigError, match="min_area"):
        config(folder, min_area=3)
    with pytest.raises(InputError, match="min_area"):
        config(folder, instances=("car",), min_area=0)


def test_images_with_too_many_instances_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr("cribo.apps.segment.writing.MOST_INSTANCES", 1)
    done = segment(folder, instances=("car",), min_area=1)
    assert FIRST.eq(2).any()
    assert "1.bmp" in done.skipped
    assert "--min_area" in done.skipped["1.bmp"]
