import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cribo.base.errors import DataError, MissingData
from cribo.data.labelled import classification
from cribo.data.labelled.classification import ClassificationSplits, open_class_folders, open_classification

WNIDS = ("n01440764", "n01443537", "n02012849")  # tench, goldfish, crane


def write(*paths: Path) -> None:
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 3), (number, 0, 0)).save(path, format="JPEG")


def folders(root: Path, *names: str, each: int = 2) -> Path:
    write(*(root / name / f"{place}.jpg" for name in names for place in range(each)))
    return root


def test_folders_are_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    folders(tmp_path, "b", "a b", "c/deeper")
    write(tmp_path / "b" / ".hidden.jpg", tmp_path / ".cache" / "x.jpg", tmp_path / "b" / "late.JPEG")
    (tmp_path / "b" / "notes.txt").write_text("no image")
    images = open_class_folders(tmp_path)
    assert images.classes == ["a b", "b", "c"]
    names = ["a b/0.jpg", "a b/1.jpg", "b/0.jpg", "b/1.jpg", "b/late.JPEG", "c/deeper/0.jpg", "c/deeper/1.jpg"]
    assert [images.name(index) for index in range(len(images))] == names
    assert images.labels.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert Path(images.path(4)) == tmp_path / "b" / "late.JPEG"
    assert images.load(4).shape == (3, 3, 4)
    assert images.load(4).dtype == torch.uint8


def test_invalid_class_folders_are_refused(tmp_path: Path) -> None:
    def refused(pattern: str, folder: str, **more: object) -> None:
        with pytest.raises(DataError, match=pattern):
            open_class_folders(tmp_path / folder, **more)  # pyright: ignore[reportArgumentType]

    write(tmp_path / "flat" / "1.jpg", tmp_path / "flat" / "2.jpg")
    refused(r"must contain a folder of images for each class \(.*flat/<class>/\*\.jpg\), got 2 images outside", "flat")
    (tmp_path / "nothing").mkdir()
    refused("got no images", "nothing")
    folders(tmp_path / "one", "only")
    refused("has only one class, 'only'", "one")
    folders(tmp_path / "empty", "a", "b")
    (tmp_path / "empty" / "c").mkdir()
    refused("has folders without images, c: put images there, or remove", "empty")
    write(folders(tmp_path / "loose", "a", "b") / "stray.png")
    refused("has 1 images outside its class folders, the first is 'stray.png'", "loose")
    refused("is a file: give the folder that contains", "loose/stray.png")
    with pytest.raises(MissingData, match="did you mean 'loose'"):
        open_class_folders(tmp_path / "lose")
    refused("classes without training images, b: their images cannot", "loose", classes=["a", "c"])


def test_a_split_keeps_the_classes_of_the_training_images(tmp_path: Path) -> None:
    folders(tmp_path / "train", "a", "b", "c", each=3)
    folders(tmp_path / "validation", "c", "a", each=1)
    train, val, *names = open_classification("folder", tmp_path)
    assert val is not None
    assert names == ["train", "validation"]
    assert train.classes == val.classes == ["a", "b", "c"]
    assert (len(train), val.labels.tolist()) == (9, [0, 2])
    # An explicit folder takes precedence over the default names.
    folders(tmp_path / "later", "b", each=1)
    assert open_classification("folder", tmp_path, val="later").val_name == "later"


def test_classes_of_both_splits_pair_in_any_unicode_form(tmp_path: Path) -> None:
    composed, decomposed = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    folders(tmp_path / "train", "a", composed)
    folders(tmp_path / "val", decomposed, "a", each=1)
    train, val, *_ = open_classification("folder", tmp_path)
    assert val is not None
    assert train.classes == val.classes == ["a", composed]
    assert val.labels.tolist() == [0, 1]


def test_a_folder_without_split_is_one_set(tmp_path: Path) -> None:
    folders(tmp_path, "a", "b")
    assert open_classification("folder", tmp_path)[1:] == (None, "all", None)
    folders(tmp_path / "train", "a", "b")
    with pytest.raises(DataError, match="has a folder 'train' but no images to classify"):
        open_classification("folder", tmp_path)
    with pytest.raises(DataError, match="classification set must be imagenet or folder, got 'imagnet'"):
        open_classification("imagnet", tmp_path)


def test_a_limit_takes_images_of_each_class_in_turn(tmp_path: Path) -> None:
    write(
        *(tmp_path / name / f"{place}.jpg" for name, count in (("a", 5), ("b", 1), ("c", 3)) for place in range(count))
    )
    images = open_class_folders(tmp_path)

    def names(number: int) -> list[str]:
        some = images.limited(number)
        assert some.classes == images.classes
        assert [images.classes[label] for label in some.labels] == [some.name(i)[0] for i in range(len(some))]
        return [some.name(index) for index in range(len(some))]

    assert names(2) == ["a/0.jpg", "b/0.jpg"]
    assert names(6) == ["a/0.jpg", "a/1.jpg", "a/2.jpg", "b/0.jpg", "c/0.jpg", "c/1.jpg"]
    assert names(100) == names(9) == [images.name(index) for index in range(9)]
    with pytest.raises(ValueError, match="number must be >= 1, got 0"):
        images.limited(0)


