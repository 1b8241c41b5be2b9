"""Labelled images opened by name."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cribo.data import DataError, colour_map
from cribo.data.scenes import Scenes
from cribo.evaluation.data import SegmentationData
from cribo.evaluation.features import content_hash


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
    assert train.palette == colour_map(len(train.classes))
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
