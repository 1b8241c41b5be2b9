import json
from pathlib import Path

import pytest
import torch
from tests.features.memory.coded import blocks, save_example, save_image, save_labels

from cribo.base.errors import DataError, MissingData
from cribo.data.config import Reading
from cribo.data.labelled.datasets import open_segmentation
from cribo.data.labelled.formats import LABEL_FORMATS, LabelFormat, find_examples
from cribo.data.labelled.inputs import open_labels
from cribo.data.labelled.label_maps import Labelling, LabelMap
from cribo.data.labelled.segmentation import LabelledFiles
from cribo.data.sources.images import ImageFiles

LABELS = blocks([0, 1])
OUTLINE = {"image_id": 1, "category_id": 3, "segmentation": [[0, 0, 4, 0, 4, 4, 0, 4]]}
COCO = {
    "images": [{"id": 1, "file_name": "a.bmp", "height": 4, "width": 8}],
    "annotations": [OUTLINE],
    "categories": [{"id": 3, "name": "cell"}],
}


@pytest.mark.parametrize("ending", ["", "_labels"])
def test_side_by_side(tmp_path: Path, ending: str) -> None:
    for name in ("b", "deep/a"):
        save_example(tmp_path / Path(name).parent, Path(name).name, LABELS, label_name=f"{Path(name).name}{ending}")
    (tmp_path / "classes.txt").write_text("road\nsky\n")
    found = find_examples(tmp_path)
    assert found.listed_classes == ["road", "sky"]
    assert [*found.names] == ["b.bmp", "deep/a.bmp"]
    assert found.example(1).image == str(tmp_path / "deep/a.bmp")
    assert torch.equal(open_labels(found.example(1).labels).labels, LABELS)