# --------------------------------------------------------------------- ImageNet


def imagenet(root: Path, *, flat: bool = False) -> Path:
    folders(root / "train", *WNIDS)
    if flat:
        write(*(root / "val" / f"ILSVRC2012_val_{number:08d}.JPEG" for number in (1, 2, 3)))
    else:
        folders(root / "val", *WNIDS, each=1)
    return root


def opened(root: Path, *, partial: bool = True) -> ClassificationSplits:
    return open_classification("imagenet", root, partial=partial)


def test_imagenet_classes_have_readable_names(tmp_path: Path) -> None:
    train, val, *_ = opened(imagenet(tmp_path))
    assert val is not None
    assert train.classes == val.classes == ["tench (n01440764)", "goldfish (n01443537)", "crane (n02012849)"]
    assert Counter(train.labels.tolist()) == {0: 2, 1: 2, 2: 2}
    assert val.labels.tolist() == [0, 1, 2]


def test_an_incomplete_imagenet_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imagenet(tmp_path)
    with pytest.raises(DataError, match=r"must have 1,281,167 images of 1000 classes, got 6 of 3; .* as partial"):
        opened(tmp_path, partial=False)
    monkeypatch.setattr(classification, "IMAGENET_SIZES", {"train": 6, "val": 4})
    monkeypatch.setattr(classification, "IMAGENET_CLASSES", 3)
    with pytest.raises(DataError, match=r"ImageNet-1k val .* must have 4 images of 3 classes, got 3 of 3"):
        opened(tmp_path, partial=False)
    write(tmp_path / "val" / WNIDS[0] / "more.JPEG")
    assert len(opened(tmp_path, partial=False).train) == 6


def test_kaggles_layout_is_found_from_outer_and_inner_folders(tmp_path: Path) -> None:
    base = imagenet(tmp_path / "ILSVRC" / "Data" / "CLS-LOC", flat=True)
    folders(tmp_path / "ILSVRC" / "Annotations", "CLS-LOC")
    (tmp_path / "LOC_val_solution.csv").write_text(
        "ImageId,PredictionString\n"
        f"ILSVRC2012_val_00000003,{WNIDS[0]} 1 2 3 4 {WNIDS[0]} 5 6 7 8 \n"
        f"ILSVRC2012_val_00000001,{WNIDS[2]} 85 1 499 272 \n"
        f"ILSVRC2012_val_00000002,{WNIDS[1]} 1 1 2 2\n"
    )
    for root in (tmp_path, base):
        val = opened(root).val
        assert val is not None
        assert val.labels.tolist() == [2, 1, 0]


def test_validation_images_in_one_folder_need_a_list_of_classes(tmp_path: Path) -> None:
    imagenet(tmp_path, flat=True)
    with pytest.raises(MissingData, match=r"no file lists their classes: put Kaggle's LOC_val_solution\.csv, or a val"):
        opened(tmp_path)
    lines = [f"ILSVRC2012_val_{number:08d}.JPEG {index}" for number, index in ((1, 1), (2, 0), (3, 134))]
    listed = tmp_path / "meta" / "val.txt"
    listed.parent.mkdir()
    listed.write_text("\n".join(lines) + "\n")
    val = opened(tmp_path).val
    assert val is not None
    assert val.labels.tolist() == [1, 0, 2]
    for line, pattern in (
        ("ILSVRC2012_val_00000003.JPEG 1000", "line 3: expected a file and the index of its class, 0..999, got"),
        ("ILSVRC2012_val_00000003.JPEG 999", "00000003.JPEG has the class n15075141, which has no training images"),
        ("", "does not list the class of ILSVRC2012_val_00000003.JPEG"),
    ):
        listed.write_text("\n".join([*lines[:2], line]))
        with pytest.raises(DataError, match=pattern):
            opened(tmp_path)
    (tmp_path / "LOC_val_solution.csv").write_text("Id,Boxes\n1,2\n")
    with pytest.raises(DataError, match="must have the columns ImageId and PredictionString"):
        opened(tmp_path)


def test_the_number_of_labels_must_match(tmp_path: Path) -> None:
    images = open_class_folders(folders(tmp_path, "a", "b"))
    with pytest.raises(ValueError, match="one entry for each of the 4 images, got 3"):
        classification.ClassifiedFiles(images, images.classes, np.zeros(3, dtype=np.int64))
