"""The disk cache of frozen blocks: same features, and no use of a different run's cache."""

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cribo.base.errors import ConfigError
from cribo.data.samples import SampleDataset
from cribo.data.scenes import Scenes
from cribo.objectives import Setting, Step
from cribo.objectives.base import make_objective
from cribo.objectives.trunk_cache import fill
from cribo.pretraining import PretrainConfig, pretrain

Tiny = Callable[..., PretrainConfig]
STEP = Step(0, steps_per_epoch=4, total_steps=12)
RESNET = {"backbone.name": "resnet18", "backbone.args": {"channels": (8, 8, 8, 8)}}
CACHED = {"backbone.train_blocks": 1, "backbone.cache_trunk": 2, "backbone.drop_path": 0.0}


def make(tiny: Tiny, name: str = "alignment", changes: dict[str, Any] | None = None) -> Any:
    return make_objective(name, {}, Setting(tiny({**CACHED, **(changes or {})}), 8, 2))


@pytest.mark.parametrize("name", ["alignment", "cribo"])
def test_losses_match_those_of_the_same_views_up_to_half_precision(tiny: Tiny, tmp_path: Path, name: str) -> None:
    objective, source = make(tiny, name), Scenes(8, size=40)
    samples = fill(objective, source, tmp_path)
    batch = SampleDataset(source, samples, seed=0).__getitems__([(0, image) for image in range(4)])
    assert "views" not in batch.samples
    drawn = SampleDataset(source, objective.samples(), seed=0)
    pairs = [drawn.__getitems__([(-1 - pair, image) for image in range(4)]) for pair in (0, 1)]
    chosen = [
        next(p for p in (0, 1) if pairs[p]["coordinates"][row].equal(batch["coordinates"][row])) for row in range(4)
    ]
    assert len(set(chosen)) == 2
    views = drawn.__getitems__([(-1 - pair, image) for image, pair in enumerate(chosen)])
    views.samples |= {key: batch[key] for key in ("initial_tokens", "drop_path_noise")}
    torch.testing.assert_close(objective(batch, STEP).losses, objective(views, STEP).losses, rtol=2e-3, atol=2e-3)


def test_filling_resumes(tiny: Tiny, tmp_path: Path) -> None:
    objective, source = make(tiny), Scenes(20, size=40)
    fill(objective, source, tmp_path / "whole")

    def stop(done: int, total: int) -> None:
        assert total == 20
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill(objective, source, tmp_path / "cut", progress=stop)
    seen: list[int] = []
    fill(objective, source, tmp_path / "cut", progress=lambda done, total: seen.append(done))
    assert seen == [16, 20]
    for name in ("tokens", "coordinates", "filled"):
        first, second = ((tmp_path / kind / f"{name}.npy").read_bytes() for kind in ("whole", "cut"))
        assert first == second


def test_a_cached_run_writes_weights_and_removes_the_cache(tiny: Tiny, tmp_path: Path) -> None:
    run = pretrain(tiny({**CACHED, "objective.name": "alignment"}), out=tmp_path)
    assert run.summary["steps"] == 12
    assert run.summary["unreadable_images"] == 0
    assert not (run.folder / "trunk").exists()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("alignment", {"backbone.train_blocks": None}, "also set backbone.train_blocks"),
        ("alignment", {"backbone.train_blocks": 2}, "also set backbone.train_blocks"),
        ("alignment", {**RESNET, "backbone.train_blocks": 2}, "also set backbone.train_blocks"),
        ("dino", {}, "requires an objective whose samples are view pairs"),
        ("alignment", {"seed": 1}, r"a cache of different weights"),
        ("alignment", {"views.flip": 0.0}, r"a cache of different views"),
        ("alignment", {"backbone.cache_trunk": 3}, r"a cache of different pairs \(2 instead of 3\)"),
    ],
)
def test_invalid_caches_are_rejected(
    tiny: Tiny, tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    source = Scenes(8, size=40)
    fill(make(tiny), source, tmp_path)
    with pytest.raises(ConfigError, match=message):
        fill(make(tiny, name, changes), source, tmp_path)


def test_a_full_disk_is_an_error_before_any_work(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(10**9, 10**9, 10**4)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"cache_trunk 2 needs 0\.0 GB in .* only 0\.0 GB are free"):
        fill(make(tiny), Scenes(8, size=40), tmp_path)
    assert not list(tmp_path.glob("*.npy"))
