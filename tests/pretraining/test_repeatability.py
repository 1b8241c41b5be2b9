"""A run depends only on its seed; a stopped run resumes with identical results."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from cribo.base.errors import ConfigError, FolderError
from cribo.base.job import RECORD
from cribo.pretraining import PretrainConfig, load_config, pretrain

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]

# Measured on the last micro-batch only.
WATCHED = ("entropy", "feature_std", "distinct_neighbours")


def assert_same_run(a: Any, b: Any) -> None:
    assert a.rows == b.rows
    assert a.weights.keys() == b.weights.keys()
    for name, value in a.weights.items():
        assert torch.equal(value, b.weights[name]), name
    for name, value in a.bank.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(b.bank[name])), name


class StopAfter(L.Callback):
    """Raises an error after a step, like a machine failure."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("stopped")


# ------------------------------------------------------------------ seeds, workers


@pytest.fixture
def dropping(tiny: Tiny) -> PretrainConfig:
    return tiny({"backbone.drop_path": 0.4, "optim.epochs": 2})


def test_the_same_seed_gives_the_same_run_with_any_number_of_workers(
    tiny: Tiny, train: Train, whole: Train, dropping: PretrainConfig
) -> None:
    torch.manual_seed(1)
    reference = whole(dropping)
    for workers in (0, 2):
        torch.manual_seed(100 + workers)
        config = tiny({"backbone.drop_path": 0.4, "optim.epochs": 2, "data.workers": workers})
        assert_same_run(reference, train(config, f"workers-{workers}"))


def test_another_seed_gives_another_run(tiny: Tiny, whole: Train) -> None:
    first, second = (whole(tiny({"seed": seed, "optim.epochs": 1})) for seed in (0, 1))
    assert first.rows[0]["loss"] != second.rows[0]["loss"]
    changed = [name for name, value in first.weights.items() if not torch.equal(value, second.weights[name])]
    assert "student.head.mlp.0.weight" in changed


def test_drop_path_changes_the_run(tiny: Tiny, whole: Train, dropping: PretrainConfig) -> None:
    with_drop, without = whole(dropping), whole(tiny({"backbone.drop_path": 0.0, "optim.epochs": 2}))
    assert with_drop.rows[0]["loss"] != without.rows[0]["loss"]
    # Initially, teacher and student are equal, and without drop path their tokens are, too.
    assert with_drop.rows[0]["feature_std"] == without.rows[0]["feature_std"]


# ------------------------------------------------------------------ micro-batches


