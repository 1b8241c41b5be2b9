"""Small real runs and their results, for the tests of this folder."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from cribo.pretraining import PretrainConfig, Run, pretrain, resume
from cribo.pretraining.loading import dump_config
from cribo.training.checkpoints import checkpoint_files


@dataclass
class Trained:
    """A finished run."""

    run: Run

    @property
    def rows(self) -> list[dict[str, str]]:
        """The rows of metrics.csv, without times."""
        with (self.run.folder / "metrics.csv").open(newline="") as file:
            return [
                {name: value for name, value in row.items() if name not in ("seconds", "images_per_second")}
                for row in csv.DictReader(file)
            ]

    @property
    def checkpoint(self) -> dict[str, Any]:
        """The last checkpoint."""
        path = checkpoint_files(self.run.folder)[0]
        return torch.load(path, weights_only=True)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Student, teacher and centres."""
        return {name: value for name, value in self.checkpoint["state_dict"].items() if name != "_extra_state"}

    @property
    def bank(self) -> dict[str, Any]:
        """The state of the bank."""
        return self.checkpoint["state_dict"]["_extra_state"]["bank"]


@pytest.fixture
def without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip figures: they take longer than the training of these runs."""
    monkeypatch.setattr("cribo.pretraining.run.write_report", lambda *args, **kwargs: [])


@pytest.fixture
def train(tmp_path: Path, without_report: None) -> Callable[..., Trained]:
    """Train; a second call with the same name replaces the run."""

    def call(config: PretrainConfig, name: str = "run", callbacks: Sequence[Callback] = ()) -> Trained:
        return Trained(pretrain(config, out=tmp_path, name=name, overwrite=True, callbacks=callbacks))

    return call


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """Train, once for each configuration, and the callbacks of the first call; the runs must not be changed."""
    runs: dict[str, Trained] = {}

    def call(config: PretrainConfig, callbacks: Sequence[Callback] = ()) -> Trained:
        name = dump_config(config)
        if name not in runs:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("cribo.pretraining.run.write_report", lambda *args, **kwargs: [])
                out = tmp_path_factory.mktemp("whole")
                runs[name] = Trained(pretrain(config, out=out, name="run", callbacks=callbacks))
        return runs[name]

    return call


@pytest.fixture
def resumed(tmp_path: Path, without_report: None) -> Callable[..., Trained]:
    """Resume the run of a name."""

    def call(
        name: str = "run", callbacks: Sequence[Callback] = (), *, trust: bool = False, **overrides: Any
    ) -> Trained:
        return Trained(resume(tmp_path / name, callbacks=callbacks, overrides=overrides, trust=trust))

    return call


@pytest.fixture
def begun(tmp_path: Path, without_report: None) -> Callable[..., Trained]:
    """Start the run of a name, or continue it."""

    def call(config: PretrainConfig, name: str = "run", **options: Any) -> Trained:
        return Trained(pretrain(config, out=tmp_path, name=name, continue_run=True, **options))

    return call
