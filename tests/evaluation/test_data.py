"""Labelled images opened by name."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from cribo.base.colours import class_colours
from cribo.base.errors import ConfigError, DataError
from cribo.data.scenes import Scenes
from cribo.evaluation.data import ImageData, SegmentationData
from cribo.features.extraction import content_hash


def own_set(root: str | None, split: str) -> SimpleNamespace:
    """Return a set as in docs/extending.md, without palette and ignored index."""
    scenes = Scenes(10, size=32, first=0 if split == "train" else 10)
    names = {name: getattr(scenes, name) for name in ("load", "labels", "name", "classes")}
    return type("Own", (SimpleNamespace,), {"__len__": lambda self: 10})(**names)


@pytest.mark.parametrize("limit", [None, 4])
def test_a_custom_set_needs_the_documented_methods(limit: int | None) -> None:
    splits = SegmentationData(f"{__name__}.own_set", limit=limit).open()
    train, val = splits.train, splits.val
    assert (splits.about["train"], splits.about["val"]) == ("train", "val")
    assert (len(train), len(val)) == (limit or 10, limit or 10)
    assert train.palette == class_colours(train.classes)
    assert train.ignore_index == 255
    spread = range(10) if limit is None else (0, 2, 5, 7)
    assert [train.name(index) for index in range(len(train))] == [f"scene-0-{index:06d}" for index in spread]
    assert len({content_hash(train, index) for index in range(len(train))}) == len(train)


def test_images_of_a_subset_keep_their_names(camvid: Path) -> None:
    whole, part = (
        SegmentationData("camvid", str(camvid), train="val", limit=limit).open().train for limit in (None, 3)
    )
    assert [part.name(index) for index in range(3)] == [whole.name(index) for index in (0, 33, 67)]
    assert content_hash(part, 1) == content_hash(whole, 33)
    assert torch.equal(part.labels(1), whole.labels(33))


def test_an_unknown_set_is_refused_before_opening() -> None:
    with pytest.raises(DataError, match="unknown segmentation set 'vox'; did you mean 'voc'"):
        SegmentationData("vox", "nowhere")


def test_a_folder_is_recognised_by_its_name_and_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("CamVid/train", "CamVid/trainannot", "mine/images/train", "mine/labels/train", "kinds/a", "kinds/b"):
        (tmp_path / place).mkdir(parents=True)
    for kind in ("a", "b"):
        Image.new("RGB", (4, 4)).save(tmp_path / "kinds" / kind / "1.png")
    for name, kind, data in (
        ("CamVid", "camvid", SegmentationData),
        ("mine", "folder", SegmentationData),
        ("kinds", "folder", ImageData),
    ):
        assert data(str(tmp_path / name)) == data(kind, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    assert SegmentationData("mine") == SegmentationData("folder", "mine")
    (tmp_path / "scenes").mkdir()
    assert SegmentationData("scenes").root is None  # the synthetic images, not the folder


@pytest.mark.parametrize("data", [SegmentationData, ImageData])
def test_a_folder_without_a_known_layout_is_an_error(data: type[SegmentationData | ImageData], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{tmp_path} has none of the known layouts: "):
        data(str(tmp_path))
    with pytest.raises(DataError, match=f"there is no 'camvid' in {tmp_path}"):
        data(str(tmp_path / "camvid"))


@pytest.mark.parametrize("data", [SegmentationData, ImageData])
def test_a_file_is_not_an_import_path(
    data: type[SegmentationData | ImageData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"some\.json is a file: give the folder"):
        data("some.json")


def test_an_unknown_layout_of_classified_images_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.name must be a folder or one of imagenet, folder, got 'imagenette'"):
        ImageData("imagenette", "nowhere")