@pytest.mark.parametrize(("centring", "parts"), [("mean", 2), ("sinkhorn", 4)])
def test_micro_batches_change_only_rounding(tiny: Tiny, train: Train, centring: str, parts: int) -> None:
    """Matrix products of other batch sizes round differently, and eight steps of AdamW enlarge the difference."""
    common = {
        "losses.centring": centring,
        "backbone.drop_path": 0.4,
        "objects.group_size": 2,
        "losses.cross_image_from_epoch": 0,
        "optim.lr": 0.005,
        "optim.epochs": 2,
    }
    whole = train(tiny(common), "1")
    split = train(tiny({**common, "optim.micro_batches": parts}), f"{parts}")
    for row, other in zip(whole.rows, split.rows, strict=True):
        for name, value in row.items():
            if value and not any(part in name for part in WATCHED):
                assert float(other[name]) == pytest.approx(float(value), rel=2e-4, abs=1e-5), name
    for name, value in whole.weights.items():
        torch.testing.assert_close(split.weights[name], value, rtol=0, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(split.bank["rows"], whole.bank["rows"], rtol=0, atol=2e-3)
    assert torch.equal(split.bank["images"], whole.bank["images"])
    assert torch.equal(split.bank["counts"], whole.bank["counts"])


# ------------------------------------------------------------------ resume


@pytest.mark.parametrize(
    ("stop", "every", "log_every", "workers"),
    [
        (4, 2, 4, 0),  # at the end of an epoch, at a checkpoint
        (7, 3, 4, 1),  # in the middle of an epoch, one step after a checkpoint, in the middle of a row
        (2, 5, 1, 0),  # before the first checkpoint
    ],
)
def test_a_stopped_run_resumes_with_identical_results(
    tiny: Tiny, train: Train, resumed: Train, whole: Train, stop: int, every: int, log_every: int, workers: int
) -> None:
    changes = {
        "backbone.drop_path": 0.3,
        "optim.epochs": 2,
        "runtime.log_every": log_every,
        "score.root": "scenes",
        "score.images": (4, 2),
        "score.every_epochs": 1,
    }
    with pytest.raises(RuntimeError, match="stopped"):
        train(
            tiny({**changes, "data.workers": workers, "runtime.checkpoint_every": every}),
            "stopped",
            callbacks=[StopAfter(stop)],
        )
    again, expected = resumed("stopped"), whole(tiny(changes))
    assert_same_run(expected, again)
    for name in ("losses", "bootstrapping_ratio", "dense_nn", "warnings", "steps"):
        assert again.run.summary[name] == expected.run.summary[name]


def test_a_run_stopped_after_its_last_step_is_finished(tiny: Tiny, train: Train, resumed: Train) -> None:
    changes = {"optim.epochs": 2, "runtime.checkpoint_every": 6, "score.root": "scenes", "score.images": (4, 2)}
    run = train(tiny(changes)).run
    expected = run.summary
    (run.folder / "summary.json").unlink()
    (run.folder / "backbone.safetensors").unlink()
    again = resumed().run
    for name in ("warnings", "steps"):
        assert again.summary[name] == expected[name]
    assert again.summary["losses"] == pytest.approx(expected["losses"])  # read from metrics.csv: 8 digits
    assert again.summary["bootstrapping_ratio"] == pytest.approx(expected["bootstrapping_ratio"])
    assert again.summary["dense_nn"]["after"] == pytest.approx(expected["dense_nn"]["after"])
    assert len(again.summary["dense_nn"]["curve"]) == 2
    assert again.backbone().embed_dim == 32


def test_options_that_may_change_on_resume(tiny: Tiny, train: Train, resumed: Train, whole: Train) -> None:
    with pytest.raises(RuntimeError, match="stopped"):
        train(tiny({"optim.epochs": 2, "runtime.checkpoint_every": 2}), "stopped", callbacks=[StopAfter(2)])
    for name in ("optim.lr", "seed", "data.scenes.count", "objects", "backbone.pretrained"):
        with pytest.raises(ConfigError, match=f"{name} cannot change when a run is resumed"):
            resumed("stopped", **{name: 1})
    again = resumed("stopped", **{"data.workers": 1, "runtime.log_every": 1})
    assert_same_run(whole(tiny({"optim.epochs": 2})), again)
    with pytest.raises(FolderError, match="not a run that can be resumed"):
        resumed("nothing")


# ------------------------------------------------------------------ the same command again


def test_the_same_command_starts_resumes_and_finishes(tiny: Tiny, begun: Train, resumed: Train, whole: Train) -> None:
    changes = {"optim.epochs": 2, "runtime.checkpoint_every": 2}
    for stop in (1, 3, 7):
        with pytest.raises(RuntimeError, match="stopped"):
            begun(tiny(changes), callbacks=[StopAfter(stop)])
    refused = pytest.raises(FolderError, match=r"optim\.lr was 0\.02, is 0\.1")
    with refused:
        begun(tiny({**changes, "optim.lr": 0.1}))
    done = begun(tiny({**changes, "runtime.checkpoint_every": 5, "data.workers": 1}))
    assert_same_run(whole(tiny({"optim.epochs": 2})), done)
    before = {path: path.stat().st_mtime_ns for path in done.run.folder.rglob("*")}
    with refused:
        begun(tiny({**changes, "optim.lr": 0.1}))
    assert begun(tiny(changes)).run.summary == resumed().run.summary == done.run.summary
    assert {path: path.stat().st_mtime_ns for path in done.run.folder.rglob("*")} == before


def test_a_start_that_was_killed_before_the_configuration_was_written(tiny: Tiny, begun: Train, tmp_path: Path) -> None:
    config = tiny({"optim.epochs": 1})
    with pytest.raises(RuntimeError, match="stopped"):
        begun(config, callbacks=[StopAfter(1)])
    for path in (tmp_path / "run").iterdir():
        if path.name != RECORD:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    left = tmp_path / "run" / f".config.yaml.{'0' * 32}.part"
    left.write_text("seed")
    assert begun(config).run.summary["steps"] == 4
    assert not left.exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(FolderError, match="mine already exists"):
        begun(tiny(), "mine")


def test_continue_requires_one_run(tiny: Tiny, begun: Train, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--continue requires the --name"):
        pretrain(tiny(), out=tmp_path, continue_run=True)
    with pytest.raises(ConfigError, match="--overwrite"):
        begun(tiny(), overwrite=True)


def test_a_run_with_minutes_is_timed_once(tiny: Tiny, begun: Train, tmp_path: Path) -> None:
    config = tiny({"data.scenes.count": 16, "optim.epochs": 5000, "runtime.checkpoint_every": 1})
    with pytest.raises(RuntimeError, match="stopped"):
        begun(config, minutes=0.03, callbacks=[StopAfter(1)])
    epochs = load_config(tmp_path / "run").optim.epochs
    assert epochs < 5000
    assert begun(config, minutes=50).run.summary["epochs"] == epochs
