"""Detection from the command line, on images and weights on disk."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rich.console import Console
from tests.commands import Commands
from transformers import AutoImageProcessor, YolosForObjectDetection

import cribo.evaluation.detection.protocol as detection_training
from cribo.cli import main
from cribo.data import read_image
from cribo.data.labelled.detection import open_detection
from cribo.evaluation import read_result
from cribo.evaluation.config import TrainingRuntime
from cribo.evaluation.detection.config import DetectionData
from cribo.evaluation.detection.detector import Detector
from cribo.evaluation.detection.model import build_yolos
from cribo.evaluation.detection.views import Collate, Sample, Sizes, WholeViews
from cribo.evaluation.training import fit
from cribo.models import Backbone, normalise, save_backbone


@pytest.fixture
def backbone(tiny_vit: Callable[..., Backbone], tmp_path: Path) -> Path:
    save_backbone(tiny_vit(), tmp_path / "mine")
    return tmp_path / "mine"


@pytest.fixture
def words(rectangles: Path, backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the arguments of a command with two steps."""
    monkeypatch.chdir(tmp_path)
    return [
        *("evaluate", "detection", "--backbone", str(backbone), "--data", str(rectangles), "--schedule", "short"),
        *("--epochs", "2", "--batch_size", "4", "--size", "48", "--tokens", "6"),
        *("--runtime.workers", "0", "--runtime.accelerator", "cpu", "--runtime.threads", "1"),
    ]


def test_an_evaluation_writes_results_boxes_pictures_and_a_detector(
    words: list[str], rectangles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--out", "result", "--pictures", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(name in said for name in ("AP [%]", "AP50 [%]", "AP75 [%]", "red", "green", "Object detection on set"))
    result = read_result("result")
    (row,) = result.results
    assert row["learning_rate"] == 2e-4
    assert 0 <= row["ap"] <= row["ap50"] <= 1
    assert set(row["by_size"]) == {"small", "medium", "large"}
    assert set(row["per_class"]) == {"red", "green"}
    assert result.settings["epochs"] == 2
    assert result.data["train_images"] == result.data["val_images"] == 4
    assert result.data["val_boxes"] == 5
    assert result.backbone["fingerprint"]
    assert "transformers" in result.versions
    rows = json.loads(Path("result/detections.json").read_text())
    assert sorted({row["image_id"] for row in rows}) == [100, 101, 102, 103]
    assert len(rows) == 4 * 6
    assert {row["category_id"] for row in rows} <= {7, 90}
    assert Path("result/predictions.png").stat().st_size > 1000
    assert any(Path("result/tensorboard").iterdir())
    # transformers detects the same objects
    detector: Any
    processor: Any
    detector, processor = (
        kind.from_pretrained("result/detector") for kind in (YolosForObjectDetection, AutoImageProcessor)
    )
    image = read_image(rectangles / "images" / "val" / "0.png")
    with torch.no_grad():
        outputs = detector.eval()(**processor(image, return_tensors="pt"))
    (found,) = processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=[(48, 64)])
    expected = [row for row in rows if row["image_id"] == 100]
    torch.testing.assert_close(found["scores"], torch.tensor([row["score"] for row in expected]), atol=1e-4, rtol=0)
    left_top = torch.tensor([row["bbox"][:2] for row in expected])
    torch.testing.assert_close(found["boxes"][:, :2], left_top, atol=0.02, rtol=0)


class Unchanged(WholeViews):
    """Whole images, also in training."""

    def __getitem__(self, key: Any) -> Sample:
        return super().__getitem__(key[1] if isinstance(key, tuple) else key)


def test_it_overfits_four_images(rectangles: Path, tiny_vit: Callable[..., Backbone], tmp_path: Path) -> None:
    splits = open_detection(rectangles)
    backbone = tiny_vit(embed_dim=64)
    model = build_yolos(backbone, splits.train.classes, positions=Sizes(64).positions, tokens=8)
    detector = Detector(model, 1e-3, steps=150, images=splits.val, mean=backbone.mean, std=backbone.std)
    views, collate = Unchanged(splits.train, Sizes(64)), Collate(8, backbone.mean)
    fit(
        detector,
        train=views,
        validation=views,
        collate=collate,
        batch_size=4,
        steps=150,
        seed=0,
        folder=tmp_path / "out",
        label="detection",
        runtime=TrainingRuntime(accelerator="cpu", workers=0, threads=1),
        console=Console(quiet=True),
    )
    ap50 = detector.precision["ap50"]
    assert ap50 is not None
    assert ap50 > 0.95


def test_boxes_are_equally_exact_in_mixed_precision(rectangles: Path, tiny_vit: Callable[..., Backbone]) -> None:
    images = open_detection(rectangles).val
    backbone = tiny_vit()
    model = build_yolos(backbone, images.classes, positions=(48, 64), tokens=8)
    detector = Detector(model, 1e-3, steps=1, images=images, mean=backbone.mean, std=backbone.std)
    pixels = images.load(0)[None]
    with torch.no_grad():
        exact = detector(pixels)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = detector(pixels)
    expected = model(normalise(pixels / 255, mean=backbone.mean, std=backbone.std))
    torch.testing.assert_close(exact, (expected.logits, expected.pred_boxes))
    torch.testing.assert_close(mixed, exact, atol=0.02, rtol=0)
    for part in mixed:
        assert part.dtype == torch.float32
        assert not torch.equal(part, part.bfloat16().float())


class Killed(Exception):
    pass