def test_png_images_beside_their_labels(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png", LABELS)
    save_labels(tmp_path / "a_labels.png", LABELS)
    found = find_examples(tmp_path)
    assert (found.example(0).image, found.example(0).name) == (str(tmp_path / "a.png"), "a.png")
    assert (found.listed_classes, found.new_classes) == (None, None)


def test_images_and_labels_in_two_folders(tmp_path: Path) -> None:
    save_image(tmp_path / "images" / "x" / "a.bmp", LABELS)
    save_labels(tmp_path / "labels" / "x" / "a.png", LABELS)
    (tmp_path / "classes.txt").write_text("road\nsky\n")
    (tmp_path / "mine.txt").write_text("grass\nwater\n")
    found = find_examples(tmp_path)
    assert found.listed_classes == ["road", "sky"]
    assert (found.example(0).image, found.example(0).name) == (str(tmp_path / "images/x/a.bmp"), "x/a.bmp")
    (tmp_path / "images" / "list.txt").write_text(f"{tmp_path}/images/x/a.bmp\n")
    for source in (tmp_path / "images", tmp_path / "images" / "list.txt"):
        elsewhere = find_examples(source, labels=tmp_path / "labels", classes=tmp_path / "mine.txt")
        assert (elsewhere.example(0).name, elsewhere.listed_classes) == ("x/a.bmp", ["grass", "water"])


def test_folders_of_pascal_voc(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_image(tmp_path / "JPEGImages" / f"{name}.bmp", LABELS)
    save_labels(tmp_path / "SegmentationClass" / "b.png", LABELS)
    assert [*find_examples(tmp_path).names] == ["b.bmp"]
    save_labels(tmp_path / "SegmentationClass" / "c.png", LABELS)
    with pytest.raises(DataError, match=r"the labels .*SegmentationClass/c\.png have no image: .*JPEGImages"):
        find_examples(tmp_path)


def test_masks_of_0_and_255_are_two_classes_unless_more_are_known(tmp_path: Path) -> None:
    save_example(tmp_path, "a", torch.where(LABELS == 1, 255, 0))
    found = find_examples(tmp_path)
    assert (found.listed_classes, found.new_classes) == (None, ["background", "foreground"])
    assert torch.equal(open_labels(found.example(0).labels).labels, LABELS)
    of_memory = find_examples(tmp_path, known_classes=3)
    assert open_labels(of_memory.example(0).labels).labels.unique().tolist() == [0, 255]


def test_colours_of_the_list_become_the_palette(tmp_path: Path) -> None:
    save_example(tmp_path, "a", LABELS)
    (tmp_path / "classes.txt").write_text("road 0 0 0\nsky 1 1 1\n")
    assert list(find_examples(tmp_path).stated_palette or ()) == [(0, 0, 0), (1, 1, 1)]


def test_annotations_of_cocos_format(tmp_path: Path) -> None:
    save_image(tmp_path / "a.bmp", LABELS)
    (tmp_path / "a.json").write_text(json.dumps(COCO))
    (tmp_path / "other.json").write_text("{}")
    for found in (find_examples(tmp_path), find_examples(tmp_path, labels=tmp_path / "a.json")):
        assert found.listed_classes == ["background", "cell"]
        assert torch.equal(open_labels(found.example(0).labels).labels, blocks([1, 0]))
    (tmp_path / "names.txt").write_text("x\ny")
    with pytest.raises(DataError, match="cannot be used with COCO annotations"):
        find_examples(tmp_path, classes=tmp_path / "names.txt")
    (tmp_path / "b.json").write_text(json.dumps(COCO))
    with pytest.raises(DataError, match=r"several annotation files \(a\.json, b\.json\): choose one with --labels"):
        find_examples(tmp_path)


def test_a_labelled_set_with_annotations_of_cocos_format(tmp_path: Path) -> None:
    save_image(tmp_path / "images" / "val" / "a.bmp", LABELS)
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "val.json").write_text(json.dumps(COCO))
    val = open_segmentation("folder", tmp_path, "val", reading=Reading(max_pixels=32))
    assert (val.classes, val.name(0), val.reading) == (["background", "cell"], "a.bmp", Reading(max_pixels=32))
    assert torch.equal(val.labels(0), blocks([1, 0]))


def test_the_labels_of_a_split_are_those_of_its_name(tmp_path: Path) -> None:
    save_image(tmp_path / "images" / "val[1]" / "a.bmp", LABELS)
    save_labels(tmp_path / "labels" / "val[1].old" / "a.png", LABELS)
    (tmp_path / "labels" / "val1.json").write_text(json.dumps(COCO))
    with pytest.raises(MissingData, match=r"no .val\[1\]. in .*labels"):
        open_segmentation("folder", tmp_path, "val[1]").labels(0)


def test_labels_of_no_format(tmp_path: Path) -> None:
    save_image(tmp_path / "images" / "a.bmp", LABELS)
    (tmp_path / "labels.txt").write_text("a: road")
    with pytest.raises(DataError, match=r"labels\.txt has no labels of a known format: COCO annotations, "):
        find_examples(tmp_path / "images", labels=tmp_path / "labels.txt")


class Halves(LabelledFiles):
    """A toy format: a text file lists the class of the left and right half of each image."""

    def __init__(self, images: Path, labels: Path) -> None:
        rows = [line.split() for line in labels.read_text().splitlines()]
        super().__init__(ImageFiles(images, [name for name, *_ in rows]), images, [], classes=["road", "sky"])
        self.halves = [[int(left), int(right)] for _, left, right in rows]

    def label_map(self, index: int) -> LabelMap:
        return LabelMap(blocks(self.halves[index]))

    @staticmethod
    def write(path: Path, labelling: Labelling) -> int:
        maps = {name: labelling.labels(name) for name in labelling.sizes}
        path.write_text("".join(f"{name} {each[0, 0]} {each[0, -1]}\n" for name, each in maps.items()))
        return 0


def test_a_format_of_its_own_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = LabelFormat(
        "halves",
        (".halves",),
        lambda file: True,
        lambda source, files, images: Halves(images or source, files[0]),
        write=Halves.write,
    )
    monkeypatch.setattr("cribo.data.labelled.formats.LABEL_FORMATS", {"halves": halves, **LABEL_FORMATS})
    save_image(tmp_path / "images" / "a.bmp", LABELS)
    (tmp_path / "labels.halves").write_text("a.bmp 1 0\n")
    for found in (
        find_examples(tmp_path / "images", labels=tmp_path / "labels.halves"),
        open_segmentation("folder", tmp_path, ""),
    ):
        assert (found.listed_classes, found.name(0)) == (["road", "sky"], "a.bmp")
        assert torch.equal(found.labels(0), blocks([1, 0]))
    written = Labelling({"a.bmp": (4, 8)}, ["road", "sky"], lambda name: blocks([0, 1]))
    assert halves.write is not None
    halves.write(tmp_path / "images" / "a.halves", written)
    examples = find_examples(tmp_path / "images")
    assert torch.equal(open_labels(examples.example(0).labels).labels, blocks([0, 1]))
    with pytest.raises(DataError, match="cannot be used with halves, which define their own classes"):
        find_examples(tmp_path / "images", classes=tmp_path / "names.txt")


def test_an_image_without_labels(tmp_path: Path) -> None:
    save_example(tmp_path, "a", LABELS)
    save_image(tmp_path / "b.bmp", LABELS)
    with pytest.raises(DataError, match=r"image b\.bmp has no labels: .* contains neither b\.png nor b_labels\.png"):
        find_examples(tmp_path)
    save_image(tmp_path / "png" / "b.png", LABELS)
    with pytest.raises(DataError, match=r"image b\.png has no labels: .* does not contain b_labels\.png"):
        find_examples(tmp_path / "png")  # b.png is there: it is the image
    (tmp_path / "png" / "b.png").unlink()
    save_image(tmp_path / "two" / "images" / "b.bmp", LABELS)
    (tmp_path / "two" / "labels").mkdir()
    with pytest.raises(MissingData, match=r"the image b\.bmp has no labels"):
        find_examples(tmp_path / "two")


@pytest.mark.parametrize("image", ["b.bmp", "b.png"])
def test_labels_with_other_names_are_named(tmp_path: Path, image: str) -> None:
    save_image(tmp_path / image, LABELS)
    save_labels(tmp_path / "b_mask.png", LABELS)
    right = r"b\.png" if image == "b.bmp" else r"b_labels\.png"
    with pytest.raises(DataError, match=rf"but b_mask\.png: give each label map the name of its image, {right}"):
        find_examples(tmp_path)
    save_image(tmp_path / "voc" / "JPEGImages" / "b.bmp", LABELS)
    save_image(tmp_path / "voc" / "SegmentationClass" / "b_mask.jpg", LABELS)
    with pytest.raises(DataError, match=r"must be PNG, got b_mask\.jpg"):
        find_examples(tmp_path / "voc")
    save_labels(tmp_path / "voc" / "SegmentationClass" / "b_mask.png", LABELS)
    with pytest.raises(DataError, match=r"but b\.bmp: give the label map its name, b\.png"):
        find_examples(tmp_path / "voc")


def test_a_damaged_annotation_file_is_not_absent(tmp_path: Path) -> None:
    save_image(tmp_path / "a.bmp", LABELS)
    (tmp_path / "a.json").write_text(json.dumps(COCO)[:-20])
    with pytest.raises(DataError, match=r"a\.json is not valid JSON"):
        find_examples(tmp_path)
    (tmp_path / "b.json").write_text(json.dumps(COCO))
    with pytest.raises(DataError, match=r"a\.json is not valid JSON"):
        find_examples(tmp_path)
    (tmp_path / "b.json").unlink()
    save_labels(tmp_path / "a.png", LABELS)  # another layout, which is complete
    assert [*find_examples(tmp_path).names] == ["a.bmp"]


def test_labels_without_an_image(tmp_path: Path) -> None:
    save_example(tmp_path / "one", "a", LABELS)
    save_labels(tmp_path / "one" / "b_labels.png", LABELS)
    with pytest.raises(DataError, match=r"the labels b_labels\.png have no image"):
        find_examples(tmp_path / "one")
    save_image(tmp_path / "two" / "images" / "a.bmp", LABELS)
    for name in ("a", "b"):
        save_labels(tmp_path / "two" / "labels" / f"{name}.png", LABELS)
    with pytest.raises(DataError, match=r"the labels .*b\.png have no image"):
        find_examples(tmp_path / "two")


def test_an_image_with_two_label_maps(tmp_path: Path) -> None:
    save_example(tmp_path, "a", LABELS)
    save_labels(tmp_path / "a_labels.png", LABELS)
    with pytest.raises(DataError, match=r"a\.bmp has two label maps in .*, a\.png and a_labels\.png: remove one"):
        find_examples(tmp_path)


def test_folders_without_examples(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no images in"):
        find_examples(tmp_path)
    with pytest.raises(MissingData, match="there is no 'nothing'"):
        find_examples(tmp_path / "nothing")
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(DataError, match="is a file: give the folder of its label maps with --labels"):
        find_examples(tmp_path / "file.txt")
    (tmp_path / "coco.json").write_text(json.dumps(COCO))
    with pytest.raises(MissingData, match=r"1 of the 1 images of .*coco\.json are not in"):
        find_examples(tmp_path / "coco.json")
