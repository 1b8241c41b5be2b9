"""Labels read and written by the tools' own libraries, each in an environment of its own that uv creates."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from cribo.data.labelled.cvat import read_cvat
from cribo.data.labelled.formats import LABEL_FORMATS, find_examples
from cribo.data.labelled.label_maps import Labelling
from cribo.data.labelled.label_studio import decoded
from cribo.data.labelled.label_studio_writing import encoded
from cribo.data.labelled.regions import polygon, trace
from cribo.data.labelled.yolo import read_yolo

pytestmark = pytest.mark.slow

CLASSES = ["background", "cell", "dog"]
SIZE = (1080, 1440)
SECONDS = 600


def ask(package: str, code: str, *arguments: object) -> Any:
    """Return what the code prints as JSON, run with a package; skip if it cannot be installed."""
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed")
    command = ["uv", "run", "--quiet", "--no-project", "--isolated", "--with", package, "python"]
    there = subprocess.run([*command, "-c", "print(1)"], capture_output=True, text=True, timeout=SECONDS, check=False)
    if there.returncode:
        pytest.skip(f"{package} cannot be installed: {there.stderr[-300:]}")
    done = subprocess.run([*command, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def blobs() -> Tensor:
    """Return a map of large blobs without holes."""
    noise = ndimage.gaussian_filter(np.random.default_rng(3).random(SIZE), 100)
    found = np.digitize(noise, np.quantile(noise, [0.6, 0.85]))
    return torch.from_numpy(ndimage.binary_fill_holes(found > 0) * (1 + (found == 2))).to(torch.uint8)


def iou(found: np.ndarray, expected: np.ndarray) -> float:
    return float((found & expected).sum() / (found | expected).sum())


def write(name: str, folder: Path) -> tuple[Path, Tensor]:
    """Write an image and its labels in a format."""
    labels, row = blobs(), LABEL_FORMATS[name]
    (folder / "images" / "train").mkdir(parents=True)
    Image.new("RGB", (SIZE[1], SIZE[0])).save(folder / "images" / "train" / "a.jpg")
    assert row.write is not None
    place = folder if name == "yolo" else folder / row.written
    row.write(place, Labelling({"a.jpg": SIZE}, CLASSES, lambda _: labels))
    return place, labels


SUPERVISION = """
import json, sys
import numpy as np, supervision as sv

place, images, out = sys.argv[1:]
data = sv.DetectionDataset.from_yolo(images, place + "/labels/train", place + "/data.yaml", force_masks=True)
data.as_yolo(out + "/images", out + "/labels", out + "/data.yaml")
open(out + "/data.yaml", "a").write("train: images\\n")
data.as_coco(out + "/images", out + "/instances.json")
_, _, found = next(iter(data))
masks = {name: found.mask[found.class_id == label].any(axis=0) for label, name in enumerate(data.classes)}
np.savez(out + "/masks.npz", **masks)
print("0")
"""


def test_supervision_reads_and_writes_the_same_regions(tmp_path: Path) -> None:
    """It draws polygons with the pixels of their border, which ours do not contain."""
    place, labels = write("yolo", tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    ask("supervision==0.26.*", SUPERVISION, place, tmp_path / "images" / "train", out)
    regions = trace(labels.numpy(), (1, 2))
    expected = {
        name: np.any([polygon(each.rings[0])(*SIZE) for each in regions if each.label == label], axis=0)
        for label, name in enumerate(CLASSES[1:], start=1)
    }
    for name, drawn in np.load(out / "masks.npz").items():
        assert iou(drawn, expected[name]) >= 0.98
    for source in (out / "data.yaml", out / "instances.json"):
        found = find_examples(source)
        for label, name in enumerate(CLASSES[1:], start=1):
            assert iou(found.labels(0).numpy() == found.classes.index(name), labels.numpy() == label) >= 0.98


BRUSH = """
import json, sys
import numpy as np
from label_studio_sdk.converter import brush