class KillAfter(L.Callback):
    """Abort the training like a crash."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step:
            raise Killed


def test_a_killed_training_resumes_with_identical_results(
    words: list[str], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*words, "--epochs", "4", "--runtime.checkpoint_every", "1", "--pictures", "0"]
    assert main([*words, "--out", "whole"]) == 0
    with monkeypatch.context() as patched:
        patched.setattr(detection_training, "fit", lambda *a, **k: fit(*a, **k, callbacks=[KillAfter(2)]))
        with pytest.raises(Killed):
            main([*words, "--out", "killed", "--resume"])
    assert not Path("killed/results.json").exists()
    assert "already exists" in refused(*words, "--out", "killed")
    said = refused(*words, "--out", "killed", "--resume", "--learning_rate", "0.1")
    assert "cannot be resumed: settings.learning_rate was 0.0002, is 0.1" in said
    assert main([*words, "--out", "killed", "--resume"]) == 0
    assert read_result("killed").results == read_result("whole").results
    assert Path("killed/detections.json").read_bytes() == Path("whole/detections.json").read_bytes()
    before = Path("killed/results.json").stat().st_mtime_ns
    assert main([*words, "--out", "killed", "--resume"]) == 0  # finished: no-op
    assert Path("killed/results.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_two_processes_score_each_image_once_and_one_prints(words: list[str], commands: Commands) -> None:
    words = [*words, "--epochs", "1", "--pictures", "0", "--limit", "3", "--tokens", "1"]
    begun = commands.fork_all(2, *words, "--out", Path("two").absolute())
    for each in begun:
        assert each.wait(900) == 0, each.output
    output = "".join(each.output for each in begun)
    rows = json.loads(Path("two/detections.json").read_text())
    assert sorted({row["image_id"] for row in rows}) == [100, 101, 102]
    assert len(rows) == 3
    assert output.count("AP50") == 1
    assert output.count("increase --tokens to detect all of them") == 1


def test_it_trains_in_16_bits(words: list[str]) -> None:
    assert main([*words, "--epochs", "1", "--out", "b", "--pictures", "0", "--runtime.precision", "bf16-mixed"]) == 0
    assert read_result("b").settings["precision"] == "bf16-mixed"


def test_checkpointing_does_not_change_the_result(words: list[str]) -> None:
    words = [*words, "--pictures", "0"]
    assert main([*words, "--out", "plain"]) == 0
    assert main([*words, "--out", "again", "--checkpointing"]) == 0
    assert read_result("again").results == read_result("plain").results


# ------------------------------------------------------------------ errors of users


def test_unsupported_backbones(words: list[str], refused: Callable[..., str]) -> None:
    said = refused(*words, "--backbone", "resnet18", "--pretrained", "false")
    assert "YOLOS cannot be built on resnet18: it is not a plain vision transformer; choose" in said
    assert "mean-colour is not a network and cannot be finetuned as a detector: choose" in refused(
        *words, "--backbone", "mean-colour"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--size", "16"), "size must be >= 32, 4 patches of 8 pixels, got 16"),
        (("--epochs", "0"), "epochs must be >= 1, got 0"),
        (("--limit", "0"), "limit must be >= 1, got 0"),
        (("--pictures", "-1"), "pictures must be >= 0, got -1"),
        (("--learnin_rate", "1"), "did you mean learning_rate?"),
        (("--overwrite",), "--overwrite requires --out"),
        (("--data", "nowhere"), "there is no 'nowhere'"),
        (("--data.val_annotations", "nowhere.json"), "there is no 'nowhere.json'"),
    ],
)
def test_invalid_options(words: list[str], refused: Callable[..., str], given: tuple[str, ...], said: str) -> None:
    assert said in refused(*words, *given)


def test_invalid_annotations(words: list[str], refused: Callable[..., str], rectangles: Path) -> None:
    file = rectangles / "instances_val.json"
    content = json.loads(file.read_text())
    content["annotations"][0]["bbox"][2] = -4
    file.write_text(json.dumps(content))
    said = refused(*words)
    assert "annotation 1 must be left, top, width and height in pixels" in said
    assert str(file) in said


def test_training_images_without_boxes_are_refused(
    words: list[str], refused: Callable[..., str], rectangles: Path
) -> None:
    content = json.loads((rectangles / "instances_train.json").read_text())
    for annotation in content["annotations"]:
        annotation["image_id"] = 103
    (rectangles / "instances_train.json").write_text(json.dumps(content))
    assert "got none in 1 images" in refused(*words, "--limit", "1")


def test_more_objects_than_tokens_are_reported(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*words, "--tokens", "1", "--epochs", "1", "--pictures", "0", "--out", "result"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "an image has 2 boxes, but at most 1 can be detected per image: increase --tokens" in said


def test_broken_images_are_named(words: list[str], rectangles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(rectangles / "instances_val.json", rectangles / "images" / "train" / "2.png")
    assert main([*words, "--out", "result"]) != 0
    said = capsys.readouterr().err
    assert "2.png" in said
    assert "Traceback" not in said


def test_help_gives_advice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", "detection", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "quick trial: --schedule short --limit 20 --epochs 2" in said
    assert "[2.5e-5, short:" in said


def test_images_of_a_set_are_found_from_python(rectangles: Path) -> None:
    data = DetectionData(str(rectangles), limit=2)
    splits = data.open()
    assert [splits.train.name(index) for index in range(2)] == ["0.png", "2.png"]
    assert len(open_detection(rectangles).train) == 4
