import io
import logging
import pickle
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from cribo.base.colours import distinct_colours
from cribo.base.errors import DataError, MissingData, UnreadableImage
from cribo.data.labelled.datasets import open_segmentation
from cribo.data.labelled.inputs import open_labels
from cribo.data.labelled.segmentation import LabelledFolder, LabelledImages, LabelledSubset, by_stem
from cribo.data.scenes import Scenes

LABELS = np.array([[0, 1, 2], [2, 255, 0]], dtype=np.uint8)


def save_image(path: Path, width: int = 3, height: int = 2, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), "red").save(path, **options)


def save_labels(path: Path, values: np.ndarray = LABELS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ["b", "a"]:
        save_image(tmp_path / "images" / "val" / f"{name}.jpg")
        save_labels(tmp_path / "labels" / "val" / f"{name}.png")
    (tmp_path / "classes.txt").write_text("sky\nroad\n\ncar\n")
    return tmp_path


def test_layout_with_splits(root):
    data: LabelledImages = open_segmentation("folder", root, "val")
    assert len(data) == 2
    assert data.classes == ["sky", "road", "car"]
    assert data.ignore_index == 255
    assert data.palette == distinct_colours(3)
    assert data.name(0) == "a.jpg"
    assert data.load(0).shape == (3, 2, 3)
    assert data.labels(0).dtype == torch.uint8
    np.testing.assert_array_equal(data.labels(0), LABELS)


def test_paths_of_the_files(root):
    data = open_segmentation("folder", root, "val")
    assert isinstance(data, LabelledFolder)
    data = pickle.loads(pickle.dumps(data))  # for another process
    assert data.path(1) == str(root / "images" / "val" / "b.jpg")
    assert data.label_path(1) == str(root / "labels" / "val" / "b.png")


def test_subset(root):
    save_labels(root / "labels" / "val" / "b.png", LABELS[::-1].copy())
    data = open_segmentation("folder", root, "val")
    subset: LabelledImages = LabelledSubset(data, [1])
    assert len(subset) == 1
    assert subset.name(0) == "b.jpg"
    np.testing.assert_array_equal(subset.labels(0), LABELS[::-1])
    assert (subset.classes, subset.palette) == (data.classes, data.palette)
    with pytest.raises(IndexError, match=r"indices must be in 0\.\.1, got 2"):
        LabelledSubset(data, [0, 2])


def test_a_missing_split_suggests_the_nearest(root):
    with pytest.raises(MissingData, match=r"no 'vall' in .*images; did you mean 'val'"):
        open_segmentation("folder", root, "vall")
    save_image(root / "images" / "train" / "a.jpg")
    with pytest.raises(MissingData, match=r"no 'train' in .*labels"):
        open_segmentation("folder", root, "train")


def test_pairs_by_path_without_extension(tmp_path):
    for index, name in enumerate(["x.y/1.jpg", "x.y/2.0.png", "z.jpg"]):
        save_image(tmp_path / "i" / name)
        save_labels((tmp_path / "l" / name).with_suffix(".png"), np.full((2, 3), index, dtype=np.uint8))
    save_labels(tmp_path / "l" / "without image.png")
    data = LabelledFolder(tmp_path / "i", tmp_path / "l", ["a", "b", "c"])
    assert [data.name(i) for i in range(len(data))] == ["x.y/1.jpg", "x.y/2.0.png", "z.jpg"]
    assert [int(data.labels(i)[0, 0]) for i in range(3)] == [0, 1, 2]


def test_palette_png_gives_indices_not_colours(root):
    image = Image.fromarray(LABELS)
    image.putpalette(np.random.default_rng(0).integers(0, 256, 768, dtype=np.uint8).tobytes())
    assert image.mode == "P"
    image.save(root / "labels" / "val" / "a.png")
    np.testing.assert_array_equal(open_segmentation("folder", root, "val").labels(0), LABELS)


@pytest.mark.parametrize("dtype", [np.uint16, np.bool_])
def test_other_depths(root, dtype):
    values = np.array([[0, 1, 1], [1, 0, 0]], dtype=dtype)
    save_labels(root / "labels" / "val" / "a.png", values)
    labels = open_segmentation("folder", root, "val").labels(0)
    assert labels.dtype == torch.uint8
    np.testing.assert_array_equal(labels, values)


def test_colours_of_the_labels_are_read_if_they_are_listed(root):
    save_image(root / "labels" / "val" / "a.png")
    with pytest.raises(
        DataError, match=r"a\.png: labels are colours, .* Colours found: #ff0000 50\.0%, #000000 16\.7%, "
    ):
        open_segmentation("folder", root, "val").labels(0)
    save_labels(root / "labels" / "val" / "b.png", np.array([[255, 0, 0], [0, 255, 0]], np.uint8)[LABELS % 3 % 2])
    (root / "classes.txt").write_text("red #ff0000\ngreen 0 255 0\n")
    data = open_segmentation("folder", root, "val")
    assert (data.classes, list(data.palette)) == (["red", "green"], [(255, 0, 0), (0, 255, 0)])
    np.testing.assert_array_equal(data.labels(0), np.zeros((2, 3)))
    np.testing.assert_array_equal(data.labels(1), LABELS % 3 % 2)


@pytest.mark.parametrize(
    ("classes", "others", "expected"),
    [
        (None, [], ["background", "foreground"]),
        (["other", "cell"], [], ["other", "cell"]),
        (["other", "cell"], [1], None),
        (["a", "b", "c"], [], None),
        (None, [1], None),
    ],
)
def test_masks_of_0_and_255(root, caplog, classes, others, expected):
    """255 is the foreground unless another value occurs, or the number of classes is not two."""
    mask = np.array([[0, 255, 0], [255, 255, 0]], dtype=np.uint8)
    for name in ("a", "b"):
        save_labels(root / "labels" / "val" / f"{name}.png", mask)
    for value in others:
        save_labels(root / "labels" / "val" / "b.png", np.full_like(mask, value))
    logging.getLogger("cribo").propagate = True
    with caplog.at_level(logging.INFO, "cribo"):
        data = LabelledFolder(root / "images" / "val", root / "labels" / "val", classes)
        labels = data.labels(0)
    np.testing.assert_array_equal(labels, np.where(mask == 255, 255 if expected is None else 1, 0))
    if expected is not None:
        assert data.classes == expected
        assert f"only 0 and 255, which are read as {expected[0]} and {expected[1]}" in caplog.text
    elif classes == ["a", "b", "c"]:
        assert "255 is read as no class" in caplog.text


def without_labels(root: Path, name: str = "", text: str = "") -> None:
    (root / "labels" / "val" / "b.png").unlink()
    if name:
        (root / "labels" / "val" / name).write_text(text)


def with_broken_labels(root: Path) -> None:
    path = root / "labels" / "val" / "a.png"
    save_labels(path, np.random.default_rng(0).integers(0, 3, (64, 64), dtype=np.uint8))
    path.write_bytes(path.read_bytes()[:400])


def with_many_colours(root: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    save_image(root / "images" / "val" / "a.jpg", width=80, height=60)
    save_labels(root / "labels" / "val" / "a.png", noise)


REFUSED = {
    "no labels": (without_labels, MissingData, r"b\.jpg .* no b\.png in .*val"),
    "other labels": (lambda root: without_labels(root, "b.txt"), MissingData, r"but b\.txt"),
    "labelme": (
        lambda root: without_labels(root, "b.json", '{"version": "5.5", "shapes": [], "imagePath": "b.jpg"}'),
        MissingData,
        r"but b\.json",
    ),
    "two images": (
        lambda root: save_image(root / "images" / "val" / "a.png"),
        DataError,
        r"a\.jpg and a\.png .*a\.png",
    ),
    "size": (
        lambda root: save_labels(root / "labels" / "val" / "a.png", LABELS.T.copy()),
        DataError,
        r"a\.jpg, 3 x 2, got 2 x 3",
    ),
    "no images": (lambda root: [path.unlink() for path in (root / "images" / "val").iterdir()], DataError, "no images"),
    "broken": (with_broken_labels, UnreadableImage, r"a\.png"),
    "colours": (with_many_colours, DataError, "more colours than classes"),
}


@pytest.mark.parametrize(("change", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_files_that_do_not_fit_are_refused_by_name(root, change, error, words):
    change(root)
    with pytest.raises(error, match=words):
        open_segmentation("folder", root, "val").labels(0)


def test_labels_belong_to_the_upright_image(root):
    exif = Image.Exif()
    exif[0x0112] = 6
    save_image(root / "images" / "val" / "a.jpg", width=2, height=3, exif=exif)
    data = open_segmentation("folder", root, "val")
    assert data.load(0).shape[1:] == data.labels(0).shape == (2, 3)


@pytest.mark.parametrize(("value", "dtype"), [(3, np.uint8), (254, np.uint8), (256, np.uint16), (65535, np.uint16)])
def test_values_outside_the_classes_are_refused(root, value, dtype):
    values = LABELS.astype(dtype)
    values[0, 1] = value
    save_labels(root / "labels" / "val" / "a.png", values)
    with pytest.raises(
        DataError, match=rf"a\.png: labels must be in 0\.\.2 \(3 classes\) or 255 .*, got {value} at 1 of 6 pixels"
    ):
        open_segmentation("folder", root, "val").labels(0)


def test_classes_are_numbered_when_not_given(root):
    (root / "classes.txt").unlink()
    data = open_segmentation("folder", root, "val")
    assert len(data.palette) == 3
    assert data.classes == ["0", "1", "2"]
    for name in ("a", "b"):
        save_labels(root / "labels" / "val" / f"{name}.png", np.full((2, 3), 255, dtype=np.uint8))
    with pytest.raises(DataError, match=r"every pixel of every label map in .* is 255"):
        _ = open_segmentation("folder", root, "val").classes


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([], "must name 1 to 255 classes, got 0"),
        ([str(i) for i in range(256)], "must name 1 to 255 classes, got 256"),
        (["a", "b", "a"], "must name each class once, got 'a' 2 times"),
    ],
)
def test_wrong_classes(root, classes, message):
    with pytest.raises(DataError, match=message):
        LabelledFolder(root / "images" / "val", root / "labels" / "val", classes)
    (root / "classes.txt").write_text("\n".join(classes))
    with pytest.raises(DataError, match=rf"classes\.txt {message}"):
        open_segmentation("folder", root, "val")


def test_missing_classes_file(root):
    with pytest.raises(MissingData, match=r"no 'class\.txt' in .*; did you mean 'classes\.txt'"):
        LabelledFolder(root / "images" / "val", root / "labels" / "val", root / "class.txt")


def test_scenes_have_a_colour_per_class():
    scenes: LabelledImages = Scenes(1)
    assert len(set(scenes.palette)) == len(scenes.palette) == len(scenes.classes)


def test_stems_exclude_the_longest_ending():
    assert by_stem(["a_b.png", "c.png"], [".png", "_b.png"]) == {"a": "a_b.png", "c": "c.png"}


def test_camvid(camvid):
    val = open_segmentation("folder", camvid, "val")
    assert len(val) == 101
    assert len(val.classes) == 11
    assert val.classes[8] == "car"
    labels = val.labels(0)
    assert labels.shape == val.load(0).shape[1:] == (360, 480)
    assert set(labels.unique().tolist()) == {*range(11), 255}


def soften(mask: np.ndarray, kind: str) -> np.ndarray:
    """Return a mask with edges as of a resized, smoothed or compressed picture."""
    image = Image.fromarray(mask)
    if kind == "jpeg":
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        return np.array(Image.open(file))
    if kind == "blurred":
        return np.array(image.filter(ImageFilter.GaussianBlur(2)))
    small = image.resize((image.width * 3 // 4, image.height * 3 // 4), Image.Resampling.BILINEAR)
    return np.array(small.resize(image.size, Image.Resampling.BILINEAR))


@pytest.mark.parametrize("kind", ["jpeg", "blurred", "resized"])
@pytest.mark.parametrize("classes", [None, ["background", "cell"]])
def test_masks_with_soft_edges_are_refused(root, kind, classes):
    mask = np.zeros((60, 80), dtype=np.uint8)
    mask[11:38, 13:50] = 255
    for name in ("a", "b"):
        save_image(root / "images" / "val" / f"{name}.jpg", width=80, height=60)
        save_labels(root / "labels" / "val" / f"{name}.png", soften(mask, kind))
    data = LabelledFolder(root / "images" / "val", root / "labels" / "val", classes)
    with pytest.raises(DataError, match="threshold it at 128"):
        data.label_map(0)
    with pytest.raises(DataError, match="threshold it at 128"):
        open_labels(root / "labels" / "val" / "a.png")


def test_class_indices_without_a_list_are_not_taken_for_soft_masks(root):
    """Pascal VOC: most pixels are 0 or 255, and the others are classes up to 20."""
    labels = np.zeros((60, 80), dtype=np.uint8)
    labels[:5], labels[20:30, 20:30], labels[40:, 40:] = 255, np.arange(1, 11), 20
    for name in ("a", "b"):
        save_image(root / "images" / "val" / f"{name}.jpg", width=80, height=60)
        save_labels(root / "labels" / "val" / f"{name}.png", labels)
    data = LabelledFolder(root / "images" / "val", root / "labels" / "val")
    np.testing.assert_array_equal(data.labels(0), labels)
    assert len(data.classes) == 21


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("b.jpg", "label maps must be PNG"),
        ("b_mask.png", "name of its image, b.png"),
        ("b-labels.PNG", "name of its image, b.png"),
        ("gt_b.png", "name of its image, b.png"),
        ("b_segmentation.tif", "convert the labels to PNG, b.png"),
        ("b.npy", "convert the labels to PNG, b.png"),
    ],
)
def test_labels_with_other_names_are_named(root, name, advice):
    (root / "labels" / "val" / "b.png").rename(root / "labels" / "val" / name)
    with pytest.raises(MissingData, match=rf"but {re.escape(name)}: .*{advice}"):
        open_segmentation("folder", root, "val")


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_names_pair_in_any_unicode_form(root, form):
    name = unicodedata.normalize("NFD" if form == "NFC" else "NFC", "café")
    (root / "images" / "val" / "a.jpg").rename(root / "images" / "val" / f"{name}.jpg")
    (root / "labels" / "val" / "a.png").rename(root / "labels" / "val" / f"{unicodedata.normalize(form, name)}.png")
    data = open_segmentation("folder", root, "val")
    assert [data.name(index) for index in range(len(data))] == ["b.jpg", f"{name}.jpg"]
    np.testing.assert_array_equal(data.labels(1), LABELS)
