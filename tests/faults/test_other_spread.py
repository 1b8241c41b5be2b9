"""A run that is stopped within an epoch resumes on another number of processes with equal results."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commands import WITHOUT_PICTURES, Commands
from torch import Tensor

from cribo.pretraining import PretrainConfig
from cribo.pretraining.loading import dump_config
from cribo.training.checkpoints import checkpoint_files

pytestmark = pytest.mark.endurance  # tests/pretraining/test_spread.py resumes a shorter run

TOLERANCE = 1e-9  # relative for losses; absolute for weights, centres, optimiser state and bank
STEPS_PER_EPOCH, EPOCHS = 5, 3
STEPS, STOP = STEPS_PER_EPOCH * EPOCHS, 8
CHANGES: dict[str, Any] = {
    "data.scenes.count": 16 * STEPS_PER_EPOCH,
    "data.workers": 1,
    "backbone.drop_path": 0.3,
    "objects.group_size": 2,
    "objects.bank_images": 40,  # full after three steps
    "losses.cross_image_from_epoch": 0,
    "optim.epochs": EPOCHS,
    "optim.batch_size": 16,
    "optim.micro_batches": 2,
    "optim.warmup_epochs": 0,
    "optim.freeze_last_layers_epochs": 0,
    "optim.clip": 0.3,
    "runtime.precision": "64-true",
    "runtime.log_every": 100,  # unread sums stay in the checkpoints, at full precision
    "runtime.keep_checkpoints": STEPS,
}
# The last process receives a signal within the epoch.
STOPPED = f"""{WITHOUT_PICTURES}
import signal
from cribo.pretraining.module import PretrainingModule as Module
step = Module.training_step
def stopped(module, *args):
    trainer = module.trainer
    if trainer.global_step == {STOP - 2} and trainer.global_rank == trainer.world_size - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(module, *args)
Module.training_step = stopped
"""


class Runs:
    """Runs of one configuration, on any number of processes.

    Args:
        folder: parent folder of the runs.
        config: their configuration.
        commands: starts them.
    """

    def __init__(self, folder: Path, config: PretrainConfig, commands: Commands) -> None:
        self.folder, self.commands = folder, commands
        (folder / "config.yaml").write_text(dump_config(config))

    def whole(self) -> Path:
        """An uninterrupted run on one process."""
        self._train("whole", 1, 1, expected=[0])
        return self.folder / "whole"

    def stopped(self) -> Path:
        """A run on two processes, stopped within an epoch."""
        if not (self.folder / "stopped").exists():
            self._train("stopped", 2, 100, expected=[143, 0], prelude=STOPPED)
        assert [path.name for path in checkpoint_files(self.folder / "stopped")] == [f"step={STOP:08d}.ckpt"]
        return self.folder / "stopped"

    def resumed(self, stopped: Path, processes: int) -> Path:
        """A copy of a stopped run that was resumed."""
        name = f"{stopped.name}-{processes}"
        shutil.copytree(stopped, self.folder / name)
        self._train(name, processes, 1, expected=[0] * processes)
        return self.folder / name

    def _train(
        self, name: str, processes: int, every: int, *, expected: list[int], prelude: str = WITHOUT_PICTURES
    ) -> None:
        words = ("--config", self.folder / "config.yaml", "--out", self.folder, "--name", name, "--continue")
        often = ("--runtime.checkpoint_every", every)
        begun = self.commands.fork_all(processes, "pretrain", *words, *often, prelude=prelude)
        found = [each.wait(600) for each in begun]
        assert found == expected, "".join(each.output[-5000:] for each in begun)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., PretrainConfig], commands: Commands) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), tiny(CHANGES), commands)


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Path:
    return runs.whole()


@pytest.mark.parametrize("processes", [1, 4])
def test_a_run_resumes_on_another_number_of_processes(
    processes: int, runs: Runs, whole: Path, figure: Callable[[str], None]
) -> None:
    resumed = runs.resumed(runs.stopped(), processes)
    names = [path.name for path in checkpoint_files(whole)][: STEPS - STOP]
    assert [path.name for path in checkpoint_files(resumed)][: STEPS - STOP] == names
    of_losses = of_state = 0.0
    for name in names:
        one, other = (torch.load(run / "checkpoints" / name, weights_only=True) for run in (whole, resumed))
        if name != names[0]:  # at the end, the sums have been read
            a, b = (losses_of(content) for content in (one, other))
            assert len(a) == 4
            assert (a > 0).all()
            of_losses = max(of_losses, ((a - b).abs() / a).max().item())
        a, b = (tensors_of(content) for content in (one, other))
        assert a.keys() == b.keys()
        for key, value in a.items():
            of_state = max(of_state, (value - b[key]).abs().max().item())
    figure(
        f"2 processes, stopped after step {STOP} of {STEPS}, resumed on {processes}: "
        f"losses differ by at most {of_losses:.1e} of themselves from a run that went through on 1, weights, centres, "
        f"optimiser and bank by {of_state:.1e}"
    )
    assert max(of_losses, of_state) < TOLERANCE


def losses_of(checkpoint: dict[str, Any]) -> Tensor:
    """Return the means of the losses and of their weighted total over the steps so far."""
    sums = checkpoint["cribo"]["sums"]
    return torch.stack([sums[name][0] / sums[name][1] for name in sorted(sums) if name.startswith("loss")])


def tensors_of(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """Return weights and centres, the optimiser's state, and the bank, by name."""
    weights = dict(checkpoint["state_dict"])
    bank = weights.pop("_extra_state")["bank"]
    (optimiser,) = checkpoint["optimizer_states"]
    state = {f"{number}.{name}": value for number, own in optimiser["state"].items() for name, value in own.items()}
    return {name: torch.as_tensor(value).double() for name, value in {**weights, **state, **bank}.items()}
