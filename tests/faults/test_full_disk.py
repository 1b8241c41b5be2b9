"""A temporarily full disk affects only what could not be written."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.commands import WITHOUT_PICTURES, Commands
from tests.faults.runs import assert_same_run, last_row

from cribo.pretraining import PretrainConfig
from cribo.pretraining.loading import dump_config

pytestmark = pytest.mark.slow

CHANGES: dict[str, Any] = {
    "data.workers": 1,
    "optim.epochs": 15,
    "score.root": "scenes",
    "score.images": (4, 2),
    "score.every_epochs": 5,
    "runtime.log_every": 1,
    "runtime.checkpoint_every": 3,
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs permission to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with path.open("wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def test_a_temporarily_full_disk(
    tmp_path: Path, disk: Path, tiny: Callable[..., PretrainConfig], commands: Commands, figure: Callable[[str], None]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(dump_config(tiny(CHANGES)))
    words = ("pretrain", "--config", config, "--continue", "--name")
    whole = commands.fork(*words, "whole", "--out", tmp_path, prelude=WITHOUT_PICTURES)
    assert whole.wait(600) == 0, whole.output[-5000:]

    begun = commands.fork(*words, "run", "--out", disk, prelude=WITHOUT_PICTURES)
    while last_row(disk / "run") < 10:
        assert begun.wait(0.002) is None, begun.output[-5000:]
    fill(disk / "filler")
    while begun.output.count("could not save") < 4 or "could not write to" not in begun.output:
        assert begun.wait(0.01) is None, begun.output[-5000:]
    (disk / "filler").unlink()
    assert begun.wait(600) == 0, begun.output[-5000:]
    assert_same_run(disk / "run", tmp_path / "whole")
    saves, rows = (begun.output.count(what) for what in ("could not save", "could not write to"))
    assert rows
    figure(
        f"a disk that was full while {saves} saves and {rows} writes of numbers failed: the run went on; weights, "
        "bank, centres, optimiser and metrics.csv are identical bit for bit"
    )
