"""The record of a run's clusters, which does not affect training."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from cribo.models import load_backbone
from cribo.objectives.cluster_record import ClusterHistory, read_clusters, recorded_epochs
from cribo.objectives.sampling import cluster_pairs, sample_pairs
from cribo.pretraining import PretrainConfig
from cribo.pretraining.session import open_source

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("stopped")


def assert_same(one: ClusterHistory, other: ClusterHistory) -> None:
    assert (one.epochs, one.grid) == (other.epochs, other.grid)
    assert torch.equal(one.views, other.views)
    assert torch.equal(one.labels, other.labels)


def test_recorded_epochs_are_denser_at_the_beginning_and_include_both_ends() -> None:
    for total in (1, 2, 7, 8, 20, 300, 5000):
        epochs = recorded_epochs(total)
        assert epochs == tuple(sorted(set(epochs)))
        assert (epochs[0], epochs[-1]) == (0, total)
        assert len(epochs) <= 8
        steps = np.diff(epochs)
        assert (np.diff(steps) >= -1).all(), epochs


def test_the_last_record_matches_the_finished_teacher(tiny: Tiny, whole: Train) -> None:
    config = tiny()
    folder = whole(config).run.folder
    history = read_clusters(folder)
    assert history.epochs == (0, 1, 2, 3)
    assert history.labels.shape == (4, 6, 2, 16)
    backbone = load_backbone(folder)
    pairs = sample_pairs(open_source(config), backbone, config, count=6)
    assert torch.equal(pairs["views"], history.views)
    objects = cluster_pairs(backbone, pairs, config)
    assert torch.equal(objects.labels.long(), history.labels[-1])
    assert not torch.equal(history.labels[0], history.labels[-1])


def test_a_resumed_run_has_the_record_of_an_uninterrupted_one(
    tiny: Tiny, train: Train, resumed: Train, whole: Train, tmp_path: Path
) -> None:
    """A damaged record does not stop it and is rewritten."""
    with pytest.raises(RuntimeError, match="stopped"):
        train(tiny({"runtime.checkpoint_every": 5}), callbacks=[StopAt(10)])
    damaged = shutil.copytree(tmp_path / "run", tmp_path / "damaged")
    (damaged / "clusters.npz").write_bytes(b"half")
    assert_same(read_clusters(resumed().run.folder), read_clusters(whole(tiny()).run.folder))
    assert read_clusters(resumed("damaged").run.folder).epochs == (0, 1, 2, 3)


def test_a_run_without_objects_records_nothing(tiny: Tiny, train: Train) -> None:
    config = tiny({"losses.cross_view": False, "losses.cross_image": False})
    folder = train(config).run.folder
    assert not (folder / "clusters.npz").exists()
    with pytest.raises(
        FileNotFoundError, match=r"has no clusters.npz: the run has no objects, or was created by an older"
    ):
        read_clusters(folder)


def test_a_written_record_can_be_read(tmp_path: Path) -> None:
    labels = torch.randint(0, 300, (2, 2, 2, 6))
    views = torch.randint(0, 256, (2, 2, 3, 4, 6), dtype=torch.uint8)
    history = ClusterHistory(views, (2, 3), (4, 7), labels)
    history.write(tmp_path / "clusters.npz")
    assert_same(read_clusters(tmp_path), history)
    (tmp_path / "clusters.npz").write_bytes((tmp_path / "clusters.npz").read_bytes()[:300])
    with pytest.raises(ValueError, match="is damaged"):
        read_clusters(tmp_path)
