"""The score during training equals the dense retrieval of `cribo evaluate`."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cribo.data.scenes import Scenes
from cribo.evaluation import DenseNN, EvaluationRuntime, SegmentationData, evaluate
from cribo.evaluation.data import Splits
from cribo.evaluation.runner import calibrate_batch_norms
from cribo.models import build_backbone, save_backbone
from cribo.pretraining.presets import load_config
from cribo.pretraining.score import RetrievalScore, open_score_data
from cribo.retrieval import BackboneSource


def scenes(root: str | None, split: str) -> Scenes:
    return Scenes(8, size=64) if split == "train" else Scenes(4, size=64, first=8)


def scorer(ratio: int = 1, size: tuple[int, int] | None = None) -> RetrievalScore:
    config: Any = SimpleNamespace(
        score=SimpleNamespace(memory_ratio=ratio, neighbours=5, size=size), backbone=SimpleNamespace(pretrained=None)
    )
    metrics: Any = SimpleNamespace(add=lambda *_: None)
    return RetrievalScore(Splits(scenes(None, "train"), scenes(None, "val"), "score"), config, metrics)


def miou(source: str | BackboneSource, ratio: int, tmp_path: Path) -> float:
    runtime = EvaluationRuntime(devices=("cpu",), workers=0, cache="none")
    data = SegmentationData(f"{__name__}.scenes")
    result, _ = evaluate(DenseNN(ratios=(ratio,), neighbours=5), source, data, runtime, out=tmp_path / "out")
    return result.results[0]["miou"]


def taken(score: RetrievalScore, backbone: Any, step: int) -> float:
    module: Any = SimpleNamespace(objective=SimpleNamespace(exported=lambda: backbone), device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(
        global_step=step, strategy=SimpleNamespace(reduce_boolean_decision=lambda decision: decision)
    )
    score._take(trainer, module)
    return score.curve[-1][1]


def test_the_score_of_the_quickstart_has_the_scenes_and_neighbours_of_the_command() -> None:
    config = load_config("quickstart")
    scored, evaluated = open_score_data(config), SegmentationData("scenes").open()
    assert scored is not None
    assert (scored.train, scored.val) == (evaluated.train, evaluated.val)
    assert config.score.neighbours == DenseNN().for_data(8, evaluated.train.classes).neighbours
    assert (config.score.memory_ratio, config.score.size) == (1, None)


@pytest.mark.parametrize("ratio", [1, 4])
def test_the_score_matches_the_command(tmp_path: Path, ratio: int) -> None:
    backbone = build_backbone("test_resnet", seed=0)
    save_backbone(backbone, tmp_path / "run")
    assert taken(scorer(ratio), backbone.train(), step=7) == miou(str(tmp_path / "run"), ratio, tmp_path)


def test_the_score_of_the_mean_colour_matches_the_command(tmp_path: Path) -> None:
    module: Any = SimpleNamespace(device=torch.device("cpu"))
    assert scorer().mean_colour(module) == miou("mean-colour", 1, tmp_path)


def test_a_size_that_the_mean_colour_does_not_support_skips_its_score_only(caplog: pytest.LogCaptureFixture) -> None:
    module: Any = SimpleNamespace(device=torch.device("cpu"))
    assert scorer(size=(40, 40)).mean_colour(module) is None
    assert "size must be a multiple of the patch size 16, got 40x40" in caplog.text


def test_the_score_of_an_untrained_network_matches_the_command(tmp_path: Path) -> None:
    untrained = BackboneSource("test_resnet", pretrained=False)
    assert taken(scorer(), build_backbone("test_resnet", seed=0), step=0) == miou(untrained, 1, tmp_path)


def test_batch_norms_are_calibrated_on_images_of_any_size() -> None:
    class Small(Scenes):
        def load(self, index: int) -> torch.Tensor:
            return super().load(index)[:, : 5 + index]

    backbone = build_backbone("test_resnet", seed=0)
    calibrate_batch_norms(backbone, Small(3, size=16))
    means = [value.abs().sum() for name, value in backbone.named_buffers() if name.endswith("running_mean")]
    assert all(mean > 0 for mean in means)


def test_batch_norms_of_an_untrained_network_are_calibrated_for_the_score_only() -> None:
    backbone = build_backbone("test_resnet", seed=0).train()
    before = copy.deepcopy(backbone.state_dict())
    calibrated, plain = taken(scorer(), backbone, step=0), taken(scorer(), backbone, step=7)
    assert calibrated != plain
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
