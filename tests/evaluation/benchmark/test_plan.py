"""Selection of protocols and data sets for a card."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from PIL import Image
from tests.evaluation.benchmark.conftest import write_boxes, write_classes, write_labelled

from cribo.base.errors import ConfigError, DataError, MissingData
from cribo.evaluation import ImageData, Outcome, Protocol, SegmentationData, Splits, TrainingRuntime
from cribo.evaluation.benchmark import BenchmarkConfig, BenchmarkData, make_plan
from cribo.features.config import BackboneSource

TRAINED = {"linear", "segmenter", "detection"}


@dataclass
class NotesData:
    """Data without a description of its layout."""

    root: str

    def open(self) -> Splits:
        if not (Path(self.root) / "notes.txt").is_file():
            raise DataError("no notes.txt")
        return Splits([], [], "notes", {"name": "notes"})


@dataclass(frozen=True, kw_only=True)
class Notes(Protocol):
    """A custom protocol with custom data."""

    name: ClassVar[str] = "notes"
    title: ClassVar[str] = "Notes"
    metrics: ClassVar[tuple[str, ...]] = ("share",)
    varies: ClassVar[str] = "step"
    data_type: ClassVar[type[Any]] = NotesData

    def measure(self, run: Any) -> Outcome:
        raise AssertionError("never measured here")


OWN = f"{__name__}.Notes"


def planned(root: Path, *, source: str = "somewhere", sets: tuple[str, ...] | None = None, **options: Any) -> Any:
    return make_plan(BenchmarkConfig(BackboneSource(source), BenchmarkData(str(root), sets), **options))


def names(plan: Any) -> set[tuple[str, str]]:
    return {(row.protocol.name, row.set) for row in plan.rows}


def test_protocols_are_matched_with_sets_by_layout(sets: Path) -> None:
    plan = planned(sets)
    segmenting = ("dense-nn", "overclustering", "linear", "segmenter")
    labelled = {(name, there) for name in segmenting for there in ("squares", "half")}
    assert names(plan) == labelled | {("image-nn", "kinds"), ("detection", "boxes"), ("discovery", "boxes")}
    assert plan.left_out.keys() == {"correspondence", "depth", "video"}
    assert "no set; looked for pairs/*.json" in plan.left_out["correspondence"]
    assert "no set; looked for images/<split> and depth/<split>" in plan.left_out["depth"]
    assert all(row.data.limit is None for row in plan.rows)


def test_quick_uses_few_images_and_does_not_train(sets: Path) -> None:
    plan = planned(sets, quick=True)
    assert {name for name, _ in names(plan)} == {"dense-nn", "overclustering", "image-nn", "discovery"}
    assert plan.left_out.keys() == {*TRAINED, "correspondence", "depth", "video"}
    assert {row.protocol.name: row.data.limit for row in plan.rows}["dense-nn"] == 40
    output = [cell for column in plan.table().columns for cell in map(str, column.cells)]
    assert "linear, segmenter, detection" in output


def test_a_selection_of_sets_and_protocols(sets: Path) -> None:
    assert names(planned(sets, sets=("squares",), only=("dense-nn",))) == {("dense-nn", "squares")}
    assert names(planned(sets / "squares", only=("dense-nn",))) == {("dense-nn", "squares")}


def test_an_unsupported_backbone_is_reported(sets: Path) -> None:
    plan = planned(sets, source="mean-colour")
    assert not {"segmenter", "detection"} & {name for name, _ in names(plan)}
    assert "has no weights to finetune" in plan.left_out["segmenter"]


def test_data_without_find_is_used_if_it_opens(sets: Path) -> None:
    (sets / "notes" / "notes.txt").touch()
    assert names(planned(sets, only=(OWN,))) == {("notes", "notes")}
    assert "notes" not in {there for _, there in names(planned(sets))}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"only": ("dens-nn",)}, ConfigError, "did you mean dense-nn?"),
        ({"only": ("linear",), "quick": True}, ConfigError, "linear cannot be evaluated: --quick excludes"),
        ({"only": ("segmenter",), "source": "mean-colour"}, ConfigError, "segmenter cannot be evaluated: backbone"),
        ({"sets": ("square",)}, DataError, "no known set 'square' in .* boxes, half, kinds, sq"),
        ({"only": ("correspondence",)}, DataError, r"no known set in .* looked for pairs/\*\.json"),
        ({"pictures": -1}, ConfigError, "pictures must be >= 0, got -1"),
        ({"training": TrainingRuntime()}, ConfigError, "must be 1, got auto and 1: train on several devices with"),
    ],
)
def test_invalid_requests_are_refused(sets: Path, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        planned(sets, **options)


def test_a_folder_without_sets_names_the_known_layouts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no known set in .* looked for images/<split> and labels/<split>.*<class>/\*"):
        planned(tmp_path)
    with pytest.raises(MissingData, match="nowhere"):
        planned(tmp_path / "nowhere")


# ------------------------------------------------------------------- layouts


def test_published_sets_are_recognised_by_name_and_layout(tmp_path: Path) -> None:
    def found(*folders: str) -> str | None:
        for folder in folders:
            (tmp_path / folder).mkdir(parents=True)
        data = SegmentationData.find(tmp_path / Path(folders[0]).parts[0])
        return None if data is None else data.name

    assert found("CamVid/train", "CamVid/trainannot") == "camvid"
    assert found("VOC2012/SegmentationClass", "VOC2012/JPEGImages") == "voc"
    assert found("ADEChallengeData2016/annotations/training") == "ade20k"
    assert found("cityscapes/leftImg8bit/train") is None  # without labels
    assert found("VOC2007/JPEGImages", "VOC2007/Annotations") is None
    assert found("streets/images", "streets/labels") == "folder"


def test_sets_in_the_devkit_of_voc(tmp_path: Path) -> None:
    for part in ("Annotations", "ImageSets/Segmentation", "JPEGImages", "SegmentationClass"):
        (tmp_path / "VOCdevkit" / "VOC2012" / part).mkdir(parents=True)
    found = names(planned(tmp_path, only=("dense-nn", "discovery")))
    assert found == {("dense-nn", "VOC2012"), ("discovery", "VOC2012")}


def test_class_folders(tmp_path: Path) -> None:
    def root(folder: Path) -> str | None:
        data = ImageData.find(folder)
        return None if data is None else data.root

    assert root(write_classes(tmp_path / "a")) == str(tmp_path / "a")
    assert root(write_classes(tmp_path / "b" / "images").parent) == str(tmp_path / "b" / "images")
    assert root(write_classes(tmp_path / "c" / "train").parent) == str(tmp_path / "c")
    write_classes(tmp_path / "stations")
    (tmp_path / "stations" / "class0").rename(tmp_path / "stations" / "train_station")
    assert root(tmp_path / "stations") == str(tmp_path / "stations")
    # Other layouts are not class folders.
    assert root(write_labelled(tmp_path / "d")) is None
    assert root(write_boxes(tmp_path / "e")) is None
    for name in ("train", "trainannot", "val", "valannot"):
        (tmp_path / "segnet" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "segnet" / name / "0.png")
    assert root(tmp_path / "segnet") is None
    for name in ("train2017", "val2017"):
        (tmp_path / "coco" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "coco" / name / "0.jpg")
    assert root(tmp_path / "coco") is None


def test_pairs(tmp_path: Path) -> None:
    (tmp_path / "own" / "pairs").mkdir(parents=True)
    (tmp_path / "own" / "pairs" / "0.json").write_text(json.dumps({}))
    assert names(planned(tmp_path)) == {("correspondence", "own")}


def test_depth_maps_and_videos_match_even_if_incomplete(tmp_path: Path) -> None:
    (tmp_path / "rooms" / "depth" / "train").mkdir(parents=True)
    (tmp_path / "nyu").mkdir()
    (tmp_path / "nyu" / "nyu_train.txt").touch()
    for name in ("JPEGImages", "Annotations"):
        (tmp_path / "davis" / name / "480p" / "bear").mkdir(parents=True)
    assert names(planned(tmp_path)) == {("depth", "rooms"), ("depth", "nyu"), ("video", "davis")}
