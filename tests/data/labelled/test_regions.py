"""Labels of other tools: files as the tools write them, round trips, and files that are wrong."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from cribo.base.errors import DataError, InputError, MissingData
from cribo.data.labelled.formats import LABEL_FORMATS, find_examples, written_formats
from cribo.data.labelled.label_maps import IGNORE_INDEX, LabelledBox, Labelling, Task
from cribo.data.labelled.label_studio import decoded
from cribo.data.labelled.label_studio_writing import encoded
from cribo.data.labelled.regions import polygon, trace

CLASSES = ["background", "cell", "it's a dog"]
HEIGHT, WIDTH = 40, 56
WRITTEN = [name for name, row in LABEL_FORMATS.items() if row.write is not None and row.read is not None]


def save_image(path: Path, height: int = HEIGHT, width: int = WIDTH) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (90, 90, 90)).save(path)


def labels(seed: int, smooth: float = 3) -> Tensor:
    """Return a map of blobs of three classes with holes."""
    noise = ndimage.gaussian_filter(np.random.default_rng(seed).random((HEIGHT, WIDTH)), smooth)
    return torch.from_numpy(np.digitize(noise, np.quantile(noise, [0.5, 0.8])).astype(np.uint8))


def mask(left: int, top: int, right: int, bottom: int) -> Tensor:
    found = torch.zeros(HEIGHT, WIDTH, dtype=torch.uint8)
    found[top:bottom, left:right] = 1
    return found


@pytest.mark.parametrize("smooth", [0, 1, 4])
def test_traced_regions_are_drawn_as_they_were(smooth: float) -> None:
    values = labels(0, smooth).numpy()
    drawn = np.full_like(values, 9)
    regions = trace(values, range(3))
    for region in regions:
        shape = polygon(*region.rings)(HEIGHT, WIDTH)
        assert shape.sum() == region.mask.sum()
        drawn[shape] = region.label
    assert (drawn == values).all()
    assert smooth or any(region.has_holes for region in regions)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_read_back(tmp_path: Path, name: str) -> None:
    maps = {f"deep/{number}.png" if number else "0.jpg": labels(number) for number in range(3)}
    images = tmp_path / "yolo" / "images" / "train" if name == "yolo" else tmp_path / "images"
    for each in maps:
        save_image(images / each)
    row = LABEL_FORMATS[name]
    assert row.write is not None
    if not Path(row.written).suffix:
        (tmp_path / row.written).mkdir(exist_ok=True)
    labelling = Labelling(dict.fromkeys(maps, (HEIGHT, WIDTH)), CLASSES, lambda each: maps[each])
    holes = row.write(tmp_path / row.written, labelling)
    if name == "voc":
        found = find_examples(
            images, labels=tmp_path / "voc" / "SegmentationClass", classes=tmp_path / "voc/classes.txt"
        )
    elif name == "yolo":
        found = find_examples(tmp_path / "yolo")
        assert 0 < holes < sum(len(each.rings) - 1 for own in maps.values() for each in trace(own.numpy(), (1, 2)))
    else:
        if name == "label-studio":  # results are predictions, which somebody must accept
            path = tmp_path / row.written
            path.write_text(path.read_text().replace('"predictions"', '"annotations"'))
        found = find_examples(images, labels=tmp_path / row.written)
    assert found.classes == CLASSES
    assert len(found) == 3
    for index in range(3):
        expected = maps[found.name(index).removeprefix("images/train/")]
        wrong = found.labels(index) != expected
        # Only pixels in holes, which YOLO's format cannot hold.
        assert not wrong.any() or (name == "yolo" and (expected[wrong] == 0).all())


# ------------------------------------------------------------------------------------------- files of the tools


def cvat(tmp_path: Path, shapes: str, size: str = f'width="{WIDTH}" height="{HEIGHT}"') -> Path:
    save_image(tmp_path / "images" / "a.png")
    path = tmp_path / "annotations.xml"
    path.write_text(
        '<?xml version="1.0"?><annotations><version>1.1</version><meta><job><labels><label><name>dog</name></label>'
        "<label><name>cell</name></label></labels></job></meta>"
        f'<image id="7" name="a.png" subset="val" {size}>{shapes}</image>'
        '<image id="8" name="b.png" width="9" height="9"></image></annotations>'
    )
    return path


def test_cvat(tmp_path: Path) -> None:
    path = cvat(
        tmp_path,
        '<polygon label="cell" points="0,0;20,0;20,10;0,10" z_order="1"></polygon>'
        '<mask label="dog" rle="1, 2, 1" left="30" top="5" width="2" height="2" z_order="0"></mask>'
        '<polygon label="dog" points="10,0;30,0;30,10;10,10" z_order="0"></polygon>'
        '<ellipse label="dog" cx="10" cy="30" rx="4" ry="2" rotation="90" z_order="0"></ellipse>'
        '<polyline label="dog" points="1,1;2,2"></polyline>',
    )
    found = find_examples(path)
    assert found.classes == ["background", "dog", "cell"]  # in the order of the file
    expected = torch.zeros(HEIGHT, WIDTH, dtype=torch.uint8)
    expected[:10, 10:30] = 1
    expected[5, 31] = expected[6, 30] = 1
    expected[:10, :20] = 2  # a higher z_order
    assert torch.equal(found.labels(0)[:20], expected[:20])
    ellipse = found.labels(0)[20:].nonzero() + torch.tensor([20, 0])
    assert ellipse.min(dim=0).values.tolist() == [26, 8]  # turned, it is higher than wide
    assert ellipse.max(dim=0).values.tolist() == [33, 11]
    assert found.tasks == {"a.png": Task("7", "val"), "b.png": Task("8", "")}


def test_label_studio(tmp_path: Path) -> None:
    save_image(tmp_path / "cell one.png")
    size = {"original_width": WIDTH, "original_height": HEIGHT, "from_name": "label", "to_name": "image"}
    brush = mask(40, 20, 50, 30).numpy().astype(bool)

    def result(value: dict[str, Any]) -> dict[str, Any]:
        return {"id": "r", "type": "any", "value": value, **size}

    regions = [
        result({"points": [[0, 0], [50, 0], [50, 25], [0, 25]], "polygonlabels": ["cell"]}),
        result({"format": "rle", "rle": encoded(brush), "brushlabels": ["dog"]}),
        result({"choices": ["blurred"]}),
    ]
    old = [result({**regions[0]["value"], "polygonlabels": ["wrong"]})]
    cancelled = {"was_cancelled": True, "result": []}
    tasks = [
        {
            "id": 31,
            "data": {"image": "/data/upload/1/0f3c2a19-cell%20one.png"},
            "annotations": [{"result": old}, {"result": regions}, cancelled],
        },
        {
            "id": 32,
            "data": {"image": "/data/local-files/?d=b.png"},
            "annotations": [],
            "predictions": [{"result": old}],
        },
    ]
    (tmp_path / "export.json").write_text(json.dumps(tasks))
    found = find_examples(tmp_path)
    assert (found.name(0), found.classes) == ("cell one.png", ["background", "cell", "dog"])
    assert torch.equal(found.labels(0), mask(0, 0, 28, 10) + 2 * mask(40, 20, 50, 30))
    assert found.tasks["cell one.png"].id == "31"
    assert found.tasks["b.png"].id == "32"


@pytest.mark.parametrize("seed", range(3))
def test_brush_strokes_are_packed_and_unpacked(seed: int) -> None:
    strokes = labels(seed, 0.5).numpy() > 0
    strokes[: 10 * seed] = False  # long runs
    values = decoded(encoded(strokes), 4 * strokes.size)
    assert (values.reshape(HEIGHT, WIDTH, 4) == 255 * strokes[..., None]).all()


def test_brush_strokes_with_literal_values() -> None:
    """7 values of 8 bits: a run of 3 times 9, then 4 literal values; lengths of 3, 4, 8 or 16 bits."""
    bits = f"{7:032b}{7:05b}" + "".join(f"{size - 1:04b}" for size in (3, 4, 8, 16))
    bits += f"1{0:02b}{2:03b}{9:08b}" + f"0{1:02b}{3:04b}" + "".join(f"{value:08b}" for value in (1, 2, 3, 255))
    bits += "0" * (-len(bits) % 8)
    packed = [int(bits[place : place + 8], 2) for place in range(0, len(bits), 8)]
    assert decoded(packed, 7).tolist() == [9, 9, 9, 1, 2, 3, 255]
    for wrong, count in ((packed[:-2], 7), (packed, 8), ([*packed, 256], 7), ("text", 7)):
        with pytest.raises(InputError):
            decoded(wrong, count)


def test_labelme(tmp_path: Path) -> None:
    save_image(tmp_path / "deep" / "a.png")
    file = io.BytesIO()
    Image.fromarray(np.eye(3, dtype=np.uint8) * 255).save(file, "PNG")
    shapes = [
        {"label": "cell", "points": [[0, 0], [20, 0], [20, 10], [0, 10]], "shape_type": "polygon"},
        {"label": "dog", "points": [[40, 20], [45, 20]], "shape_type": "circle"},
        {
            "label": "dog",
            "points": [[5, 30], [7, 32]],
            "shape_type": "mask",
            "mask": base64.b64encode(file.getvalue()).decode(),
        },
        {"label": "dog", "points": [[1, 1], [9, 9]], "shape_type": "line"},
    ]
    content = {"shapes": shapes, "imagePath": "C:\\pictures\\a.png", "imageHeight": HEIGHT, "imageWidth": WIDTH}
    (tmp_path / "deep" / "a.json").write_text(json.dumps(content))
    found = find_examples(tmp_path)
    assert found.name(0) == "deep/a.png"
    drawn = found.labels(0)
    assert torch.equal(drawn[:10], mask(0, 0, 20, 10)[:10])
    assert drawn[30:33, 5:8].tolist() == (2 * torch.eye(3, dtype=torch.uint8)).tolist()
    assert (drawn[10:28] == 2).sum().item() == pytest.approx(np.pi * 25, abs=4)


def test_label_maps_beside_labelme_files_are_preferred(tmp_path: Path) -> None:
    save_image(tmp_path / "a.jpg")
    Image.fromarray(mask(0, 0, 5, 5).numpy()).save(tmp_path / "a.png")
    (tmp_path / "a.json").write_text('{"shapes": [], "imagePath": "a.jpg"}')
    assert torch.equal(find_examples(tmp_path).labels(0), mask(0, 0, 5, 5))


def test_annotations_below_a_folder_do_not_replace_its_label_maps(tmp_path: Path) -> None:
    save_image(tmp_path / "images" / "a.png")
    (tmp_path / "labels").mkdir()
    Image.fromarray(mask(0, 0, 5, 5).numpy()).save(tmp_path / "labels" / "a.png")
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "damaged.json").write_text("{")
    content: dict[str, Any] = {"images": [{"id": 1, "file_name": "b.png"}], "annotations": [], "categories": []}
    (tmp_path / "annotations" / "instances.json").write_text(json.dumps(content))
    assert torch.equal(find_examples(tmp_path).labels(0), mask(0, 0, 5, 5))


def test_geojson_of_qupath(tmp_path: Path) -> None:
    save_image(tmp_path / "slide.TIF")
    rings = [[[0, 0], [20, 0], [20, 20], [0, 20], [0, 0]], [[5, 5], [5, 10], [10, 10], [10, 5], [5, 5]]]
    features = [
        {
            "type": "Feature",
            "properties": {"classification": {"name": "tumour"}},
            "geometry": {"type": "Polygon", "coordinates": rings},
        },
        {
            "type": "Feature",
            "properties": {"classification": {"name": "stroma"}},
            "geometry": {"type": "MultiPolygon", "coordinates": [[[[30, 30], [34, 30], [34, 34], [30, 34], [30, 30]]]]},
        },
    ]
    (tmp_path / "slide.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    found = find_examples(tmp_path)
    assert found.classes == ["background", "stroma", "tumour"]
    assert torch.equal(found.labels(0), 2 * (mask(0, 0, 20, 20) - mask(5, 5, 10, 10)) + mask(30, 30, 34, 34))


@pytest.mark.parametrize("names", ["[cell, dog]", "{0: cell, 1: dog}"])
def test_yolo(tmp_path: Path, names: str) -> None:
    for name in ("train/a", "val/b", "val/c", "val/d"):
        save_image(tmp_path / "images" / f"{name}.png")
    for name, text in (
        ("train/a", "0 0 0 .5 0 .5 .25 0 .25\n"),
        ("val/b", "1 0.5 0.5 1 0.5 1 1 0.5 1\n"),
        ("val/c", ""),
    ):
        (tmp_path / "labels" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "labels" / f"{name}.txt").write_text(text)
    # Exports of Roboflow have paths that begin with ../ but lie beside the file.
    (tmp_path / "data.yaml").write_text(f"path: .\ntrain: ../images/train\nval: images/val\nnames: {names}\n")
    found = find_examples(tmp_path)
    assert found.classes == ["background", "cell", "dog"]
    assert [*found.names] == ["images/train/a.png", "images/val/b.png", "images/val/c.png"]  # d has no file
    assert torch.equal(found.labels(0), mask(0, 0, 28, 10))
    assert torch.equal(found.labels(1), 2 * mask(28, 20, 56, 40))
    assert not found.labels(2).any()
    assert found.tasks["d.png"].split == "val"


def test_holes_are_counted_if_they_are_lost(tmp_path: Path) -> None:
    found = mask(0, 0, 30, 30) + mask(2, 2, 6, 6) - mask(10, 2, 14, 6) - mask(20, 2, 24, 6)
    found[3:5, 21:23] = 2  # a region in a hole that is larger
    labelling = Labelling({"a.png": (HEIGHT, WIDTH)}, CLASSES, lambda name: found)
    write = LABEL_FORMATS["yolo"].write
    assert write is not None
    assert write(tmp_path, labelling) == 2


def test_ids_and_splits_are_kept_in_results(tmp_path: Path) -> None:
    tasks = {"a.png": Task("31", "val")}
    labelling = Labelling({"x/a.png": (HEIGHT, WIDTH)}, CLASSES, lambda name: mask(0, 0, 5, 5), tasks)
    for name in ("cvat", "label-studio", "yolo"):
        write = LABEL_FORMATS[name].write
        assert write is not None
        write(tmp_path / LABEL_FORMATS[name].written, labelling)
    assert 'id="31" name="x/a.png" subset="val"' in (tmp_path / "cvat.xml").read_text()
    assert json.loads((tmp_path / "label-studio.json").read_text())[0]["id"] == 31
    assert (tmp_path / "yolo" / "labels" / "val" / "x" / "a.txt").is_file()
    assert "val: images/val" in (tmp_path / "yolo" / "data.yaml").read_text()


# ------------------------------------------------------------------------------------------------- one way in


def test_classes_are_renamed_merged_and_ignored(tmp_path: Path) -> None:
    path = cvat(
        tmp_path,
        '<polygon label="cell" points="0,0;20,0;20,10;0,10"></polygon>'
        '<polygon label="dog" points="30,0;40,0;40,10;30,10"></polygon>',
    )
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text("cell: thing\ndog: thing\n")
    found = find_examples(path, classes=mapping)
    assert found.classes == ["background", "thing"]
    assert torch.equal(found.labels(0), mask(0, 0, 20, 10) + mask(30, 0, 40, 10))
    mapping.write_text("background: null\ndog: null\n")
    found = find_examples(path, classes=mapping)
    assert found.classes == ["cell"]
    assert (found.labels(0) == 0).sum() == 200
    assert (found.labels(0) == IGNORE_INDEX).sum() == HEIGHT * WIDTH - 200
    for text, wrong in (
        ("cat: dog\n", "cat"),
        ("cell: [a, b]\n", "one name"),
        ("- cell\n", "must map"),
        ("{}", "must map"),
    ):
        mapping.write_text(text)
        with pytest.raises(DataError, match=wrong):
            find_examples(path, classes=mapping)


def test_files_of_several_formats(tmp_path: Path) -> None:
    cvat(tmp_path, '<polygon label="cell" points="0,0;20,0;20,10;0,10"></polygon>')
    content = {"shapes": [], "imagePath": "a.png"}
    (tmp_path / "images" / "a.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="--format"):
        find_examples(tmp_path)
    assert find_examples(tmp_path, label_format="cvat").classes == ["background", "dog", "cell"]
    with pytest.raises(DataError, match="--format"):
        find_examples(tmp_path, label_format="yolo")
    with pytest.raises(InputError, match="--format"):
        find_examples(tmp_path, label_format="pdf")
    with pytest.raises(InputError, match="--write"):
        written_formats(["pdf"])


def test_overlapping_labels_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = cvat(
        tmp_path,
        '<polygon label="dog" points="0,0;20,0;20,10;0,10"></polygon>'
        '<polygon label="dog" points="0,0;10,0;10,10;0,10"></polygon>'
        '<polygon label="cell" points="15,0;30,0;30,10;15,10"></polygon>',
    )
    found = find_examples(path)
    assert "50 pixels of 1 image have labels of several classes; the later one wins" in caplog.text
    assert found.labels(0)[0, [14, 15]].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("shapes", "what"),
    [
        ('<polygon label="cell" points="0,0;400000,0;20,10"></polygon>', "near it"),
        ('<polygon label="cell" points="0,0;nan,0;20,10"></polygon>', "corners"),
        ('<polygon label="cell" points="0,0;20;20,10"></polygon>', "corners"),
        ('<polygon label="" points="0,0;20,0;20,10"></polygon>', "label"),
        ('<polygon label="horse" points="0,0;20,0;20,10"></polygon>', "horse"),
        ('<polygon label="cell" points="0,0;1,0;1,0.5"></polygon>', "normalised"),
        ('<polygon label="cell" points="0,0;20,0"></polygon>', "none of"),
        ('<polygon label="cell" points="100,0;120,0;120,10"></polygon>', "none of"),
        ('<box label="cell" xtl="1" ytl="1" xbr="9" ybr="1"></box>', "none of"),
        ('<box label="cell" xtl="90" ytl="1" xbr="99" ybr="9"></box>', "none of"),
        ('<points label="cell" points="90,1"></points>', "none of"),
        ('<mask label="cell" rle="1, 2" left="30" top="5" width="2" height="2"></mask>', "rle"),
        ('<mask label="cell" rle="0, 4" left="55" top="5" width="2" height="2"></mask>', "inside the image"),
    ],
)
def test_invalid_shapes_are_refused_before_any_work(tmp_path: Path, shapes: str, what: str) -> None:
    with pytest.raises(DataError, match=what):
        find_examples(cvat(tmp_path, shapes))


def test_sizes_and_images_must_agree(tmp_path: Path) -> None:
    shapes = '<polygon label="cell" points="0,0;20,0;20,10;0,10"></polygon>'
    with pytest.raises(DataError, match="must have the size of its file"):
        find_examples(cvat(tmp_path, shapes, 'width="50" height="40"'))
    path = cvat(tmp_path, shapes)
    (tmp_path / "images" / "a.png").unlink()
    with pytest.raises(MissingData, match=r"a\.png"):
        find_examples(path)
    path.write_text(path.read_text().replace('name="a.png"', 'name="../../a.png"'))
    with pytest.raises((DataError, InputError)):
        find_examples(path)


@pytest.mark.parametrize(
    "line", ["5 0 0 1 0 1 1", "0 0 0 300 0 300 200", "0 0 0 1 0 1", "a 0 0 1 0 1 1", "0.5 0 0 1 0 1 1"]
)
def test_invalid_lines_of_yolo(tmp_path: Path, line: str) -> None:
    save_image(tmp_path / "images" / "a.png")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_text(line)
    (tmp_path / "classes.txt").write_text("cell\ndog\n")
    with pytest.raises(DataError, match=r"line 1 of a\.txt"):
        find_examples(tmp_path)


BOX = LabelledBox(1, (5, 5, 20, 15), rest=0)


def write_boxes(folder: Path, kind: str) -> Path:
    """Write a box around a cell in a format, for an image a.png."""
    save_image(folder / "images" / "a.png")
    if kind == "cvat":
        return cvat(folder, '<box label="dog" xtl="5" ytl="5" xbr="20" ybr="15"></box>')
    if kind == "yolo":
        (folder / "labels").mkdir()
        (folder / "labels" / "a.txt").write_text(f"0 {12.5 / WIDTH} {10 / HEIGHT} {15 / WIDTH} {10 / HEIGHT}\n")
        (folder / "classes.txt").write_text("cell\nit's a dog\n")
        return folder
    if kind == "voc":
        corners = "<xmin>6</xmin><ymin>6</ymin><xmax>20</xmax><ymax>15</ymax>"
        content = f"<filename>a.png</filename><object><name>cell</name><bndbox>{corners}</bndbox></object>"
        (folder / "images" / "a.xml").write_text(f"<annotation>{content}</annotation>")
        return folder / "images"
    if kind == "coco":
        file, content = (
            folder / "coco.json",
            {
                "images": [{"id": 1, "file_name": "a.png"}],
                "categories": [{"id": 4, "name": "cell"}],
                "annotations": [{"id": 2, "image_id": 1, "category_id": 4, "bbox": [5, 5, 15, 10], "segmentation": []}],
            },
        )
    elif kind == "labelme":
        shape = {"label": "cell", "points": [[20, 5], [5, 15]], "shape_type": "rectangle"}
        file, content = folder / "images" / "a.json", {"shapes": [shape], "imagePath": "a.png"}
    else:
        value = {"x": 500 / WIDTH, "y": 12.5, "width": 1500 / WIDTH, "height": 25, "rectanglelabels": ["cell"]}
        result = [{"original_width": WIDTH, "original_height": HEIGHT, "value": value}]
        file, content = folder / "ls.json", [{"data": {"image": "a.png"}, "annotations": [{"result": result}]}]
    file.write_text(json.dumps(content))
    return file.parent


@pytest.mark.parametrize("kind", ["cvat", "yolo", "voc", "coco", "labelme", "label-studio"])
def test_boxes_of_all_formats(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    found = find_examples(write_boxes(tmp_path, kind)).label_map(0)
    ((label, corners, rest),) = found.boxes
    assert (label, rest) == (1, 0)
    assert corners == pytest.approx(BOX.corners)
    assert torch.equal(found.labels, mask(5, 5, 20, 15) * 255)
    assert "1 box" in caplog.text


def test_other_regions_are_drawn_over_boxes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shapes = [
        '<polygon label="cell" points="0,0;10,0;10,10;0,10"></polygon>',
        '<box label="dog" xtl="5" ytl="5" xbr="20" ybr="15"></box>',
        '<box label="dog" xtl="90" ytl="5" xbr="99" ybr="15"></box>',
    ]
    found = find_examples(cvat(tmp_path, "".join(shapes)))
    (inside,) = found.label_map(0).boxes
    assert inside.corners == BOX.corners
    expected = torch.where(mask(0, 0, 10, 10) == 1, 2, mask(5, 5, 20, 15) * 255)
    assert torch.equal(found.labels(0).int(), expected.int())
    assert "skipped 1 of 3 annotations" in caplog.text


def test_boxes_are_renamed_and_ignored_with_their_classes(tmp_path: Path) -> None:
    write_boxes(tmp_path, "yolo")
    for name, label in (("background: other\ncell: blob", 1), ("cell: null", None)):
        (tmp_path / "map.yaml").write_text(name)
        found = find_examples(tmp_path, classes=tmp_path / "map.yaml", label_format="yolo").label_map(0)
        assert [box.label for box in found.boxes] == ([] if label is None else [label])
        assert set(found.labels[5:15, 5:20].unique().tolist()) == {255}


def test_points_are_strokes(tmp_path: Path) -> None:
    point = '<points label="dog" points="10,10"></points><points label="cell" points="90,1;30,20.5"></points>'
    alone = find_examples(cvat(tmp_path / "alone", point)).labels(0)
    assert (alone[10, 10], alone[20, 30], alone[0, 0]) == (1, 2, 255)  # points do not show where objects end
    assert int((alone != 255).sum()) < 12
    polygon = '<polygon label="dog" points="0,0;20,0;20,20;0,20"></polygon>'
    beside = find_examples(cvat(tmp_path / "beside", point + polygon)).labels(0)
    assert (beside[10, 10], beside[20, 30], beside[30, 30]) == (1, 2, 0)
