"""Two processes that share a batch train the same network as one."""

import subprocess
import sys
from pathlib import Path

import pytest

from cribo.pretraining.monitoring import read_metrics

_OPTIONS = {
    "data.scenes.count": "48",
    "data.scenes.size": "32",
    "data.workers": "0",
    "views.size": "32",
    "backbone.name": "vit_tiny_patch16_224",
    "backbone.args": "{patch_size: 8, depth: 2, embed_dim: 32, num_heads: 2}",
    "backbone.drop_path": "0.2",
    "objects.num_objects": "4",
    "objects.group_size": "4",
    "objects.bank_images": "32",
    "head.prototypes": "32",
    "losses.centring": "mean",
    "optim.batch_size": "16",
    "optim.epochs": "2",
    "optim.warmup_epochs": "0",
    "score.root": "null",
    "runtime.accelerator": "cpu",
    "runtime.threads": "1",
    "runtime.log_every": "1",
}


def _train(out: Path, devices: int) -> list[dict[str, float]]:
    words = [word for name, value in _OPTIONS.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "cribo.cli", "pretrain", "--out", str(out), "--name", f"on-{devices}", *words]
    done = subprocess.run(
        [*command, "--runtime.devices", str(devices)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("to repeat it") == 1  # the second process has nothing to add
    return read_metrics(out / f"on-{devices}" / "metrics.csv")


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path: Path):
    one, two = _train(tmp_path, 1), _train(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["on-1", "on-2"]
    assert len(one) == len(two) == 6
    for alone, shared in zip(one, two, strict=True):
        for name in ("loss_image", "loss_cross_view", "loss_cross_image", "bootstrapping_ratio", "objects_per_image"):
            assert shared[name] == pytest.approx(alone[name], rel=1e-4), name


def test_a_batch_that_two_devices_cannot_share_in_whole_groups(tmp_path: Path):
    words = [word for name, value in _OPTIONS.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "cribo.cli", "pretrain", "--out", str(tmp_path), *words]
    done = subprocess.run(
        [*command, "--runtime.devices", "2", "--objects.group_size", "16"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert "16 x 1 x 2 = 32, got 16" in done.stderr
