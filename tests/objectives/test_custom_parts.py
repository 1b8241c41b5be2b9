"""Custom clusterings and criteria are used in training and in all figures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cribo.base.errors import ConfigError
from cribo.data.scenes import Scenes
from cribo.objectives.cluster_record import read_clusters
from cribo.objectives.sampling import sample_objects
from cribo.pretraining import PretrainConfig, pretrain

Tiny = Callable[..., PretrainConfig]

PARTS = """
import torch

def halves(tokens, coordinates, *, num_objects, initial_tokens):
    x = coordinates[..., 0]
    return (x > x.mean(dim=1, keepdim=True)).long()

def one_label(tokens, coordinates, *, num_objects, initial_tokens):
    return torch.zeros(len(tokens), dtype=torch.long)

def nothing(objects, jumped):
    return torch.zeros(objects.shape[:2], dtype=torch.bool)
"""


@pytest.fixture(autouse=True)
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts_of_a_user.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))


def make(tiny: Tiny, **changes: Any) -> PretrainConfig:
    own = {f"objects.{name}": f"parts_of_a_user.{value}" for name, value in changes.items()}
    return tiny({"losses.cross_image_from_epoch": 0, **own})


def test_training_record_and_figures_use_the_custom_clustering(tiny: Tiny, tmp_path: Path) -> None:
    config = make(tiny, clustering="halves")
    run = pretrain(config, out=tmp_path, name="run")
    assert read_clusters(run.folder).labels.unique().tolist() == [0, 1]
    sample = sample_objects(run.backbone(), Scenes(8, size=40), config, count=4)
    assert sample.objects.labels.unique().tolist() == [0, 1]
    assert max(sample.objects.counts) <= 2


def test_the_criterion_selects_matches(tiny: Tiny, tmp_path: Path) -> None:
    run = pretrain(make(tiny, criterion="nothing"), out=tmp_path, name="run")
    assert run.summary["bootstrapping_ratio"] == 0
    assert run.summary["losses"]["cross_image"] == 0


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        ({"clustering": "one_label"}, ValueError, r"integer labels of shape \(B, 2N\) = \(6, 32\)"),
        (
            {"clustering": "quarters"},
            ConfigError,
            "clustering parts_of_a_user.quarters: module parts_of_a_user has no 'quarters'",
        ),
        ({"criterion": "torch"}, ConfigError, "objects.criterion parts_of_a_user.torch is not a function"),
    ],
)
def test_invalid_clusterings_and_criteria_are_rejected(
    tiny: Tiny, tmp_path: Path, part: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pretrain(make(tiny, **part), out=tmp_path, name="run")


def test_losses_have_weights(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny({"losses.image": 0.5, "losses.cross_view": 2.0, "losses.cross_image": False, "optim.epochs": 1})
    rows = pretrain(config, out=tmp_path, name="run").summary["losses"]
    assert rows["cross_image"] == 0
    text = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    names, values = text[0].split(","), text[1].split(",")
    row = dict(zip(names, values, strict=True))
    expected = 0.5 * float(row["loss_image"]) + 2 * float(row["loss_cross_view"])
    assert float(row["loss"]) == pytest.approx(expected, rel=1e-6)
    assert torch.tensor(float(row["loss"])) > 0
