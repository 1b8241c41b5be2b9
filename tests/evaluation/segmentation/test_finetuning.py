"""End-to-end finetuning with Segmenter."""

import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.commands import Commands

from cribo.base.errors import ConfigError, FolderError
from cribo.cli import main
from cribo.data import open_segmentation
from cribo.evaluation import evaluate, read_result
from cribo.evaluation.config import TrainingRuntime
from cribo.evaluation.data import SegmentationData
from cribo.evaluation.segmentation.config import DecoderConfig
from cribo.evaluation.segmentation.finetuning import FinetunedSegmenter, build_segmenter
from cribo.evaluation.segmentation.trained import load_segmenter
from cribo.features import BackboneSource
from cribo.features.scores import iou
from cribo.models import build_backbone, save_backbone

from .conftest import command
from .squares import Squares

CPU: dict[str, Any] = {"accelerator": "cpu", "workers": 0, "threads": 1}
RATES = 1e-3, 1e-6


def config(folder: Path, *, backbone: Any = None, data: Any = None, runtime: Any = None, **changes: Any) -> Any:
    """Return the arguments of `evaluate`."""
    settings: dict[str, Any] = {"iterations": 6, "batch_size": 4, "crop": 64, "learning_rates": RATES, "drop_path": 0.2}
    return (
        FinetunedSegmenter(**(settings | changes)),
        backbone or BackboneSource(str(folder / "network")),
        data or SegmentationData("folder", str(folder)),
        runtime or TrainingRuntime(**CPU),
    )


