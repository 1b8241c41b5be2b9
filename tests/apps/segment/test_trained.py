"""Images are labelled with a trained segmenter."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cribo.apps.segment.config import SegmenterConfig
from cribo.apps.segment.trained import SegmenterLabeller, apply_segmenter
from cribo.base.errors import FolderError, InputError
from cribo.cli import main
from cribo.data.labelled.inputs import DecodedImage
from cribo.data.reading import read_image
from cribo.evaluation.segmentation.inference import Inference
from cribo.evaluation.segmentation.segmenter import MaskTransformer, Segmenter
from cribo.evaluation.segmentation.trained import SEGMENTER_FILE, TrainedSegmenter, load_segmenter, save_segmenter
from cribo.models import build_backbone

CLASSES = ("sky", "road", "tree")


def write_segmenter(path: Path, seed: int = 0) -> None:
    """Write a small segmenter with random weights and sliding-window inference."""
    args = {"depth": 1, "embed_dim": 32, "num_heads": 2}
    backbone = build_backbone("vit_tiny_patch16_224", args=args, image_size=32, seed=seed)
    torch.manual_seed(seed)
    network = Segmenter(backbone, MaskTransformer(32, len(CLASSES), layers=1)).eval()
    inference = Inference("slide", window=64, stride=48)
    save_segmenter(TrainedSegmenter(network, CLASSES, ((9, 8, 7),), (96, 80), inference), path)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an evaluation, three images, and one that is unreadable."""
    monkeypatch.chdir(tmp_path)
    for folder in ("scored", "frames/street"):
        Path(folder).mkdir(parents=True)
    write_segmenter(Path("scored", SEGMENTER_FILE))
    random = np.random.default_rng(0)
    for name, size in (("a", (90, 70)), ("street/b", (64, 120)), ("street/c", (40, 40))):
        coarse = random.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize(size).save(f"frames/{name}.png")
    Path("frames/torn.png").write_bytes(Path("frames/a.png").read_bytes()[:200])
    return tmp_path


def labels(folder: str, name: str) -> np.ndarray:
    return np.array(Image.open(f"{folder}/labels/{name}.png"))


def config(**options: object) -> SegmenterConfig:
    return SegmenterConfig(**{"segmenter": "scored", "images": "frames", "device": "cpu", "workers": 0, **options})


@pytest.mark.parametrize("segmenter", ["scored", f"scored/{SEGMENTER_FILE}"])
@pytest.mark.usefixtures("here")
def test_labels_equal_those_in_python(segmenter: str) -> None:
    words = ("--segmenter", segmenter, "--device", "cpu", "--out", "out", "--write", "coco")
    assert main(["segment", "frames", *words]) == 0
    trained, found = load_segmenter(segmenter), set()
    for name in ("a", "street/b", "street/c"):
        expected = trained.segment(read_image(f"frames/{name}.png")).numpy()
        np.testing.assert_array_equal(labels("out", name), expected)
        found |= {*np.unique(expected)}
        confidence = np.array(Image.open(f"out/confidence/{name}.png"))
        assert confidence.shape == expected.shape
        assert confidence.min() >= 255 // len(CLASSES)
    assert len(found) > 1
    assert {"contact.png", "coco.json", "about.json", "overlays"} <= {path.name for path in Path("out").iterdir()}
    with Path("out/summary.csv").open() as file:
        rows = {row["image"]: row for row in csv.DictReader(file)}
    assert float(rows["a.png"]["road"]) == pytest.approx(np.mean(labels("out", "a") == 1), abs=1e-5)
    assert rows["torn.png"]["error"]
    assert not rows["a.png"]["error"]
    assert tuple(Image.open("out/labels/a.png").getpalette()[:3]) == (9, 8, 7)  # pyright: ignore[reportOptionalSubscript]


@pytest.mark.usefixtures("here")
def test_the_confidence_is_the_softmax() -> None:
    """The confidence of an image that fits in one window is the softmax of the network."""
    trained = load_segmenter("scored")
    whole = TrainedSegmenter(trained.network, CLASSES, trained.palette, None, Inference())
    image = torch.randint(0, 256, (3, 64, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    backbone = trained.network.backbone
    mean, std = (torch.tensor(values)[:, None, None] for values in (backbone.mean, backbone.std))
    with torch.no_grad():
        logits = trained.network(((image / 255 - mean) / std)[None])
    expected, classes = (
        torch.nn.functional.interpolate(logits, size=(64, 48), mode="bilinear").softmax(dim=1).max(dim=1)
    )
    (found,) = SegmenterLabeller(whole).compute([DecodedImage(image)])
    assert torch.equal(found.found.labels, classes[0].byte())
    torch.testing.assert_close(found.found.confidence, expected[0])


@pytest.mark.usefixtures("here")
def test_results_are_resumed() -> None:
    first = apply_segmenter(config(), out=Path("out"))
    assert (first.images, first.reused, [*first.skipped]) == (3, 0, ["torn.png"])
    kept = {path: path.stat().st_mtime_ns for path in Path("out/labels").rglob("*.png")}
    Image.new("RGB", (50, 40), "red").save("frames/new.png")
    Image.new("RGB", (50, 40), "blue").save("frames/a.png")
    Path("frames/street/c.png").unlink()
    with pytest.raises(FolderError, match="--resume"):
        apply_segmenter(config(), out=Path("out"))
    again = apply_segmenter(config(), out=Path("out"), resume=True)
    assert (again.images, again.reused, again.earlier) == (3, 1, 1)
    unchanged = {path.stem for path, time in kept.items() if path.stat().st_mtime_ns == time}
    assert unchanged == {"b", "c"}
    assert labels("out", "a").shape == (40, 50)


@pytest.mark.usefixtures("here")
def test_results_of_another_segmenter_are_not_resumed() -> None:
    apply_segmenter(config(), out=Path("out"))
    write_segmenter(Path("scored", SEGMENTER_FILE), seed=1)
    with pytest.raises(FolderError, match="segmenter"):
        apply_segmenter(config(), out=Path("out"), resume=True)


@pytest.mark.usefixtures("here")
def test_a_missing_or_damaged_segmenter_leaves_no_results() -> None:
    with pytest.raises(FileNotFoundError, match="cribo evaluate segmenter"):
        apply_segmenter(config(segmenter="frames"), out=Path("out"))
    file = Path("scored", SEGMENTER_FILE)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match=SEGMENTER_FILE):
        apply_segmenter(config(), out=Path("out"))
    assert not Path("out").exists()
