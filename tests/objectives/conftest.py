from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pretraining.conftest import begun, resumed, train, whole, without_report  # noqa: F401 (fixtures)
from tests.pretraining.test_spread import assert_same_checkpoint

from cribo.pretraining import PretrainConfig, pretrain, resume
from cribo.training.checkpoints import checkpoint_files


@pytest.fixture
def resumed_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[PretrainConfig], dict[str, Any]]:
    """Train, resume from the second-last checkpoint, assert that results are equal, and return the final state."""
    monkeypatch.setattr("cribo.pretraining.run.write_report", lambda *args, **kwargs: [])

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
