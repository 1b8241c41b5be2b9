"""Label maps from COCO's annotations, for the study of supervision (table 11)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cribo.apps.studies.label_maps import write_label_maps
from cribo.base.errors import DataError, InputError, MissingData
from cribo.cli import main
from cribo.pretraining.loading import load_config
from cribo.pretraining.session import Session

SIDE = 64
SUPERVISED = "cribo.objectives.controls.SupervisedCrIBo"


def box(left: int, top: int, width: int, height: int) -> list[list[int]]:
    return [[left, top, left + width, top, left + width, top + height, left, top + height]]


def annotated(path: Path, categories: dict[int, str], annotations: list[dict[str, Any]], images: int = 8) -> Path:
    """Write a file in COCO's format about images of one size."""
    content = {
        "images": [{"id": i, "file_name": f"{i:03d}.png", "height": SIDE, "width": SIDE} for i in range(images)],
        "categories": [{"id": number, "name": name} for number, name in categories.items()],
        "annotations": [{"id": place, "iscrowd": 0, **each} for place, each in enumerate(annotations)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def coco(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a collection in COCO's layout, with a dog in front of a person on the first image, and grass below."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "coco"
    (folder / "train2017").mkdir(parents=True)
    noise = np.random.default_rng(0)
    for index in range(8):
        pixels = noise.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "train2017" / f"{index:03d}.png")
    things = [
        {"image_id": 0, "category_id": 1, "segmentation": box(0, 0, 40, 40)},
        {"image_id": 0, "category_id": 18, "segmentation": box(10, 10, 10, 10)},
        {"image_id": 1, "category_id": 1, "segmentation": box(0, 0, 40, 40), "iscrowd": 1},
    ]
    annotated(folder / "annotations" / "instances_train2017.json", {1: "person", 18: "dog"}, things)
    stuff = [
        {"image_id": 0, "category_id": 124, "segmentation": box(0, 32, 64, 32)},
        {"image_id": 0, "category_id": 183, "segmentation": box(0, 0, 40, 40)},
    ]
    annotated(folder / "annotations" / "stuff_train2017.json", {124: "grass", 183: "other"}, stuff)
    return folder


def test_smaller_objects_are_on_top_and_the_rest_has_no_class(coco: Path) -> None:
    written = write_label_maps(coco / "annotations" / "instances_train2017.json", coco / "labels")
    assert (written.images, written.classes) == (8, ["person", "dog"])
    first, crowd = (np.array(Image.open(coco / "labels" / f"00{index}.png")) for index in (0, 1))
    assert (first[5, 5], first[15, 15], first[60, 60]) == (0, 1, 255)
    assert (crowd == 255).all()


def test_stuff_fills_the_pixels_outside_all_objects(coco: Path) -> None:
    annotations = coco / "annotations"
    written = write_label_maps(
        annotations / "instances_train2017.json", coco / "labels", stuff=annotations / "stuff_train2017.json"
    )
    assert written.classes == ["person", "dog", "grass"]
    labels = np.array(Image.open(coco / "labels" / "000.png"))
    assert (labels[5, 5], labels[35, 5], labels[50, 50], labels[5, 60]) == (0, 0, 2, 255)


def test_the_study_of_supervision_reads_the_label_maps_of_the_command(
    coco: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        "data.root": "coco",
        "data.images": "train2017",
        "data.workers": 0,
        "score.root": None,
        "optim.batch_size": 4,
        "objects.group_size": 4,
        "objects.bank_images": 4,
        "objective.name": SUPERVISED,
        "objective.args": {"labels": "coco/labels"},
    }
    with pytest.raises(MissingData, match=r"objective\.args\.labels"):
        Session(load_config("quickstart", small))
    command = ["study", "labels", "coco/annotations/instances_train2017.json", "coco/labels"]
    assert main(command) == 0
    assert "8 label maps of 2 classes" in capsys.readouterr().out
    sample = Session(load_config("quickstart", small)).dataset[0, 0]
    assert set(sample["classes"].unique().tolist()) <= {0, 1, 255}
    before = (coco / "labels" / "000.png").stat().st_mtime_ns
    assert main(command) == 0
    assert (coco / "labels" / "000.png").stat().st_mtime_ns == before


def test_other_annotations_are_refused(coco: Path) -> None:
    annotations = coco / "annotations"
    fewer = annotated(annotations / "fewer.json", {124: "grass"}, [], images=2)
    with pytest.raises(DataError):
        write_label_maps(annotations / "instances_train2017.json", coco / "labels", stuff=fewer)
    with pytest.raises(MissingData):
        write_label_maps(annotations / "nowhere.json", coco / "labels")
    assert not (coco / "labels").exists()
    write_label_maps(annotations / "instances_train2017.json", coco / "labels")
    with pytest.raises(InputError, match="annotations"):
        write_label_maps(annotations / "stuff_train2017.json", coco / "labels")


def test_boxes_without_outlines_are_refused(coco: Path) -> None:
    things = [{"image_id": 0, "category_id": 1, "bbox": [0, 0, 40, 40]}]
    file = annotated(coco / "annotations" / "instances_train2017.json", {1: "person"}, things)
    with pytest.raises(DataError, match="segmentation"):
        write_label_maps(file, coco / "maps")
