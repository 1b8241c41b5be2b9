"""Object discovery from the command line, on images with known objects."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from cribo.base.errors import DataError, InputError, MissingData
from cribo.cli import main
from cribo.data.labelled.voc import VocBoxes, is_voc
from cribo.evaluation import Discovery, DiscoveryData, EvaluationRuntime, evaluate, read_result
from cribo.evaluation.discovery import protocol as discovery
from cribo.models import build_backbone, normalise

# Left, top, right and bottom in pixels; the annotation of the third image is at another place.
OBJECTS = [(32, 16, 80, 48), (16, 32, 48, 80), (64, 64, 112, 80)]
ANNOTATED = [OBJECTS[0], OBJECTS[1], (0, 0, 32, 32)]
RUN = ("--cache", "none", "--devices", "cpu", "--runtime.workers", "0")


def write_images(folder: Path) -> None:
    """Write blue rectangles on yellow, whose normalised colours are opposite vectors."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number, (left, top, right, bottom) in enumerate(OBJECTS):
        pixels = np.full((88, 120, 3), (220, 210, 40))
        pixels[top:bottom, left:right] = (30, 20, 200)
        noisy = pixels + generator.integers(-10, 10, pixels.shape)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.jpg", quality=95)


@pytest.fixture
def coco(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "set"
    write_images(root / "images" / "val")
    boxes = [[left, top, right - left, bottom - top] for left, top, right, bottom in ANNOTATED]
    content = {
        "images": [{"id": number, "file_name": f"{number}.jpg", "height": 88, "width": 120} for number in range(3)],
        "annotations": [{"id": k, "image_id": k, "category_id": 1, "bbox": box} for k, box in enumerate(boxes)],
        "categories": [{"id": 1, "name": "thing"}],
    }
    (root / "instances_val.json").write_text(json.dumps(content))
    return root


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    root = tmp_path / "VOC2007"
    write_images(root / "JPEGImages")
    (root / "Annotations").mkdir()
    (root / "ImageSets" / "Main").mkdir(parents=True)
    (root / "ImageSets" / "Main" / "trainval.txt").write_text("0\n1\n2\n")
    for number, (left, top, right, bottom) in enumerate(ANNOTATED):
        box = f"<xmin>{left + 1}</xmin><ymin>{top + 1}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax>"
        thing = f"<object><name>thing</name><difficult>1</difficult><bndbox>{box}</bndbox></object>"
        (root / "Annotations" / f"{number}.xml").write_text(f"<annotation>{thing}</annotation>")
    return root


@pytest.mark.parametrize("layout", ["coco", "voc"])
def test_objects_are_found(layout: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    root, out = request.getfixturevalue(layout), tmp_path / "result"
    assert (
        main(["evaluate", "discovery", "--backbone", "mean-colour", "--data", str(root), "--out", str(out), *RUN]) == 0
    )
    result = read_result(out)
    assert [row["method"] for row in result.results] == ["lost", "tokencut"]
    for row in result.results:
        assert (row["corloc"], row["found"]) == (pytest.approx(2 / 3), 2)
        boxes = json.loads((out / "boxes.json").read_text())[row["method"]]
        assert boxes == {f"{number}.jpg": list(map(float, box)) for number, box in enumerate(OBJECTS)}
    assert (result.data["split"], result.settings["features"]) == ("val" if layout == "coco" else "trainval", "tokens")
    assert sorted(path.name for path in out.glob("*.png")) == ["corloc.png", "objects.png"]


def test_boxes_of_resized_images(coco: Path, tmp_path: Path) -> None:
    settings = Discovery(methods=("tokencut",), size=240)
    runtime = EvaluationRuntime(devices=("cpu",), workers=0, cache="none")
    _, folder = evaluate(settings, "mean-colour", DiscoveryData(str(coco)), runtime, out=tmp_path / "out")
    boxes = json.loads((folder / "boxes.json").read_text())["tokencut"]
    assert boxes == {f"{number}.jpg": list(map(float, box)) for number, box in enumerate(OBJECTS)}


def test_images_found_as_a_whole_are_counted_with_a_warning(coco: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = DiscoveryData(str(coco)), EvaluationRuntime(devices=("cpu",), workers=0, cache="none")
    result, _ = evaluate(Discovery(threshold=-0.9999), "mean-colour", *run, pictures=0)
    assert {row["method"]: row["whole_image"] for row in result.results} == {"lost": 0, "tokencut": 3}
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.startswith("tokencut found the whole image in 3 of 3 images, since the tokens of their patches")
    assert warning.endswith("Use another --threshold")
    caplog.clear()
    evaluate(Discovery(), "mean-colour", *run, pictures=0)
    assert not caplog.records


def test_an_iou_of_a_half_counts_as_found(coco: Path) -> None:
    content = json.loads((coco / "instances_val.json").read_text())
    run = DiscoveryData(str(coco)), EvaluationRuntime(devices=("cpu",), workers=0, cache="none")
    for height, found in ((64, 2), (65, 1)):  # 32 of which are the object of the first image
        content["annotations"][0]["bbox"] = [32, 16, 48, height]
        (coco / "instances_val.json").write_text(json.dumps(content))
        result, _ = evaluate(Discovery(methods=("lost",)), "mean-colour", *run, pictures=0)
        assert result.results[0]["found"] == found


@pytest.mark.parametrize("kind", ["queries", "keys", "values"])
def test_keys_are_taken_from_the_last_layer(kind: str) -> None:
    args = {"patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
    backbone = build_backbone("vit_tiny_patch16_224", args=args, image_size=32, seed=0).eval()
    pixels = torch.randint(0, 256, (3, 30, 43), dtype=torch.uint8)
    with torch.no_grad():
        found, grid = discovery._features(backbone, pixels, kind, "it")
        image = torch.zeros(1, 3, 32, 48)  # padded with the mean colour
        image[..., :30, :43] = normalise(pixels[None] / 255, mean=backbone.mean, std=backbone.std)
        model = backbone.model
        tokens = model.forward_intermediates(image, indices=[0], output_fmt="NLC", return_prefix_tokens=True)[1][0]
        before = model.blocks[1].norm1(torch.cat((tokens[1], tokens[0]), dim=1))
        heads = model.blocks[1].attn.qkv(before).reshape(1, -1, 3, 2, 16).permute(2, 0, 1, 3, 4)
    assert grid == (4, 6)
    expected = heads[["queries", "keys", "values"].index(kind), 0, 1:].reshape(24, 32)
    torch.testing.assert_close(found, expected)


def test_voc_boxes_start_at_zero(voc: Path) -> None:
    assert is_voc(voc)
    images = VocBoxes(voc, "trainval")
    assert images.boxes(0).corners.tolist() == [list(map(float, ANNOTATED[0]))]
    assert images.classes == ["thing"]
    assert images.subset([2]).boxes(0).corners.tolist() == [list(map(float, ANNOTATED[2]))]


def test_a_damaged_voc_is_refused(voc: Path) -> None:
    with pytest.raises(MissingData, match="did you mean 'trainval"):
        VocBoxes(voc, "trainvl")
    (voc / "Annotations" / "1.xml").write_text("<annotation><object><name>x</name></object></annotation>")
    with pytest.raises(DataError, match=r"1\.xml is not an annotation of Pascal VOC"):
        VocBoxes(voc, "trainval")
    (voc / "Annotations" / "1.xml").unlink()
    with pytest.raises(MissingData, match=r"1 of the 3 images of .* have no \.xml file in .*, the first is 1"):
        VocBoxes(voc, "trainval")
    (voc / "ImageSets" / "Main" / "trainval.txt").write_text("\n")
    with pytest.raises(DataError, match="lists no images"):
        VocBoxes(voc, "trainval")


def test_images_without_objects_are_excluded(coco: Path) -> None:
    file = coco / "instances_val.json"
    content = json.loads(file.read_text())
    content["annotations"] = content["annotations"][:2]
    content["annotations"][1]["iscrowd"] = 1
    file.write_text(json.dumps(content))
    splits = DiscoveryData(str(coco)).open()
    assert [splits.val.name(index) for index in range(len(splits.val))] == ["0.jpg"]
    assert splits.about["images_without_objects"] == 2
    content["annotations"] = content["annotations"][1:]
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="are crowds"):
        DiscoveryData(str(coco)).open()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--methods", "lost,lost"), "methods must be distinct values of lost,tokencut, got lost,lost"),
        (("--methods", "ncut"), "methods must be distinct values of lost,tokencut, got ncut"),
        (("--threshold", "1"), "threshold must be > -1 and < 1, got 1.0"),
        (("--features", "keys"), "features must be tokens for mean-colour"),
        (("--candidates", "0"), "candidates must be >= 1"),
        (("--data.split", "test"), "split must be train or val, got 'test'"),
        (("--data", "nowhere"), "there is no 'nowhere'"),
        (("--backbone.layers", "2"), "layers must be 1"),
        (("--data.split", "train"), "set data.annotations to the file and data.images to the folder"),
    ],
)
def test_invalid_settings_are_refused_before_any_work(
    coco: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], reason: str
) -> None:
    assert main(["evaluate", "discovery", "--backbone", "mean-colour", "--data", "set", *RUN, *more]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())
    assert sorted(path.name for path in Path().iterdir()) == ["set"]


def test_a_size_that_a_network_does_not_support_is_refused() -> None:
    backbone = SimpleNamespace(takes_any_size=False, image_size=224, name="swin_tiny")
    with pytest.raises(InputError, match="size cannot be set for swin_tiny, which only accepts images of 224 x 224"):
        Discovery(size=448).prepare(SimpleNamespace(backbone=backbone))  # pyright: ignore[reportArgumentType]


def test_images_with_too_many_patches_are_refused(coco: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_MAX_PATCHES", 9)
    backbone = build_backbone("resnet18", args={"channels": (8, 8, 8, 8)}, seed=0)
    with pytest.raises(InputError, match=r"0\.jpg must have at most 9 patches, got 3 x 4: reduce --size to 96"):
        discovery.discover(backbone, DiscoveryData(str(coco)).open().val, Discovery(features="tokens"))
