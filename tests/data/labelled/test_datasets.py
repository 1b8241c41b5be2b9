from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cribo.base.errors import DataError, MissingData
from cribo.data import LabelledFiles
from cribo.data.labelled.datasets import default_splits, open_segmentation, read_stems
from cribo.data.labelled.segmentation import LabelledImages
from cribo.data.labelled.sets import SEGMENTATION_SETS

OFFICIAL = [name for name in SEGMENTATION_SETS if name != "folder"]

VOC = "VOCdevkit/VOC2012"
CONTEXT = "VOCdevkit/VOC2010"


def write_image(path: Path, width: int = 3, height: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (40, 80, 120)).save(path)


def write_labels(path: Path, values: list[list[int]], *, colours: bool = False) -> None:
    """Write a grey PNG or, as in Pascal VOC, a palette PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.array(values, dtype=np.uint8))
    if colours:
        image.putpalette(np.random.default_rng(0).integers(0, 256, 768, dtype=np.uint8).tobytes())
    image.save(path)


def write_list(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def touch(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()


def labels_of(data: LabelledImages, index: int = 0) -> list[list[int]]:
    labels = data.labels(index)
    assert labels.dtype == torch.uint8
    return labels.tolist()


def write_voc(root: Path, ids: Mapping[str, list[list[int]]], split: str = "val") -> None:
    for image, values in ids.items():
        write_image(root / f"JPEGImages/{image}.jpg")
        write_labels(root / f"SegmentationClass/{image}.png", values, colours=True)
    write_list(root / f"ImageSets/Segmentation/{split}.txt", *ids)


def write_ade20k(
    root: Path, values: list[list[int]], split: str = "validation", name: str = "ADE_val_00000001"
) -> None:
    write_image(root / f"images/{split}/{name}.jpg")
    write_labels(root / f"annotations/{split}/{name}.png", values)


@pytest.mark.parametrize(
    ("name", "count", "spots"),
    [
        ("voc", 21, {0: "background", 1: "aeroplane", 15: "person", 20: "tvmonitor"}),
        ("pascal-context", 59, {0: "aeroplane", 1: "bag", 36: "person", 54: "tvmonitor", 58: "wood"}),
        ("pascal-context-60", 60, {0: "background", 1: "aeroplane", 55: "tvmonitor", 59: "wood"}),
        ("coco-stuff", 171, {0: "person", 11: "stop sign", 79: "toothbrush", 80: "banner", 170: "wood"}),
        ("ade20k", 150, {0: "wall", 7: "bed", 12: "person", 89: "television receiver", 149: "flag"}),
        ("cityscapes", 19, {0: "road", 10: "sky", 13: "car", 18: "bicycle"}),
        ("camvid", 11, {0: "sky", 4: "pavement", 8: "car", 10: "bicyclist"}),
    ],
)
def test_class_lists(name, count, spots):
    known = SEGMENTATION_SETS[name]
    assert len(known.classes) == len(set(known.classes)) == len(known.palette) == count
    assert {index: known.classes[index] for index in spots} == spots
    assert all(class_name == class_name.strip() for class_name in known.classes)
    assert len(set(known.values.classes)) == count
    assert not set(known.values.classes) & set(known.values.ignored)


@pytest.mark.parametrize("name", OFFICIAL)
def test_palettes(name):
    palette = SEGMENTATION_SETS[name].palette
    assert all(len(colour) == 3 and all(0 <= channel <= 255 for channel in colour) for colour in palette)
    # The published palette of ADE20K has the same colours for road and skyscraper.
    assert len(palette) - len(set(palette)) == (name == "ade20k")


@pytest.mark.parametrize(
    ("name", "class_name", "colour"),
    [
        ("voc", "background", (0, 0, 0)),
        ("voc", "person", (192, 128, 128)),
        ("voc", "tvmonitor", (0, 64, 128)),
        ("ade20k", "sky", (6, 230, 230)),
        ("ade20k", "flag", (92, 0, 255)),
        ("cityscapes", "road", (128, 64, 128)),
        ("cityscapes", "bicycle", (119, 11, 32)),
        ("camvid", "tree", (128, 128, 0)),
        ("camvid", "bicyclist", (0, 128, 192)),
    ],
)
def test_colours_of_classes(name, class_name, colour):
    known = SEGMENTATION_SETS[name]
    assert known.palette[known.classes.index(class_name)] == colour


def test_sizes():
    sizes = {name: dict(SEGMENTATION_SETS[name].sizes) for name in OFFICIAL}
    assert sizes == {
        "voc": {"train": 1464, "val": 1449, "trainaug": 10582},
        "pascal-context": {"train": 4998, "val": 5105},
        "pascal-context-60": {"train": 4998, "val": 5105},
        "coco-stuff": {"train": 118287, "val": 5000},
        "ade20k": {"train": 20210, "val": 2000},
        "cityscapes": {"train": 2975, "val": 500},
        "camvid": {"train": 367, "val": 101, "test": 233},
    }


def test_voc_reads_the_indices_of_its_coloured_maps(tmp_path):
    write_voc(tmp_path / VOC, {"2007_000042": [[0, 255, 19], [19, 19, 0]], "2007_000033": [[0, 255, 1], [20, 1, 0]]})
    write_image(tmp_path / VOC / "JPEGImages/2008_000002.jpg")  # most images of VOC have no label map
    data = open_segmentation("voc", tmp_path / VOC, "val", partial=True)
    assert [data.name(index) for index in range(len(data))] == ["2007_000033.jpg", "2007_000042.jpg"]
    assert labels_of(data) == [[0, 255, 1], [20, 1, 0]]
    assert data.load(0).shape == (3, 2, 3)
    assert data.path(0) == str(tmp_path / VOC / "JPEGImages/2007_000033.jpg")
    assert data.ignore_index == 255
    assert data.palette[20] == (0, 64, 128)


@pytest.mark.parametrize(
    "inner", ["", "VOCdevkit", VOC, f"{VOC}/JPEGImages", f"{VOC}/SegmentationClass", f"{VOC}/../../VOCdevkit"]
)
def test_root_too_high_or_too_low(tmp_path, inner):
    write_voc(tmp_path / VOC, {"2007_000033": [[0, 0, 0], [1, 1, 1]]})
    data = open_segmentation("voc", tmp_path / inner, "val", partial=True)
    assert labels_of(data) == [[0, 0, 0], [1, 1, 1]]


def test_a_parent_folder_is_used_only_if_the_root_is_part_of_the_set(tmp_path):
    write_ade20k(tmp_path, [[1, 1, 1], [1, 1, 1]])
    (tmp_path / "cars").mkdir()
    assert len(open_segmentation("ade20k", tmp_path / "images" / "validation", "val", partial=True)) == 1
    with pytest.raises(MissingData, match=r"ADE20K val is not in .*cars"):
        open_segmentation("ade20k", tmp_path / "cars", "val", partial=True)


@pytest.mark.parametrize("list_name", ["trainaug.txt", "train_aug.txt"])
@pytest.mark.parametrize(
    "line",
    ["{0}", "/JPEGImages/{0}.jpg /SegmentationClassAug/{0}.png", "JPEGImages/{0}.jpg SegmentationClassAug/{0}.png"],
)
def test_voc_trainaug(tmp_path, list_name, line):
    write_voc(tmp_path, {"2007_000032": [[1, 1, 1], [0, 0, 255]]}, split="train")
    write_image(tmp_path / "JPEGImages/2008_000008.jpg")
    write_labels(tmp_path / "SegmentationClassAug/2008_000008.png", [[13, 13, 13], [0, 15, 0]])
    # SBD's labels of VOC's images are coarser or missing, so VOC's labels are used.
    write_labels(tmp_path / "SegmentationClassAug/2007_000032.png", [[1, 1, 1], [1, 1, 1]])
    ids = ["2008_000008", "2007_000032"]
    write_list(tmp_path / "ImageSets/Segmentation" / list_name, *(line.format(image) for image in ids))
    data = open_segmentation("voc", tmp_path, "trainaug", partial=True)
    assert [labels_of(data, index) for index in range(len(data))] == [
        [[1, 1, 1], [0, 0, 255]],
        [[13, 13, 13], [0, 15, 0]],
    ]
    (tmp_path / "SegmentationClassAug/2007_000032.png").unlink()
    assert len(open_segmentation("voc", tmp_path, "trainaug", partial=True)) == 2


def test_default_splits(tmp_path):
    write_voc(tmp_path / VOC, {"2007_000032": [[1, 1, 1], [0, 0, 255]]}, split="train")
    assert default_splits("voc", tmp_path) == ("train", "val")
    write_list(tmp_path / VOC / "ImageSets/Segmentation/train_aug.txt", "2007_000032")
    assert default_splits("voc", tmp_path) == ("train", "val")
    (tmp_path / VOC / "SegmentationClassAug").mkdir()
    assert default_splits("voc", tmp_path) == ("trainaug", "val")
    assert default_splits("ade20k", tmp_path) == default_splits("folder", tmp_path) == ("train", "val")
    with pytest.raises(MissingData, match="there is no 'nowhere'"):
        default_splits("voc", tmp_path / "nowhere")


@pytest.mark.parametrize("folder", ["SegmentationClassContext", "SegmentationContext"])
def test_pascal_context(tmp_path, folder):
    write_image(tmp_path / CONTEXT / "JPEGImages/2008_000002.jpg")
    write_labels(tmp_path / CONTEXT / folder / "2008_000002.png", [[0, 55, 58], [1, 59, 0]])
    write_list(tmp_path / CONTEXT / "ImageSets/SegmentationContext/train.txt", "2008_000002")
    of_59 = open_segmentation("pascal-context", tmp_path, "train", partial=True)
    of_60 = open_segmentation("pascal-context-60", tmp_path, "train", partial=True)
    assert labels_of(of_59) == [[255, 54, 57], [0, 58, 255]]
    assert labels_of(of_60) == [[0, 55, 58], [1, 59, 0]]
    assert of_59.classes == of_60.classes[1:]
    assert of_59.palette == of_60.palette[1:]
    # The image shows a television by a window.
    assert [of_60.classes[label] for label in (55, 58)] == ["tvmonitor", "window"]


@pytest.mark.parametrize("images", ["images/val2017", "val2017"])
@pytest.mark.parametrize("maps", ["annotations/val2017", "stuffthingmaps/val2017"])
def test_coco_stuff_maps(tmp_path, images, maps):
    write_image(tmp_path / images / "000000000139.jpg")
    write_labels(tmp_path / maps / "000000000139.png", [[0, 12, 181], [255, 10, 91]])
    data = open_segmentation("coco-stuff", tmp_path, "val", partial=True)
    assert labels_of(data) == [[0, 11, 170], [255, 10, 80]]
    assert [data.classes[label] for label in (11, 80)] == ["stop sign", "banner"]


def test_coco_stuff_train_ids(tmp_path):
    for image in ("000000000139", "000000000285"):
        write_image(tmp_path / f"images/val2017/{image}.jpg")
        write_labels(tmp_path / f"annotations/val2017/{image}_labelTrainIds.png", [[0, 11, 170], [255, 10, 80]])
    data = open_segmentation("coco-stuff", tmp_path, "val", partial=True)
    assert labels_of(data) == [[0, 11, 170], [255, 10, 80]]
    write_labels(tmp_path / "annotations/val2017/000000000139.png", [[0, 12, 181], [255, 10, 91]])
    assert len(open_segmentation("coco-stuff", tmp_path, "val", partial=True)) == 2  # the complete set of maps is used
    write_labels(tmp_path / "annotations/val2017/000000000285.png", [[0, 12, 181], [255, 10, 91]])
    data = open_segmentation("coco-stuff", tmp_path, "val", partial=True)
    assert isinstance(data, LabelledFiles)
    assert data.label_path(0).endswith("000000000139.png")
    assert labels_of(data) == [[0, 11, 170], [255, 10, 80]]


def test_coco_things_without_masks_are_no_labels(tmp_path):
    write_image(tmp_path / "images/val2017/000000000139.jpg")
    write_labels(tmp_path / "annotations/val2017/000000000139.png", [[0, 11, 0], [0, 0, 0]])
    with pytest.raises(DataError, match=r"labels must be in 0\.\.10, 12\.\.24, .*, got 11 at 1 of 6 pixels"):
        open_segmentation("coco-stuff", tmp_path, "val", partial=True).labels(0)


def test_ade20k_labels_are_shifted(tmp_path):
    write_ade20k(tmp_path / "ADEChallengeData2016", [[0, 1, 150], [13, 0, 1]])
    data = open_segmentation("ade20k", tmp_path, "val", partial=True)
    assert labels_of(data) == [[255, 0, 149], [12, 255, 0]]


def write_cityscapes(root: Path, kinds: Mapping[str, list[list[int]]]) -> None:
    frame = "frankfurt/frankfurt_000000_000294"
    write_image(root / f"leftImg8bit/val/{frame}_leftImg8bit.png")
    for kind, values in kinds.items():
        write_labels(root / f"gtFine/val/{frame}_gtFine_{kind}.png", values)
    write_image(root / f"gtFine/val/{frame}_gtFine_color.png")
    (root / f"gtFine/val/{frame}_gtFine_polygons.json").write_text('{"imgHeight": 2, "imgWidth": 3, "objects": []}')


def test_cityscapes_label_ids(tmp_path):
    write_cityscapes(tmp_path, {"labelIds": [[7, 26, 33], [0, 29, 14]], "labelTrainIds": [[0, 0, 0], [0, 0, 0]]})
    data = open_segmentation("cityscapes", tmp_path, "val", partial=True)
    assert data.name(0) == "frankfurt/frankfurt_000000_000294_leftImg8bit.png"
    assert labels_of(data) == [[0, 13, 18], [255, 255, 255]]


def test_cityscapes_train_ids(tmp_path):
    write_cityscapes(tmp_path, {"labelTrainIds": [[0, 13, 18], [255, 255, 1]]})
    data = open_segmentation("cityscapes", tmp_path, "val", partial=True)
    assert labels_of(data) == [[0, 13, 18], [255, 255, 1]]


def test_camvid_in_segnets_layout(tmp_path):
    write_image(tmp_path / "train/0001TP_006690.png")
    write_labels(tmp_path / "trainannot/0001TP_006690.png", [[0, 11, 10], [8, 3, 11]])
    write_list(
        tmp_path / "train.txt", "/SegNet/CamVid/train/0001TP_006690.png /SegNet/CamVid/trainannot/0001TP_006690.png"
    )
    data = open_segmentation("camvid", tmp_path, "train", partial=True)
    assert labels_of(data) == [[0, 255, 10], [8, 3, 255]]


def test_camvid_in_folders(tmp_path):
    write_image(tmp_path / "images/val/0016E5_07959.jpg")
    write_labels(tmp_path / "labels/val/0016E5_07959.png", [[0, 255, 10], [8, 3, 255]])
    write_list(tmp_path / "classes.txt", *SEGMENTATION_SETS["camvid"].classes)
    data = open_segmentation("camvid", tmp_path, "val", partial=True)
    assert labels_of(data) == [[0, 255, 10], [8, 3, 255]]
    write_list(tmp_path / "classes.txt", "road", "sky")
    with pytest.raises(DataError, match=r"classes\.txt must list the classes of CamVid .*, got road, sky; .*'folder'"):
        open_segmentation("camvid", tmp_path, "val", partial=True)


def test_complete_camvid(camvid):
    train, val = open_segmentation("camvid", camvid, "train"), open_segmentation("camvid", camvid.parent, "val")
    assert (len(train), len(val)) == (367, 101)
    assert torch.equal(val.labels(3), open_segmentation("folder", camvid, "val").labels(3))


def fill_cityscapes(root: Path) -> None:
    frames = [f"frankfurt_000000_{number:06d}" for number in range(500)]
    touch(root / "leftImg8bit/val/frankfurt", [f"{frame}_leftImg8bit.png" for frame in frames])
    touch(root / "gtFine/val/frankfurt", [f"{frame}_gtFine_labelIds.png" for frame in frames])


def test_a_complete_split_is_accepted(tmp_path):
    fill_cityscapes(tmp_path)
    data = open_segmentation("cityscapes", tmp_path, "val")
    assert len(data) == 500
    assert isinstance(data, LabelledFiles)
    assert data.label_path(499).endswith("frankfurt_000000_000499_gtFine_labelIds.png")


@pytest.mark.parametrize(
    ("gone", "counts"),
    [("leftImg8bit/val/frankfurt/*_000123_*", "499 .* 500"), ("gtFine/val/frankfurt/*_000123_*", "500 .* 499")],
)
def test_a_missing_file_is_named(tmp_path, gone, counts):
    fill_cityscapes(tmp_path)
    [path] = tmp_path.glob(gone)
    path.unlink()
    with pytest.raises(DataError, match=rf"must have 500 .*got {counts}.*1 missing, .*{path}.*partial"):
        open_segmentation("cityscapes", tmp_path, "val")


def test_missing_and_surplus_pairs_are_detected(tmp_path):
    fill_cityscapes(tmp_path)
    folders = {"leftImg8bit": "leftImg8bit", "gtFine": "gtFine_labelIds"}
    for folder, kind in folders.items():
        touch(tmp_path / folder / "val/lindau", [f"lindau_000000_000019_{kind}.png"])
    with pytest.raises(DataError, match="got 501 images and 501 label maps"):
        open_segmentation("cityscapes", tmp_path, "val")
    for folder in folders:
        for path in sorted((tmp_path / folder / "val/frankfurt").iterdir())[249:]:
            path.unlink()
    with pytest.raises(DataError, match="got 250 images and 250 label maps"):
        open_segmentation("cityscapes", tmp_path, "val")
    assert len(open_segmentation("cityscapes", tmp_path, "val", partial=True)) == 250


def test_a_listed_image_that_is_missing_is_named(tmp_path):
    ids = [f"2007_{number:06d}" for number in range(1449)]
    touch(tmp_path / "JPEGImages", [f"{image}.jpg" for image in ids[:1000]])
    touch(tmp_path / "SegmentationClass", [f"{image}.png" for image in ids])
    write_list(tmp_path / "ImageSets/Segmentation/val.txt", *ids)
    with pytest.raises(DataError, match=r"got 1000 images and 1449 .*; 449 missing, the first is .*001000\.jpg"):
        open_segmentation("voc", tmp_path, "val")
    assert len(open_segmentation("voc", tmp_path, "val", partial=True)) == 1000


def only_images(root: Path) -> None:
    write_image(root / "images/validation/ADE_val_00000001.jpg")


def only_labels(root: Path) -> None:
    (root / "images/validation").mkdir(parents=True)
    write_labels(root / "annotations/validation/ADE_val_00000001.png", [[1, 1], [1, 1]])


def without(name: str) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        write_voc(root, {"2007_000033": [[0, 0, 0], [1, 1, 1]]})
        (root / name).unlink()

    return write


@pytest.mark.parametrize(
    ("name", "write", "error", "words"),
    [
        (
            "voc",
            without("SegmentationClass/2007_000033.png"),
            MissingData,
            r"2007_000033\.jpg .*2007_000033\.png in .*Class",
        ),
        ("voc", without("ImageSets/Segmentation/val.txt"), MissingData, r"ImageSets/Segmentation/val\.txt"),
        ("ade20k", only_labels, DataError, "no images in .*images/validation"),
        ("ade20k", only_images, MissingData, r"missing label maps \(annotations/validation\); .*: images$"),
    ],
)
def test_incomplete_folders_are_refused_by_what_is_missing(tmp_path, name, write, error, words):
    write(tmp_path)
    with pytest.raises(error, match=words):
        open_segmentation(name, tmp_path, "val", partial=True)


def test_missing_root(tmp_path):
    (tmp_path / "ADEChallengeData2016").mkdir()
    with pytest.raises(MissingData, match="did you mean 'ADEChallengeData2016'"):
        open_segmentation("ade20k", tmp_path / "ADEChallenge2016", "val")


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        (
            "ade",
            "val",
            r"unknown segmentation set 'ade'; did you mean 'ade20k'\? \(available: voc, pascal-context, .*folder\)",
        ),
        ("xyz", "val", r"unknown segmentation set 'xyz'; available: voc, "),
        ("ade20k", "validation", r"ade20k has no split 'validation'; did you mean 'val'\? \(available: train, val\)"),
        ("voc", "test", r"voc has no split 'test'; .*available: train, val, trainaug"),
    ],
)
def test_unknown_names(tmp_path, name, split, message):
    with pytest.raises(DataError, match=message):
        open_segmentation(name, tmp_path, split)


def test_label_maps_in_colours_are_refused(tmp_path):
    write_voc(tmp_path, {"2007_000033": [[0, 0, 0], [1, 1, 1]]})
    write_image(tmp_path / "SegmentationClass/2007_000033.png")
    with pytest.raises(DataError, match=r"must be class indices, got colours \(mode RGB\)"):
        open_segmentation("voc", tmp_path, "val", partial=True).labels(0)


@pytest.mark.parametrize(("name", "wrong"), [("voc", 21), ("voc", 254), ("pascal-context", 60)])
def test_values_that_are_not_a_class_are_refused(tmp_path, name, wrong):
    root = tmp_path / (VOC if name == "voc" else CONTEXT)
    maps, lists = ("SegmentationClass", "Segmentation") if name == "voc" else ("SegmentationContext",) * 2
    write_image(root / "JPEGImages/2008_000002.jpg")
    write_labels(root / maps / "2008_000002.png", [[0, 1, 2], [wrong, wrong, 0]])
    write_list(root / f"ImageSets/{lists}/val.txt", "2008_000002")
    with pytest.raises(DataError, match=rf"2008_000002\.png: labels must be in .*, got {wrong} at 2 of 6 pixels"):
        open_segmentation(name, tmp_path, "val", partial=True).labels(0)


def test_a_label_map_of_another_size_is_refused(tmp_path):
    write_ade20k(tmp_path, [[1, 1], [1, 1], [1, 1]])
    with pytest.raises(DataError, match=r"size of image ADE_val_00000001\.jpg, 3 x 2, got 2 x 3"):
        open_segmentation("ade20k", tmp_path, "val", partial=True).labels(0)


@pytest.mark.parametrize(
    "text",
    [
        "2007_000032\n2007_000039\n",
        "\ufeff2007_000032\r\n\r\n2007_000039",
        "/JPEGImages/2007_000032.jpg /SegmentationClassAug/2007_000032.png\nJPEGImages/2007_000039.jpg\n",
    ],
)
def test_lists(tmp_path, text):
    path = tmp_path / "val.txt"
    path.write_bytes(text.encode())
    assert read_stems(path) == {"2007_000032", "2007_000039"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n\n", r"val\.txt lists no images"),
        (b"\xff\xfe\x00\x01", "it is not UTF-8 text"),
        (b"2007_000032\n2007_000039 -1\n", r"val\.txt, line 2: must be a name, .*, got '2007_000039 -1'"),
    ],
)
def test_invalid_lists_are_refused(tmp_path, content, message):
    path = tmp_path / "val.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_stems(path)
