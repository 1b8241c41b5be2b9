from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pretraining.conftest import begun, resumed, train, whole, without_report  # noqa: F401 (fixtures)
from tests.pretraining.test_spread import assert_same_checkpoint

from cribo.data.samples import Batch, SampleDataset
from cribo.data.scenes import Scenes
from cribo.objectives import Objective
from cribo.pretraining import PretrainConfig, pretrain, resume
from cribo.training.checkpoints import checkpoint_files


def batch_of(objective: Objective, count: int = 4, first: int = 0) -> Batch:
    """Return the samples of some images in epoch 0."""
    dataset = SampleDataset(Scenes(16, size=40), objective.samples(), seed=0)
    return dataset.__getitems__([(0, image) for image in range(first, first + count)])


@pytest.fixture(autouse=True)
def _without_report(without_report: None) -> None:  # noqa: F811
    """Skip the report that each run would draw."""


@pytest.fixture
def resumed_state(tmp_path: Path) -> Callable[[PretrainConfig], dict[str, Any]]:
    """Train, resume from the second-last checkpoint, assert that results are equal, and return the final state."""

    def call(config: PretrainConfig) -> dict[str, Any]:
        folder = pretrain(config, out=tmp_path).folder
        last, *_ = checkpoint_files(folder)
        final = torch.load(last, weights_only=False)["state_dict"]
        for file in (last, folder / "summary.json", folder / "backbone.safetensors"):
            file.unlink()
        resume(folder)
        again = torch.load(last, weights_only=False)["state_dict"]
        assert_same_checkpoint(final, again, 0)
        return final

    return call
