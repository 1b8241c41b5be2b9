"""Faults in loading do not end a run, and do not change its results unnecessarily."""

import csv
import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from PIL import Image
from tests.commands import Commands
from tests.data.faults import Faulty, Noise, drawn, fails
from tests.faults.runs import last_row

from cribo.base.errors import UnreadableImage, WorkersFailed
from cribo.data import open_images, write_shards
from cribo.data.scenes import Scenes
from cribo.pretraining import PretrainConfig
from cribo.pretraining.loading import dump_config

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]


class KillWorkers(L.Callback):
    """Kills all workers of its run, or one, after some steps."""

    def __init__(self, *steps: int, most: int | None = None) -> None:
        self.steps = steps
        self.most = most
        self.others: set[BaseProcess] = set()  # children that earlier tests left

    def on_fit_start(self, *_: Any, **__: Any) -> None:
        self.others = set(multiprocessing.active_children())

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step in self.steps:
            workers = [child for child in multiprocessing.active_children() if child not in self.others]
            assert workers
            for worker in workers[: self.most]:
                worker.kill()


class DeleteFile(L.Callback):
    """Deletes a file after a step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step:
            self.path.unlink()


def save_images(folder: Path, count: int) -> Path:
    noise = Noise(count)
    folder.mkdir(parents=True)
    for index in range(count):
        Image.fromarray(noise.load(index).permute(1, 2, 0).contiguous().numpy()).save(folder / f"{index:03d}.png")
    return folder


def test_killed_workers_change_nothing(tiny: Tiny, train: Train, resumed: Train, tmp_path: Path) -> None:
    """Of all workers or one; the number of restarts is restored on resume."""
    root = str(save_images(tmp_path / "images", 240))
    changes = {"data.root": root, "optim.epochs": 1, "optim.warmup_epochs": 0, "runtime.log_every": 5}
    whole = train(tiny(changes), "whole")
    config = tiny({**changes, "data.workers": 2})
    # Workers are up to ten batches ahead, so a missing worker is noticed that much later.
    with pytest.raises(KeyboardInterrupt):
        train(config, "killed", callbacks=[KillWorkers(3), _Interrupt(14)])
    killed = resumed("killed", callbacks=[KillWorkers(16, most=1)])
    assert killed.rows == whole.rows
    for name, value in whole.weights.items():
        assert torch.equal(value, killed.weights[name]), name
    summary = json.loads((killed.run.folder / "summary.json").read_text())
    assert (summary["worker_restarts"], summary["retried_reads"], summary["unreadable_images"]) == (2, 0, 0)
    assert (whole.run.summary["worker_restarts"], whole.run.summary["retried_reads"]) == (0, 0)


class _Interrupt(L.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def test_workers_that_keep_failing_end_the_run(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    root = str(save_images(tmp_path / "images", 200))
    config = tiny({"data.root": root, "data.workers": 1, "data.max_restarts": 0, "runtime.checkpoint_every": 3})
    with pytest.raises(WorkersFailed, match=r"SIGKILL.*failed 1 times for the same batch\. Use fewer data\.w"):
        train(config, callbacks=[KillWorkers(4)])
    assert (tmp_path / "run" / "checkpoints" / "step=00000003.ckpt").is_file()


@pytest.mark.parametrize(("workers", "epochs"), [(0, 4), (2, 12)])
def test_a_file_that_is_deleted_is_skipped(tiny: Tiny, train: Train, tmp_path: Path, workers: int, epochs: int) -> None:
    images = save_images(tmp_path / "images", 16)
    # Workers are up to ten batches ahead, so a missing file is noticed that much later.
    changes = {"data.root": str(images), "data.workers": workers, "data.max_unreadable": 0.1}
    config = tiny({**changes, "optim.epochs": epochs})
    trained = train(config, callbacks=[DeleteFile(3, images / "007.png")])
    with (trained.run.folder / "skipped.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{"image": "007.png", "reason": "no such file"}]
    assert trained.run.summary["unreadable_images"] == 1
    assert trained.run.summary["steps"] == 2 * epochs


def test_an_outage_of_the_file_system_changes_nothing(
    tiny: Tiny,
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    images = save_images(tmp_path / "images", 36)
    config = tiny({"data.root": str(images), "data.workers": 2, "data.max_unreadable": 0.0})
    faulty = Faulty(open_images(images), tmp_path / "counts", drawn(36, 0, 0.5, fails(), times=1))
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr("cribo.pretraining.session.open_collection", lambda *_, **__: faulty)
        patch.setattr("cribo.pretraining.session.require_readable", lambda *_, **__: None)
        # The record of clusters would read some images before the loader does, and use up their faults.
        patch.setattr("cribo.objectives.cribo.CrIBo.callbacks", lambda *_: ())
        failing = train(config, "failing")
    assert failing.run.summary["retried_reads"] == 18
    assert failing.run.summary["unreadable_images"] == 0
    assert sum("reads have been retried" in message for message in caplog.messages) == 1
    whole = Faulty(open_images(images), tmp_path, {})
    monkeypatch.setattr("cribo.pretraining.session.open_collection", lambda *_, **__: whole)
    assert failing.rows == train(config, "whole").rows


def test_a_score_with_missing_images_is_skipped(
    tiny: Tiny, train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scenes = Scenes(6, size=40, seed=1)
    for part, indices in (("train", range(4)), ("val", range(4, 6))):
        for kind in ("images", "labels"):
            (tmp_path / "labelled" / kind / part).mkdir(parents=True)
        for index in indices:
            image, labels = scenes.load(index).permute(1, 2, 0).contiguous(), scenes.labels(index).to(torch.uint8)
            Image.fromarray(image.numpy()).save(tmp_path / "labelled" / "images" / part / f"{index}.png")
            Image.fromarray(labels.numpy()).save(tmp_path / "labelled" / "labels" / part / f"{index}.png")
    (tmp_path / "labelled" / "classes.txt").write_text("\n".join(scenes.classes))
    config = tiny({"score.root": str(tmp_path / "labelled"), "score.every_epochs": 1})
    lost = tmp_path / "labelled" / "images" / "val" / "5.png"
    trained = train(config, callbacks=[DeleteFile(6, lost)])
    assert trained.run.summary["steps"] == 12
    assert [point["step"] for point in trained.run.summary["dense_nn"]["curve"]] == [0, 4]
    assert trained.run.summary["dense_nn"]["after"] is None  # the score of step 4 is not the final one
    assert sum("could not compute the score" in message and "5.png" in message for message in caplog.messages) >= 2
    assert trained.run.summary["dense_nn"]["mean_color"] is None
    lost.write_text("no image")
    with pytest.raises(UnreadableImage, match=r"5\.png: not an image"):
        train(config, "lost from the start")


# ------------------------------------------------------------------ on the command line


@pytest.mark.slow
def test_missing_shards_end_the_run_with_a_one_line_error(tmp_path: Path, tiny: Tiny, commands: Commands) -> None:
    images = save_images(tmp_path / "images", 300)
    write_shards(open_images(images), tmp_path / "shards", shard_bytes=8192)
    config = tiny({"data.workers": 2, "data.root": str(tmp_path / "shards"), "optim.epochs": 10_000})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    words = ("--config", tmp_path / "config.yaml", "--out", tmp_path, "--name", "run")
    begun = commands.fork("pretrain", *words)
    while last_row(tmp_path / "run") < 3:
        assert begun.wait(0.1) is None, begun.output[-5000:]
    (tmp_path / "shards").rename(tmp_path / "gone")
    assert begun.wait(900) == 1, begun.output[-5000:]
    assert "Traceback" not in begun.output
    assert "file not found" in begun.output
