"""End-to-end linear segmentation."""

import json
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from PIL import Image
from tests.commands import Commands

from cribo.base.errors import ConfigError, DataError, FolderError
from cribo.cli import main
from cribo.evaluation import evaluate, read_result
from cribo.evaluation.config import TrainingRuntime
from cribo.evaluation.data import SegmentationData
from cribo.evaluation.segmentation.linear import Linear
from cribo.features import BackboneSource

from .conftest import command
from .squares import Squares

CPU = {"accelerator": "cpu", "workers": 0, "threads": 1}


def config(folder: Path, *, backbone: Any = None, data: Any = None, runtime: Any = None, **changes: Any) -> Any:
    """Return the arguments of `evaluate`."""
    settings: dict[str, Any] = {"iterations": 12, "batch_size": 4, "crop": 64, "learning_rates": (0.1, 1e-4)}
    return (
        Linear(**(settings | changes)),
        backbone or BackboneSource(str(folder / "network")),
        data or SegmentationData("folder", str(folder)),
        runtime or TrainingRuntime(**CPU),
    )


def words(folder: Path, out: Path, *more: str) -> list[str]:
    """Return the arguments of a command with the settings of `config`."""
    return command("linear", folder, out, "--iterations", "12", "--learning_rates", "0.1,1e-4", *more)


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an uninterrupted evaluation."""
    made = config(folder, runtime=TrainingRuntime(**CPU, checkpoint_every=5))
    return evaluate(*made, out=tmp_path_factory.mktemp("whole") / "out", pictures=0)[1]


def heads(out: Path) -> dict[str, torch.Tensor]:
    (last,) = sorted(out.glob("checkpoints/*.ckpt"))[-1:]
    return torch.load(last, weights_only=True)["state_dict"]


def test_an_evaluation_writes_all_its_files(folder: Path, tmp_path: Path) -> None:
    result, out = evaluate(*config(folder, iterations=60), out=tmp_path / "out", pictures=2)
    assert out == tmp_path / "out"
    assert read_result(out) == result
    assert (result.evaluation, result.varies, result.metrics) == ("linear", "learning_rate", ["miou"])
    assert [row["learning_rate"] for row in result.results] == [0.1, 1e-4]
    good, bad = result.results
    assert good["miou"] > 0.8 > bad["miou"]
    assert good["pixel_accuracy"] > 0.9
    assert list(good["per_class"]) == list(Squares().classes)
    assert sum(map(sum, good["confusion"])) == 2 * 128 * 192
    assert "confusion" not in bad
    assert (result.data["train"], result.data["val"]) == ("train", "val")
    assert (result.data["train_images"], result.data["val_images"]) == (4, 2)
    assert result.settings["layers"] == 1
    assert result.settings["iterations"] == 60
    for name in ("confusion.png", "miou.png", "predictions.png"):
        assert (out / name).is_file()
    assert sorted(heads(out)) == [f"heads.{number}.{name}" for number in (0, 1) for name in ("bias", "weight")]


def test_layers_and_windows(folder: Path, tmp_path: Path) -> None:
    backbone = BackboneSource(str(folder / "network"), layers=2)
    made = config(folder, backbone=backbone, iterations=2, inference="slide")
    result, out = evaluate(*made, out=tmp_path / "out", pictures=0)
    assert (result.settings["layers"], result.settings["stride"]) == (2, 60)
    assert heads(out)["heads.0.weight"].shape == (4, 64)
    assert sum(map(sum, result.results[0].get("confusion") or result.results[1]["confusion"])) == 2 * 128 * 192


def test_the_mean_colour_is_a_baseline(folder: Path, tmp_path: Path) -> None:
    made = config(folder, backbone=BackboneSource("mean-colour"), iterations=100)
    result, _ = evaluate(*made, out=tmp_path / "out", pictures=0)
    assert result.backbone["name"] == "mean-colour"
    assert result.results[0]["miou"] > 0.8  # squares differ only in colour


def test_bf16(folder: Path, tmp_path: Path) -> None:
    runtime = TrainingRuntime(**CPU, precision="bf16-mixed")
    result, _ = evaluate(*config(folder, iterations=60, runtime=runtime), out=tmp_path / "out", pictures=1)
    assert result.results[0]["miou"] > 0.8


def test_a_killed_evaluation_resumes_with_identical_results(
    folder: Path, whole: Path, tmp_path: Path, commands: Commands
) -> None:
    stopped = tmp_path / "stopped"
    command = words(folder, stopped, "--runtime.checkpoint_every", "5", "--pictures", "0", "--resume")
    # Killed while it writes the curves of step 8, before it can save.
    killing = (
        "import signal\n"
        "from cribo.evaluation.segmentation.linear import LinearSegmentation\n"
        "step = LinearSegmentation.training_step\n"
        "def killed(self, batch, batch_idx):\n"
        "    if self.global_step == 7: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return step(self, batch, batch_idx)\n"
        "LinearSegmentation.training_step = killed\n"
    )
    begun = commands.fork(*command, prelude=killing)
    assert begun.wait(900) == -signal.SIGKILL, begun.output
    assert [path.name for path in stopped.glob("checkpoints/*.ckpt")] == ["step=00000005.ckpt"]
    assert main(command) == 0
    for name, value in heads(stopped).items():
        assert torch.equal(value, heads(whole)[name])
    assert read_result(stopped).results == read_result(whole).results
    before = (stopped / "results.json").stat().st_mtime_ns
    assert main(command) == 0  # finished: no-op
    assert (stopped / "results.json").stat().st_mtime_ns == before


def test_an_evaluation_killed_at_its_pictures_is_not_finished(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(folder, iterations=1)
    with monkeypatch.context() as patched:
        patched.setattr("cribo.evaluation.runner.write_pictures", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            evaluate(*made, out=tmp_path / "out", pictures=1)
    evaluate(*made, out=tmp_path / "out", resume=True, pictures=1)
    assert (tmp_path / "out" / "predictions.png").is_file()


@pytest.mark.parametrize("evaluation", ["linear", "segmenter"])
def test_only_rank_0_prints(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], evaluation: str
) -> None:
    command = ["evaluate", evaluation, "--backbone", str(folder / "network"), "--data", "folder"]
    command += ["--data.root", str(folder), "--crop", "24", "--out", str(tmp_path / "out")]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(command) == 2  # after the backbone has been loaded and described
    assert capsys.readouterr().out == ""


def test_other_settings_are_not_resumed(folder: Path, tmp_path: Path) -> None:
    evaluate(*config(folder, iterations=1), out=tmp_path / "out", pictures=0)
    with pytest.raises(FolderError, match=r"cannot be resumed: settings\.iterations was 1, is 2"):
        evaluate(*config(folder, iterations=2), out=tmp_path / "out", resume=True, pictures=0)
    with pytest.raises(FolderError, match="--overwrite"):
        evaluate(*config(folder, iterations=1), out=tmp_path / "out", pictures=0)


@pytest.mark.slow
def test_two_processes_give_the_result_of_one(folder: Path, whole: Path, tmp_path: Path, commands: Commands) -> None:
    for begun in commands.fork_all(2, *words(folder, tmp_path / "two", "--pictures", "1")):
        assert begun.wait(900) == 0, begun.output
    for name, value in heads(tmp_path / "two").items():
        assert torch.allclose(value, heads(whole)[name], atol=1e-4)
    for row, other in zip(read_result(tmp_path / "two").results, read_result(whole).results, strict=True):
        assert row["miou"] == pytest.approx(other["miou"], abs=0.01)
    counted = next(row["confusion"] for row in read_result(tmp_path / "two").results if "confusion" in row)
    assert sum(map(sum, counted)) == 2 * 128 * 192  # each image once
    assert (tmp_path / "two" / "predictions.png").is_file()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"backbone": BackboneSource("NETWORK", layers=4)}, ConfigError, "layers must be 1 to 2, the blocks of"),
        ({"crop": 24}, ConfigError, "crop must be a multiple of the patch size"),
        ({"data": SegmentationData("folder", "ROOT", train="trian")}, DataError, "there is no .trian. in .*images"),
        ({"data": SegmentationData("camvid", "ROOT")}, DataError, "must list the classes of CamVid in order"),
        ({"data": SegmentationData("voc")}, ConfigError, "data.root is required"),
    ],
)
def test_invalid_settings_are_refused_before_a_folder_is_created(
    folder: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    for part in changes.values():
        if isinstance(part, BackboneSource) and part.source == "NETWORK":
            part.source = str(folder / "network")
        if isinstance(part, SegmentationData) and part.root == "ROOT":
            part.root = str(folder)
    with pytest.raises(error, match=message):
        evaluate(*config(folder, **changes), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_labels_that_are_all_ignored(folder: Path, tmp_path: Path) -> None:
    for kind in ("images", "labels"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "val").symlink_to(folder / kind / "val")
    (tmp_path / "classes.txt").write_text("\n".join(Squares().classes), encoding="utf-8")
    (tmp_path / "images" / "train").symlink_to(folder / "images" / "train")
    (tmp_path / "labels" / "train").mkdir()
    for index in range(4):
        Image.new("L", (192, 128), 255).save(tmp_path / "labels" / "train" / f"{index}.png")
    data = SegmentationData("folder", str(tmp_path))
    with pytest.raises(DataError, match="all labels of the 4 images of train are ignored"):
        evaluate(*config(folder, data=data), out=tmp_path / "out")


def test_a_feature_map_has_one_layer(folder: Path, tmp_path: Path) -> None:
    backbone = BackboneSource("resnet18", pretrained=False, layers=4)
    with pytest.raises(ConfigError, match="resnet18 returns one feature map, so layers must be 1, got 4"):
        evaluate(*config(folder, backbone=backbone), out=tmp_path / "out")


def test_the_command_prints_tables_and_places(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = words(folder, tmp_path / "o", "--schedule", "short", "--iterations", "2", "--limit", "1")
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "Linear segmentation (paper) on" in printed
    assert "best         mIoU" in printed
    content = json.loads((tmp_path / "o" / "results.json").read_text())
    assert content["command"].startswith("cribo evaluate linear --backbone")
    assert content["data"]["limit"] == 1
    assert main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*command, "--learning_rates", "[]"]) == 2
    assert "learning_rates must be distinct numbers" in capsys.readouterr().err
