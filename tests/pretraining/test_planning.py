"""Duration of a run, and runs planned by --minutes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cribo.pretraining import PretrainConfig, load_config, pretrain
from cribo.pretraining.planning import epochs_to_judge, with_epochs

Tiny = Callable[..., PretrainConfig]


def test_epochs_of_schedules_are_scaled_with_the_length() -> None:
    overrides = {"optim.warmup_epochs": 2, "losses.cross_image_from_epoch": 24, "score.every_epochs": 8}
    config = load_config("quickstart", {"optim.epochs": 48} | overrides)
    half = with_epochs(config, 24)
    assert (half.optim.epochs, half.optim.warmup_epochs) == (24, 1)
    assert (half.losses.cross_image_from_epoch, half.score.every_epochs) == (12, 4)
    assert with_epochs(config, 48) == config
    shortest = with_epochs(config, 1)
    assert shortest.losses.cross_image_from_epoch == 0  # losses that the longer run uses are on
    assert shortest.optim.freeze_last_layers_epochs == 0  # unchanged


def test_the_duration_is_estimated_from_the_first_steps(
    tiny: Tiny, tmp_path: Path, without_report: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cribo")
    pretrain(tiny({"optim.epochs": 5}), out=tmp_path, name="run")
    assert re.search(r"20 steps take about \d+:\d\d on this machine$", caplog.text, re.M)


@pytest.mark.parametrize(
    ("overrides", "judged"),
    [
        ({"seed": 3, "optim.epochs": 2, "losses.image": 0.5}, True),
        ({"backbone.name": "resnet34"}, False),
        ({"data.scenes.count": 64}, False),
        ({"objective": "dino"}, False),
    ],
)
def test_a_shorter_run_of_the_quickstart_is_too_short_to_judge(overrides: dict[str, Any], judged: bool) -> None:
    expected = load_config("quickstart").optim.epochs if judged else 0
    assert epochs_to_judge(load_config("quickstart", overrides)) == expected
