"""Pretraining from tar shards: the same run from any storage and with any interruption."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from PIL import Image

from cribo.base.errors import ShardError
from cribo.data import open_images, write_shards
from cribo.data.scenes import Scenes
from cribo.pretraining import PretrainConfig

Tiny = Callable[..., PretrainConfig]


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """36 scenes in about a dozen shards, eight of which are read at a time."""
    monkeypatch.setattr("cribo.data.sources.shards.WINDOW_SHARDS", 1)
    scenes = Scenes(36, size=40, seed=0)
    folder = tmp_path / "files"
    folder.mkdir()
    for index in range(len(scenes)):
        Image.fromarray(scenes.load(index).permute(1, 2, 0).contiguous().numpy()).save(folder / f"{index}.jpg")
    written = write_shards(open_images(folder), tmp_path / "shards", shard_bytes=4096)
    assert written.shards > 8
    return written.folder


class DeleteAfter(L.Callback):
    """Deletes the shards after a step."""

    def __init__(self, step: int, folder: Path) -> None:
        self.step, self.folder = step, folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step:
            self.folder.rename(self.folder.with_name("gone"))


def test_a_run_from_shards_is_the_same_from_a_url_and_after_an_interruption(
    shards: Path, tmp_path: Path, tiny: Tiny, train: Callable[..., Any], resumed: Callable[..., Any]
) -> None:
    common = {"data.root": str(shards), "runtime.checkpoint_every": 2, "optim.epochs": 2}
    common["data.cache_dir"] = str(tmp_path / "cache")
    reference = train(tiny(common), "reference")
    assert len(reference.rows) == 8
    from_url = train(tiny({**common, "data.root": f"file://{shards}", "data.workers": 2}), "url")
    with pytest.raises(ShardError, match=r"the shard .*images-.*\.tar: file not found"):
        train(tiny(common), "stopped", callbacks=[DeleteAfter(5, shards)])
    shards.with_name("gone").rename(shards)
    for other in (from_url, resumed("stopped")):
        assert other.rows == reference.rows
        for name, value in reference.weights.items():
            assert torch.equal(value, other.weights[name]), name
