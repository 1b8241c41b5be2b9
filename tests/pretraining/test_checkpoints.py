import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from cribo.pretraining import PretrainConfig
from cribo.pretraining.checkpoints import last_checkpoint
from cribo.pretraining.presets import dump_config

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]


def steps_of(run: Path) -> list[int]:
    return sorted(int(path.stem.partition("=")[2]) for path in (run / "checkpoints").iterdir())


def test_only_the_last_checkpoints_stay(tiny: Tiny, train: Train) -> None:
    trained = train(tiny({"runtime.checkpoint_every": 2, "runtime.keep_checkpoints": 3}))
    assert steps_of(trained.run.folder) == [8, 10, 12]


def test_the_end_is_saved_whatever_the_interval(tiny: Tiny, train: Train) -> None:
    trained = train(tiny({"runtime.checkpoint_every": 5, "runtime.keep_checkpoints": 5}))
    assert steps_of(trained.run.folder) == [5, 10, 12]
    assert trained.checkpoint["global_step"] == 12


def test_a_checkpoint_holds_the_weights_after_its_step(tiny: Tiny, train: Train) -> None:
    class Keep(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
            if trainer.global_step == 12:
                self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}

    keep = Keep()
    trained = train(tiny({"runtime.checkpoint_every": 6}), callbacks=[keep])
    assert all(torch.equal(value, trained.weights[name]) for name, value in keep.state.items())


class ReplaceFolder(L.Callback):
    """Puts a file where the checkpoints' folder is at one step, and the folder back at another."""

    def __init__(self, folder: Path, broken: int, mended: int) -> None:
        self.folder = folder
        self.steps = (broken, mended)
        self.kept = folder.with_name("kept")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        broken, mended = self.steps
        if trainer.global_step == broken:
            self.folder.rename(self.kept)
            self.folder.write_text("in the way")
        if trainer.global_step == mended:
            self.folder.unlink()
            shutil.move(self.kept, self.folder)


def test_training_goes_on_when_a_save_fails(
    tiny: Tiny, train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny({"runtime.checkpoint_every": 2, "runtime.keep_checkpoints": 2})
    whole = train(config, "whole")
    trained = train(config, callbacks=[ReplaceFolder(tmp_path / "run" / "checkpoints", 5, 9)])
    failed = [message for message in caplog.messages if message.startswith("could not save")]
    assert len(failed) == 2  # at steps 6 and 8
    assert "training goes on and saves again in 2 steps" in failed[0]
    assert steps_of(trained.run.folder) == [10, 12]
    assert all(torch.equal(value, trained.weights[name]) for name, value in whole.weights.items())


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, tiny: Tiny) -> None:
    """A limit on the size of files fails in the middle of a write, as a full disk does."""
    config = tiny({"runtime.checkpoint_every": 2, "runtime.keep_checkpoints": 2})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    program = f"""
import resource
from pathlib import Path
import lightning as L
from cribo.pretraining import pretrain
import cribo.pretraining.run
cribo.pretraining.run.write_report = lambda *a, **k: []
class Fill(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 5:
            size = min(path.stat().st_size for path in Path({str(tmp_path)!r}).glob("run/checkpoints/*"))
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
        if trainer.global_step == 7:
            print(sorted(path.name for path in Path({str(tmp_path)!r}).glob("run/checkpoints/*")))
        if trainer.global_step == 9:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
pretrain({str(tmp_path / "config.yaml")!r}, out={str(tmp_path)!r}, name="run", callbacks=[Fill()])
"""
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Both files from before are there while it fails, and no half-written one beside them.
    assert "['step=00000002.ckpt', 'step=00000004.ckpt']" in done.stdout
    assert done.stderr.count("could not save") == 2
    assert "The checkpoint before is intact" in done.stderr
    assert steps_of(tmp_path / "run") == [10, 12]
    path = last_checkpoint(tmp_path / "run")
    assert path is not None
    assert torch.load(path, weights_only=False)["global_step"] == 12


def test_a_checkpoint_needs_no_code_to_be_read(tiny: Tiny, train: Train) -> None:
    path = last_checkpoint(train(tiny()).run.folder)
    assert path is not None
    assert torch.load(path, weights_only=True)["cribo"]["num_images"] == 36


def test_a_folder_without_checkpoints_has_no_last_one(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
