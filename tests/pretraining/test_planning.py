"""Runs planned by --minutes."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from cribo.pretraining import PretrainConfig, load_config, pretrain
from cribo.pretraining.planning import with_epochs

Tiny = Callable[..., PretrainConfig]


class Slower(L.Callback):
    """Delays every step after the timing."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        time.sleep(self.seconds)


def test_epochs_of_schedules_are_scaled_with_the_length() -> None:
    config = load_config("quickstart")
    half = with_epochs(config, 24)
    assert (half.optim.epochs, half.optim.warmup_epochs) == (24, 1)
    assert (half.losses.cross_image_from_epoch, half.score.every_epochs) == (12, 4)
    assert with_epochs(config, 48) == config
    shortest = with_epochs(config, 1)
    assert shortest.losses.cross_image_from_epoch == 0  # losses that the longer run uses are on
    assert shortest.optim.freeze_last_layers_epochs == 0  # unchanged


def test_a_planned_run_has_the_epochs_that_fit(tiny: Tiny, tmp_path: Path, without_report: None) -> None:
    run = pretrain(tiny(), out=tmp_path, name="run", minutes=0.02)
    assert run.summary["steps"] == 4 * run.summary["epochs"]
    assert load_config(run.folder).optim.epochs == run.summary["epochs"]


def test_a_run_ends_after_twice_the_time_if_the_machine_becomes_slower(
    tiny: Tiny, tmp_path: Path, without_report: None, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny({"optim.warmup_epochs": 0})
    run = pretrain(config, out=tmp_path, name="run", minutes=0.05, callbacks=[Slower(1.0)])
    planned = 4 * run.summary["epochs"]
    assert 0 < run.summary["steps"] < planned
    assert f"of {planned}, after twice the planned time" in caplog.text
    assert (run.folder / "backbone.safetensors").is_file()


def test_a_finished_run_is_not_resumed_with_another_configuration(
    tiny: Tiny, tmp_path: Path, without_report: None
) -> None:
    pretrain(tiny(), out=tmp_path, name="run")
    assert pretrain(tiny(), out=tmp_path, name="run", continue_run=True).summary["steps"] == 12
    with pytest.raises(ValueError, match=r"has optim.lr 0.02, not 0.05"):
        pretrain(tiny({"optim.lr": 0.05}), out=tmp_path, name="run", continue_run=True)
