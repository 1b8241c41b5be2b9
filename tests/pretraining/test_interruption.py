"""A run stopped by a signal saves a checkpoint, from which it resumes with identical results."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tests.commands import Commands

from cribo.base.errors import Interrupted
from cribo.pretraining import PretrainConfig
from cribo.pretraining.loading import dump_config
from cribo.training.interruption import requeue

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]


class Signal(L.Callback):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, number: signal.Signals, step: int) -> None:
        self.number = number
        self.step = step

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(
    number: signal.Signals,
    tiny: Tiny,
    train: Train,
    resumed: Train,
    whole: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    error = KeyboardInterrupt if number == signal.SIGINT else Interrupted
    with pytest.raises(error) as raised:
        train(tiny({"optim.epochs": 1}), "stopped", callbacks=[Signal(number, 2)])
    if isinstance(raised.value, Interrupted):
        assert raised.value.status == 128 + number
        assert f"stopped by {number.name} after step 3: continue with cribo pretrain --resume" in str(raised.value)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == handlers
    folder = tmp_path / "stopped"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step=00000003.ckpt"]
    assert not (folder / "summary.json").exists()
    again = resumed("stopped")
    expected = whole(tiny({"optim.epochs": 1}))
    assert again.rows == expected.rows
    for name, value in expected.weights.items():
        assert torch.equal(value, again.weights[name]), name


def test_a_signal_in_the_last_step_changes_nothing(tiny: Tiny, train: Train) -> None:
    assert train(tiny({"optim.epochs": 1}), callbacks=[Signal(signal.SIGTERM, 3)]).run.summary["steps"] == 4


def test_a_slurm_job_is_requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "called"
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" >> {written}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    requeue()
    assert not written.exists()
    monkeypatch.setenv("SLURM_JOB_ID", "41; rm -rf /")
    requeue()
    assert not written.exists()
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    requeue()
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "40")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    requeue()
    assert written.read_text().splitlines() == ["requeue 41", "requeue 40_3"]


_HANGS = """
import ctypes, os, signal, sys
import lightning as L
from cribo.pretraining import pretrain
class Hang(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            print("hangs", flush=True)
            mutex = ctypes.create_string_buffer(64)
            library = ctypes.CDLL(None)
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)  # waits for itself, and no signal wakes it
pretrain(sys.argv[1], out=sys.argv[2], name="run", callbacks=[Hang()])
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a futex to hang")
def test_a_second_signal_ends_a_process_that_hangs(tmp_path: Path, tiny: Tiny, commands: Commands) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(tiny()))
    begun = commands.fork_program(_HANGS, tmp_path / "config.yaml", tmp_path)
    while "hangs\n" not in begun.output:
        assert begun.wait(0.1) is None, begun.output
    assert begun.wait(0.5) is None
    os.kill(begun.pid, signal.SIGTERM)
    assert begun.wait(900) == -signal.SIGTERM