def words(folder: Path, out: Path, *more: str) -> list[str]:
    """Return the arguments of a command with the settings of `config`."""
    own = ("--iterations", "6", "--drop_path", "0.2", "--learning_rates", "1e-3,1e-6", "--pictures", "0")
    return command("segmenter", folder, out, *own, "--runtime.checkpoint_every", "2", *more)


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an uninterrupted evaluation."""
    made = config(folder, runtime=TrainingRuntime(**CPU, checkpoint_every=2))
    return evaluate(*made, out=tmp_path_factory.mktemp("whole") / "out", pictures=0)[1]


def assert_same(out: Path, other: Path) -> None:
    """Assert that two evaluations are bit-identical."""
    assert read_result(out).results == read_result(other).results
    assert (out / "segmenter.safetensors").read_bytes() == (other / "segmenter.safetensors").read_bytes()


# ------------------------------------------------------------------ a whole evaluation


def test_it_writes_results_pictures_and_the_best_network(folder: Path, tmp_path: Path) -> None:
    made = config(folder, iterations=60, data=SegmentationData("folder", str(folder), train="val"))
    result, out = evaluate(*made, out=tmp_path / "out", pictures=2)
    assert read_result(out) == result
    assert (result.evaluation, result.varies, result.metrics) == ("segmenter", "learning_rate", ["miou"])
    good, bad = result.results
    assert (good["learning_rate"], bad["learning_rate"]) == RATES
    assert good["miou"] > 0.9
    assert good["pixel_accuracy"] > 0.95  # of the training images
    assert bad["miou"] < 0.5
    assert result.settings["decoder"] == {"layers": 2, "width": 32, "heads": 1}
    assert result.settings["drop_path"] == 0.2
    assert result.settings["inference"] == "slide"
    for name in ("confusion.png", "miou.png", "predictions.png"):
        assert (out / name).is_file()
    # The saved network is the scored one.
    segmenter, images = load_segmenter(out), open_segmentation("folder", folder, "val")
    assert segmenter.classes == Squares().classes
    confusion = torch.zeros(4, 4, dtype=torch.long)
    for index in range(len(images)):
        places = images.labels(index).long() * 4 + segmenter.segment(images.load(index)).long()
        confusion += torch.bincount(places.flatten(), minlength=16).view(4, 4)
    assert confusion.tolist() == good["confusion"]
    assert float(iou(confusion).nanmean()) == good["miou"]


def test_scores_and_curves_are_kept_and_checkpoints_removed(whole: Path) -> None:
    assert sorted(path.name for path in whole.iterdir() if path.is_dir()) == ["lr=0.001", "lr=1e-06"]
    assert [path.relative_to(whole) for path in whole.rglob("*.safetensors")] == [Path("segmenter.safetensors")]
    assert not [*whole.rglob("*.ckpt")]
    for rate in RATES:
        assert json.loads((whole / f"lr={rate!r}" / "score.json").read_text())["learning_rate"] == rate
        assert [*(whole / f"lr={rate!r}" / "tensorboard").glob("events.*")]


def test_bf16(folder: Path, tmp_path: Path) -> None:
    runtime = TrainingRuntime(**CPU, precision="bf16-mixed")
    made = config(folder, iterations=30, learning_rates=(1e-3,), runtime=runtime)
    result, _ = evaluate(*made, out=tmp_path / "out", pictures=0)
    assert result.results[0]["miou"] > 0.7


def test_a_convolutional_network_with_a_decoder_of_another_width(folder: Path, tmp_path: Path) -> None:
    args = {"layers": (1, 1, 1, 1), "channels": (8, 8, 8, 16), "output_stride": 16}
    save_backbone(build_backbone("resnet18", args=args, image_size=64), tmp_path / "network")
    backbone = BackboneSource(str(tmp_path / "network"))
    made = config(folder, backbone=backbone, decoder=DecoderConfig(1, 24, 3), learning_rates=(1e-3,), iterations=2)
    result, out = evaluate(*made, out=tmp_path / "out", pictures=0)
    assert result.settings["decoder"] == {"layers": 1, "width": 24, "heads": 3}
    assert load_segmenter(out).network.backbone.name == "resnet18"


def test_checkpointing_gives_equal_results(folder: Path, whole: Path, tmp_path: Path) -> None:
    made = config(folder, checkpointing="blocks")
    _, out = evaluate(*made, out=tmp_path / "out", pictures=0)
    ours, others = (load_file(path / "segmenter.safetensors") for path in (out, whole))
    for name, value in ours.items():
        torch.testing.assert_close(value, others[name])


def test_positions_are_resized_to_the_crops(folder: Path) -> None:
    protocol, source, data, _ = config(folder, crop=128)
    run = SimpleNamespace(source=source, data=data.open(), backbone=SimpleNamespace(in_chans=3))
    network = build_segmenter(protocol, run)  # pyright: ignore[reportArgumentType]
    assert network.backbone.model.pos_embed.shape[1] == 1 + 8 * 8
    assert network.backbone.num_drop_path_sites == 2
    assert network.decoder.drop_path_rates == pytest.approx((0.2, 0.2))


# ------------------------------------------------------------------ interruption and resumption


def stop_when(condition: str) -> str:
    """Return a prelude that kills the command before the training step at which a condition holds."""
    return (
        "import signal\n"
        "from cribo.evaluation.segmentation.finetuning import SegmenterFinetuning\n"
        "step = SegmenterFinetuning.training_step\n"
        "def killed(self, batch, batch_idx):\n"
        f"    if {condition}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return step(self, batch, batch_idx)\n"
        "SegmenterFinetuning.training_step = killed\n"
    )


@pytest.mark.parametrize(
    ("condition", "left"),
    [
        pytest.param(
            "self.global_step == 3",
            ["lr=0.001/checkpoints/step=00000002.ckpt"],
            marks=pytest.mark.slow,
            id="in training",
        ),
        pytest.param(
            "self.learning_rate == 1e-6",
            ["lr=0.001/score.json", "lr=0.001/segmenter.safetensors"],
            id="between two trainings",
        ),
    ],
)
def test_a_killed_training_resumes_with_identical_results(
    folder: Path, whole: Path, tmp_path: Path, commands: Commands, condition: str, left: list[str]
) -> None:
    command = words(folder, tmp_path / "out", "--resume")
    begun = commands.fork(*command, prelude=stop_when(condition))
    assert begun.wait(900) == -signal.SIGKILL, begun.output
    files = [path for path in (tmp_path / "out").glob("lr=*/**/*") if path.is_file() and "events" not in path.name]
    found = sorted(path.relative_to(tmp_path / "out").as_posix() for path in files)
    assert [name for name in found if "tensorboard" not in name] == left
    assert main(command) == 0
    assert_same(tmp_path / "out", whole)


def test_finished_trainings_are_not_repeated(folder: Path, tmp_path: Path) -> None:
    made = config(folder, iterations=2)
    first, out = evaluate(*made, out=tmp_path / "out", pictures=0)
    assert evaluate(*made, out=out, resume=True, pictures=0)[0] == first
    scores = {path: path.stat().st_mtime_ns for path in out.glob("lr=*/score.json")}
    # Killed after the last training: the best network exists, the results do not.
    (out / "results.json").unlink()
    again, _ = evaluate(*made, out=out, resume=True, pictures=0)
    assert again.results == first.results
    assert again.seconds == first.seconds
    assert {path: path.stat().st_mtime_ns for path in out.glob("lr=*/score.json")} == scores
    # A removed one is trained again, with identical results.
    network = (out / "segmenter.safetensors").read_bytes()
    (out / "results.json").unlink()
    shutil.rmtree(out / "lr=0.001")
    again, _ = evaluate(*made, out=out, resume=True, pictures=0)
    assert again.results == first.results
    assert (out / "segmenter.safetensors").read_bytes() == network


def test_a_damaged_score_is_named(folder: Path, tmp_path: Path) -> None:
    made = config(folder, iterations=1, learning_rates=(1e-3,))
    _, out = evaluate(*made, out=tmp_path / "out", pictures=0)
    (out / "results.json").unlink()
    (out / "lr=0.001" / "score.json").write_text("{")
    with pytest.raises(FolderError, match=r"score\.json is corrupt .*: remove .*lr=0\.001 to repeat the training"):
        evaluate(*made, out=out, resume=True, pictures=0)


@pytest.mark.slow
def test_two_processes_give_the_result_of_one(folder: Path, whole: Path, tmp_path: Path, commands: Commands) -> None:
    for begun in commands.fork_all(2, *words(folder, tmp_path / "out")):
        assert begun.wait(900) == 0, begun.output
    ours, others = (load_file(path / "segmenter.safetensors") for path in (tmp_path / "out", whole))
    for name, value in ours.items():
        torch.testing.assert_close(value, others[name], rtol=1e-3, atol=1e-4)
    for row, other in zip(read_result(tmp_path / "out").results, read_result(whole).results, strict=True):
        assert row["miou"] == pytest.approx(other["miou"], abs=0.01)
    counted = next(row["confusion"] for row in read_result(tmp_path / "out").results if "confusion" in row)
    assert sum(map(sum, counted)) == 2 * 128 * 192  # each image once
    assert not [*(tmp_path / "out").rglob("*.ckpt")]


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder": DecoderConfig(heads=3)}, "decoder.width 32"),
        ({"decoder": DecoderConfig(width=200)}, "decoder.width 200"),
        ({"decoder": DecoderConfig(layers=0)}, "decoder.layers must be >= 1"),
        ({"backbone": BackboneSource("dla46_c", pretrained=False)}, "dla46_c .* drop_path=0"),
        ({"backbone": BackboneSource("resnet18", pretrained=False), "checkpointing": "blocks"}, "resnet18 .* 'blocks'"),
        ({"backbone": BackboneSource("mixer_s32_224", pretrained=False)}, "returns a 3-dimensional tensor"),
        ({"crop": 24}, "crop must be a multiple of the patch size"),
    ],
)
def test_invalid_trainings_are_refused_before_a_folder_is_created(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(*config(folder, **changes), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop_path": 1.0}, "drop_path must be >= 0 and < 1, got 1"),
        ({"backbone": BackboneSource("x", layers=4)}, "layers must be 1, got 4: Segmenter decodes .* the last block"),
        ({"backbone": BackboneSource("mean-colour")}, "mean-colour has no weights to finetune: choose a network"),
        ({"learning_rates": ()}, "learning_rates must be distinct numbers"),
    ],
)
def test_unsupported_options_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(*config(folder, **changes))


def test_the_command_prints_tables_and_places(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = words(folder, tmp_path / "out", "--iterations", "2", "--learning_rates", "1e-3", "--limit", "1")
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "Finetuning with Segmenter (paper) on" in printed
    assert f"network      {tmp_path / 'out' / 'segmenter.safetensors'}" in printed.replace("\n", "")
    content = read_result(tmp_path / "out")
    assert content.command.startswith("cribo evaluate segmenter --backbone")
    assert content.data["limit"] == 1
    assert main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
