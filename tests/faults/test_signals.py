"""A signal to all processes of a run at once, as by Ctrl-C, a scheduler or torchrun."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.commands import Commands, seconds_until_ended
from tests.faults.runs import last_row

from cribo.pretraining import PretrainConfig
from cribo.pretraining.loading import dump_config
from cribo.training.checkpoints import checkpoint_files

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.endurance)]
)
def test_a_signal_to_all_processes_ends_the_run_with_a_checkpoint(
    number: signal.Signals, tmp_path: Path, tiny: Callable[..., PretrainConfig], commands: Commands
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(dump_config(tiny({"data.workers": 2, "optim.epochs": 10_000, "runtime.checkpoint_every": 10**6})))
    begun = commands.fork("pretrain", "--config", config, "--out", tmp_path, "--name", "run")
    while last_row(tmp_path / "run") < 5:
        assert begun.wait(0.01) is None, begun.output[-5000:]
    assert len(begun.processes()) == 3
    os.killpg(begun.pid, number)
    assert begun.wait(60) == 128 + number, begun.output[-5000:]
    (checkpoint,) = checkpoint_files(tmp_path / "run")
    step = int(checkpoint.stem.partition("=")[2])
    if number == signal.SIGINT:
        assert begun.output.count("interrupted;") == 1
        assert f"step {step} was the last" in begun.output
    else:
        assert begun.output.count(f"stopped by {number.name} after step {step}") == 1
    assert "Traceback" not in begun.output
    assert "restarting workers" not in begun.output
    assert seconds_until_ended([begun], 60) < 60
