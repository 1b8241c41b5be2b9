"""The score during training equals the dense retrieval of `cribo evaluate`."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from cribo.cli import main
from cribo.data import ImageFiles
from cribo.data.randomness import keyed_generator
from cribo.data.scenes import Scenes
from cribo.evaluation import DenseNN, EvaluationRuntime, SegmentationData, evaluate
from cribo.evaluation.runner import calibrate_batch_norms
from cribo.features import BackboneSource
from cribo.models import build_backbone
from cribo.pretraining import PretrainConfig
from cribo.pretraining.loading import dump_config, load_config
from cribo.pretraining.score import open_score_data
from cribo.pretraining.session import Session

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]

NETWORK: dict[str, Any] = {
    "backbone.name": "test_resnet",
    "backbone.args": {},
    "backbone.drop_path": 0.0,
    "views.size": 64,
    "objects.num_objects": 3,
    "optim.epochs": 1,
}
"""A network with batch norms."""


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twelve labelled scenes."""
    folder, scenes = tmp_path_factory.mktemp("labelled"), Scenes(12, size=64)
    for index in range(len(scenes)):
        part = "train" if index < 8 else "val"
        for kind, pixels in (("images", scenes.load(index).permute(1, 2, 0)), ("labels", scenes.labels(index))):
            (folder / kind / part).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.to(torch.uint8).numpy()).save(folder / kind / part / f"{index}.png")
    (folder / "classes.txt").write_text("\n".join(scenes.classes))
    return folder


def test_the_score_of_the_quickstart_has_the_scenes_and_neighbours_of_the_command() -> None:
    config = load_config("quickstart")
    scored, evaluated = open_score_data(config), SegmentationData("scenes").open()
    assert scored is not None
    assert (scored.train, scored.val) == (evaluated.train, evaluated.val)
    assert config.score.neighbours == DenseNN().for_data(8, evaluated.train.classes).neighbours
    assert (config.score.memory_ratio, config.score.size) == (1, None)


@pytest.mark.parametrize("ratio", [1, 4])
def test_the_scores_of_a_run_match_the_command(
    ratio: int, tiny: Tiny, whole: Train, labelled: Path, tmp_path: Path
) -> None:
    """Of the trained network, the untrained one with calibrated batch norms, and the mean colour."""
    score = {"score.root": str(labelled), "score.memory_ratio": ratio, "score.neighbours": 5}
    config = tiny({**NETWORK, **score})
    trained = whole(config)
    seed = keyed_generator(config.seed, 0).initial_seed() % 2**31  # of the run's random weights
    sources = {
        "before": BackboneSource("test_resnet", pretrained=False, seed=seed),
        "after": str(trained.run.folder),
        "mean_color": "mean-colour",
    }
    for name, source in sources.items():
        runtime = EvaluationRuntime(devices=("cpu",), workers=0, cache="none")
        protocol, data = DenseNN(ratios=(ratio,), neighbours=5), SegmentationData("folder", str(labelled))
        result, _ = evaluate(protocol, source, data, runtime, out=tmp_path / name, pictures=0)
        assert trained.run.summary["dense_nn"][name] == result.results[0]["miou"], name
    # The score, which calibrates batch norms, changes nothing in the run.
    losses = [[row["loss"] for row in run.rows if row["loss"]] for run in (trained, whole(tiny(NETWORK)))]
    assert losses[0] == losses[1]


def test_a_size_that_the_mean_colour_does_not_support_skips_its_score_only(
    tiny: Tiny, whole: Train, labelled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    score = {"score.root": str(labelled), "score.neighbours": 5, "score.size": (40, 40)}
    scores = whole(tiny({**score, "optim.epochs": 1, "optim.warmup_epochs": 0})).run.summary["dense_nn"]
    assert scores["mean_color"] is None
    assert 0 <= scores["after"] <= 1
    assert "patch size 16, got 40x40" in caplog.text


def test_batch_norms_are_calibrated_on_images_of_any_size() -> None:
    class Small(Scenes):
        def load(self, index: int) -> torch.Tensor:
            return super().load(index)[:, : 5 + index]

    backbone = build_backbone("test_resnet", seed=0)
    calibrate_batch_norms(backbone, Small(3, size=16))
    means = [value.abs().sum() for name, value in backbone.named_buffers() if name.endswith("running_mean")]
    assert all(mean > 0 for mean in means)


def write_images(folder: Path, count: int) -> Path:
    folder.mkdir()
    scenes = Scenes(count, size=64)
    for index in range(count):
        Image.fromarray(scenes.load(index).permute(1, 2, 0).numpy()).save(folder / f"{index:02d}.png")
    return folder


def test_without_labels_of_the_images_agreement_on_held_out_ones_stands_first(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_images(tmp_path / "my street", 30)
    config = tiny({"data.root": str(folder), "score.root": "scenes", "score.images": [4, 2], "score.held_out": 64})
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(dump_config(replace(config, optim=replace(config.optim, epochs=1))))
    assert main(["pretrain", "--config", "config.yaml", "--name", "run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    summary = json.loads(Path("runs/run/summary.json").read_text())
    assert summary["images"] == 27
    assert summary["agreement"]["data"] == "3 held-out images of my street"
    assert all(0 <= summary["agreement"][name] <= 1 for name in ("before", "after"))
    own, scenes = printed.rindex("on 3 held-out images of my street"), printed.rindex("on held-out synthetic scenes")
    assert own < scenes


@pytest.mark.parametrize(
    ("count", "changes", "held_out"),
    [
        (30, {}, ["00.png", "10.png", "20.png"]),
        (30, {"score.held_out": 2}, ["00.png", "15.png"]),
        (30, {"score.held_out": 0}, None),
        (30, {"optim.batch_size": 30, "objects.group_size": 30}, None),
        (19, {}, None),
    ],
)
def test_a_part_of_the_images_is_left_out_of_training(
    tiny: Tiny, tmp_path: Path, count: int, changes: dict[str, Any], held_out: list[str] | None
) -> None:
    folder = write_images(tmp_path / "images", count)
    session = Session(tiny({"data.root": str(folder), "score.held_out": 64, **changes}))
    assert isinstance(session.source, ImageFiles)
    found = list(session.held_out.names) if isinstance(session.held_out, ImageFiles) else None
    assert found == held_out
    assert {*session.source.names, *(found or ())} == {path.name for path in folder.iterdir()}
    assert len(session.source) + len(found or ()) == count
    scenes = Session(tiny({"score.held_out": 64}))
    assert scenes.held_out is None