mask, packed = map(np.array, json.loads(open(sys.argv[1]).read()))
theirs = brush.mask2rle((mask * 255).astype(np.uint8))
print(json.dumps([brush.decode_rle(packed.tolist()).tolist(), [int(each) for each in theirs]]))
"""


def test_label_studio_unpacks_our_strokes_and_we_its_own(tmp_path: Path) -> None:
    mask = blobs().numpy()[::9, ::9] == 1
    (tmp_path / "in.json").write_text(json.dumps([mask.astype(int).tolist(), encoded(mask)]))
    ours, theirs = ask("label-studio-sdk", BRUSH, tmp_path / "in.json")
    assert (np.array(ours).reshape(*mask.shape, 4) == 255 * mask[..., None]).all()
    assert ((decoded(theirs, 4 * mask.size).reshape(*mask.shape, 4)[..., 3] > 0) == mask).all()


LABELME = """
import json, sys
import numpy as np
from labelme import _label_file as files
from labelme import utils

ours, theirs, out = sys.argv[1:]
classes = {"_background_": 0, "cell": 1, "dog": 2}
found = files.read_label_file(ours)
shape = utils.img_data_to_arr(found.image_data).shape
drawn = {"ours": utils.shapes_to_label(shape, found.shapes, classes)[0]}
mask = np.zeros((40, 30), dtype=bool)
mask[5:35, 3:20] = True
shapes = [
    {"label": "cell", "points": [[100.0, 80.0], [700.5, 90.0], [640.0, 500.0]], "shape_type": "polygon"},
    {"label": "dog", "points": [[1000.0, 600.0], [1200.0, 650.0]], "shape_type": "circle"},
    {"label": "cell", "points": [[300.0, 700.0], [329.0, 739.0]], "shape_type": "mask", "mask": mask},
]
shapes = [{"group_id": None, "flags": {}, "description": "", "mask": None, **each} for each in shapes]
drawn["theirs"] = utils.shapes_to_label(shape, shapes, classes)[0]
shapes[2]["mask"] = utils.img_arr_to_b64(mask.astype(np.uint8))
options = {"shapes": shapes, "image_path": "a.jpg", "image_height": shape[0], "image_width": shape[1]}
files.write_label_file(theirs, **options)
np.savez(out, **drawn)
print("0")
"""


def test_labelme_reads_and_writes_the_same_regions(tmp_path: Path) -> None:
    place, labels = write("labelme", tmp_path)
    shutil.copy(tmp_path / "images/train/a.jpg", place)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    shutil.copy(tmp_path / "images/train/a.jpg", theirs)
    ask("labelme==6.3.*", LABELME, place / "a.json", theirs / "a.json", tmp_path / "drawn.npz")
    drawn = np.load(tmp_path / "drawn.npz")
    read = find_examples(theirs).labels(0).numpy()
    for label in (1, 2):
        assert iou(drawn["ours"] == label, labels.numpy() == label) >= 0.98
        assert iou(drawn["theirs"] == label, read == label) >= 0.98
    assert np.array_equal(drawn["theirs"][700:740, 300:330], read[700:740, 300:330])  # a mask, exactly


LABELFORMAT = """
import sys
from pathlib import Path
from labelformat.formats import CVATObjectDetectionOutput, YOLOv8ObjectDetectionInput

boxes = YOLOv8ObjectDetectionInput(Path(sys.argv[1]), input_split="train")
CVATObjectDetectionOutput(Path(sys.argv[2])).save(boxes)
print("0")
"""


def test_labelformat_writes_the_same_boxes(tmp_path: Path) -> None:
    """Its conversion from YOLO to CVAT keeps the boxes that we read."""
    (tmp_path / "images" / "train").mkdir(parents=True)
    (tmp_path / "labels" / "train").mkdir(parents=True)
    Image.new("RGB", (400, 200)).save(tmp_path / "images" / "train" / "a.jpg")
    (tmp_path / "labels" / "train" / "a.txt").write_text("1 0.5 0.5 0.25 0.5\n0 0.1 0.2 0.05 0.1\n")
    (tmp_path / "data.yaml").write_text(f"path: {tmp_path}\ntrain: images/train\nnames: [cell, dog]\n")
    ask("labelformat", LABELFORMAT, tmp_path / "data.yaml", tmp_path / "cvat")
    found = [read_yolo(tmp_path / "data.yaml"), read_cvat(tmp_path / "cvat" / "annotations.xml")]
    for read in found:
        regions = {region.label: region.box for region in read.images[0].regions}
        assert regions == {"dog": pytest.approx((150, 50, 250, 150)), "cell": pytest.approx((30, 30, 50, 50))}
    assert found[0].classes == found[1].classes == ["cell", "dog"]
