"""A run does not depend on its distribution over processes."""

import csv
import dataclasses
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.commands import WITHOUT_PICTURES, Commands, RunningCommand, free_port
from torch import Tensor

from cribo.base.job import RECORD
from cribo.pretraining import PretrainConfig
from cribo.training.checkpoints import checkpoint_files

Tiny = Callable[..., PretrainConfig]

STEPS = 10
KILLED_AT = 6  # within the second epoch
# All three losses from the first step, with all options that could depend on the distribution.
COMMON: dict[str, Any] = {
    "data.scenes.count": 80,
    "backbone.drop_path": 0.3,
    "objects.group_size": 2,
    "objects.bank_images": 40,  # full after a few steps
    "losses.cross_image_from_epoch": 0,
    "optim.batch_size": 16,
    "optim.epochs": 2,
    "optim.warmup_epochs": 0,
    "optim.freeze_last_layers_epochs": 0,
    "optim.clip": 0.3,
    "runtime.checkpoint_every": 2,
    "runtime.keep_checkpoints": STEPS,
    "runtime.log_every": 100,  # unread sums stay in the checkpoints, at full precision
}
# With layer norms: on CPUs, batch norms use the statistics of one process.
CONVOLUTIONS = {
    "backbone__name": "convnext_atto",
    "backbone__args": {"dims": [8, 8, 16, 16], "depths": [1, 1, 2, 1]},
    "views__size": 64,
}
# Tolerances: relative for losses; absolute for weights, centres and the bank.
TOLERANCES = {"64-true": (1e-9, 1e-9), "32-true": (1e-5, 1e-4)}

# One process of a run.
PROGRAM = """
import faulthandler, pickle
faulthandler.enable()  # a process that libraries bring down says where
import cribo.pretraining.run as run
run.write_report = lambda *args, **kwargs: []
callbacks = []
path, out, name = sys.argv[1:]
{prelude}
with open(path, "rb") as file:
    config = pickle.load(file)
run.pretrain(config, out=out, name=name, callbacks=callbacks)
"""

# A target that is not finite, on the last process only.
POISON = """
import lightning as L
class Poison(L.Callback):
    def on_train_batch_start(self, trainer, module, *args):
        if trainer.global_step == 5 and trainer.global_rank == trainer.world_size - 1:
            module.objective.image_centre.value.fill_(float("nan"))
callbacks = [Poison()]
"""


# A signal to the last process only.
STOP = f"""
import os, signal
import lightning as L
class Stop(L.Callback):
    def on_train_batch_end(self, trainer, module, *args):
        if trainer.global_step == {KILLED_AT - 1} and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
callbacks = [Stop()]
"""

# Resume a run instead of starting it.
RESUME = """
run.resume(f"{out}/{name}", overrides={"runtime.devices": %d})
sys.exit()
"""


class Runs:
    """Trains the same configuration on one or several processes, once each."""

    def __init__(self, folder: Path, tiny: Tiny, commands: Commands, common: Mapping[str, Any] = COMMON) -> None:
        self.folder, self.tiny, self.commands, self.common = folder, tiny, commands, common

    def config(self, processes: int, **changes: Any) -> PretrainConfig:
        own = {name.replace("__", "."): value for name, value in changes.items()}
        return self.tiny({**self.common, **own, "runtime.devices": processes})

    def __call__(self, processes: int, **changes: Any) -> Path:
        """Return the run folder; names of overrides have two underscores instead of a dot."""
        name = "-".join(str(value) for value in (processes, *changes.values()))
        if not (self.folder / name).exists():
            config = self.folder / f"{name}.pickle"  # parsing a file of options takes as long as five steps
            config.write_bytes(pickle.dumps(self.config(processes, **changes)))
            for code, said in self.train(processes, config):
                assert code == 0, said[-5000:]
        return self.folder / name

    def resume(self, folder: Path, processes: int) -> Path:
        """Resume a copy of a run from within an epoch on a number of processes, and return its folder."""
        name = f"{folder.name}-resumed-on-{processes}"
        half = self.folder / name
        (half / "checkpoints").mkdir(parents=True)
        for file in ("config.yaml", RECORD):
            shutil.copy(folder / file, half)
        shutil.copy(checkpoint_path(folder, KILLED_AT), half / "checkpoints")
        for code, said in self.train(processes, self.folder / f"{name}.pickle", RESUME % processes):
            assert code == 0, said[-5000:]
        return half

    def train(self, processes: int, config: Path, prelude: str = "") -> list[tuple[int | None, str]]:
        """Return the exit status and output of each process."""
        program = PROGRAM.replace("{prelude}", prelude)
        started = self.commands.fork_program_all(processes, program, config, self.folder, config.stem)
        return [(each.wait(900), each.output) for each in started]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, commands: Commands) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), tiny, commands)


@dataclasses.dataclass
class State:
    """Content of a checkpoint: sums of losses and metrics since the start, weights and centres, and the bank."""

    sums: dict[str, Tensor]
    weights: dict[str, Tensor]
    bank: dict[str, Tensor]


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step={step:08d}.ckpt"


def states(folder: Path) -> list[State]:
    """The content of each checkpoint, the earliest first."""
    found = []
    for path in reversed(checkpoint_files(folder)):
        checkpoint = torch.load(path, weights_only=False)
        weights = checkpoint["state_dict"]
        bank = {name: torch.as_tensor(value) for name, value in weights.pop("_extra_state")["bank"].items()}
        found.append(State(checkpoint["cribo"]["sums"], weights, bank))
    return found


def losses(found: Sequence[State]) -> Tensor:
    """(checkpoints - 1, 3) the three losses between checkpoints; the last sums are read before they are saved."""
    names = ("loss_image", "loss_cross_view", "loss_cross_image")
    sums = torch.stack([torch.stack([state.sums[name] for name in names]) for state in found[:-1]])
    numerators, denominators = sums.diff(dim=0, prepend=torch.zeros_like(sums[:1])).unbind(dim=-1)
    return numerators / denominators


def assert_same(one: Path, spread: Path, precision: str, *, image_loss: bool = True) -> None:
    loss, weight = TOLERANCES[precision]
    alone, shared = states(one), states(spread)
    assert alone[-1].weights["teacher.head.mlp.0.weight"].dtype == getattr(torch, f"float{precision[:2]}")
    assert ((losses(alone) > 0) == torch.tensor([image_loss, True, True])).all()
    torch.testing.assert_close(losses(shared), losses(alone), rtol=loss, atol=loss)
    for step, (a, b) in enumerate(zip(alone, shared, strict=True), start=1):
        assert a.weights.keys() == b.weights.keys()
        for name, value in a.weights.items():
            torch.testing.assert_close(b.weights[name], value, rtol=0, atol=weight, msg=lambda m, n=name: f"{n}: {m}")
        for name in ("images", "counts", "oldest"):
            assert torch.equal(a.bank[name], b.bank[name]), f"{name} of the bank at step {step}"
        torch.testing.assert_close(b.bank["rows"], a.bank["rows"], rtol=weight, atol=weight)
    rows = [next(csv.DictReader((folder / "metrics.csv").open(newline=""))) for folder in (one, spread)]
    for name in ("loss", "loss_image", "loss_cross_view", "loss_cross_image"):
        assert float(rows[1][name]) == pytest.approx(float(rows[0][name]), rel=max(loss, 1e-7)), name
    for name in ("bootstrapping_ratio", "objects_per_image"):
        assert float(rows[1][name]) == pytest.approx(float(rows[0][name]), rel=1e-6), name


@pytest.mark.parametrize(
    ("processes", "precision", "centring", "micro_batches"),
    [
        (2, "64-true", "mean", 2),
        (2, "64-true", "sinkhorn", 1),
        pytest.param(2, "32-true", "mean", 2, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.endurance)
            for case in (
                (4, "64-true", "mean", 1),
                (2, "64-true", "sinkhorn", 2),
                (4, "32-true", "mean", 2),
                (2, "32-true", "sinkhorn", 1),
                (4, "64-true", "sinkhorn", 2),
            )
        ),
    ],
)
def test_a_run_does_not_depend_on_its_distribution(
    runs: Runs, processes: int, precision: str, centring: str, micro_batches: int
) -> None:
    changes = {
        "runtime__precision": precision,
        "losses__centring": centring,
        "optim__micro_batches": micro_batches,
    }
    assert_same(runs(1, **changes), runs(processes, **changes), precision)


def assert_same_checkpoint(a: Any, b: Any, tolerance: float, name: str = "") -> None:
    """Assert equal entries, in the same order and of the same types, tensors up to a tolerance."""
    if isinstance(a, dict):
        assert list(a) == list(b), name
        for key, value in a.items():
            assert_same_checkpoint(value, b[key], tolerance, f"{name}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), name
        for key, value in enumerate(a):
            assert_same_checkpoint(value, b[key], tolerance, f"{name}.{key}")
    elif isinstance(a, Tensor):
        assert a.device == b.device
        torch.testing.assert_close(b, a, rtol=0, atol=tolerance, msg=lambda m: f"{name}: {m}")
    else:
        assert (type(a), a) == (type(b), b), name


def last(folder: Path) -> dict[str, Any]:
    """Return the last checkpoint, without options of devices."""
    checkpoint = torch.load(checkpoint_files(folder)[0], weights_only=True)
    del checkpoint["cribo"]["config"], checkpoint["callbacks"]
    return checkpoint


PRECISE: dict[str, Any] = {"runtime__precision": "64-true", "losses__centring": "mean", "optim__micro_batches": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {
            "optim__freeze_last_layers_epochs": 1,
            "backbone__checkpointing": "selective",
            "losses__object_neighbours": 0.5,
            "losses__patch_neighbours": 0.5,
            "losses__patch_bank": 320,
        },
        # No gradient reaches the last layer of the image level.
        {"optim__freeze_backbone_epochs": 1, "losses__image": 0.0, "losses__cross_view": 2.0, **CONVOLUTIONS},
    ],
)
def test_checkpoints_do_not_depend_on_the_distribution(runs: Runs, changes: dict[str, Any]) -> None:
    one, two = runs(1, **PRECISE | changes), runs(2, **PRECISE | changes)
    assert_same(one, two, "64-true", image_loss="losses__image" not in changes)
    assert_same_checkpoint(last(one), last(two), 1e-9)
    a, b = (safetensors.torch.load_file(folder / "backbone.safetensors") for folder in (one, two))
    assert_same_checkpoint(a, b, 1e-9)


@pytest.mark.parametrize(
    ("begun", "processes"),
    [(2, 1), (1, 2), *(pytest.param(2, processes, marks=pytest.mark.endurance) for processes in (2, 4))],
)
def test_a_run_resumes_on_another_number_of_processes(runs: Runs, begun: int, processes: int) -> None:
    first = runs(begun, **PRECISE)
    through, tolerance = (first, 0) if processes == begun else (runs(1, **PRECISE), 1e-9)
    assert_same_checkpoint(last(through), last(runs.resume(first, processes)), tolerance)


def test_a_signal_to_another_rank_than_0_stops_all(runs: Runs) -> None:
    config = runs.folder / "stopped.pickle"
    config.write_bytes(pickle.dumps(runs.config(2, **PRECISE, runtime__checkpoint_every=100)))
    for code, said in runs.train(2, config, STOP):
        assert code == 1
        assert f"stopped by SIGTERM after step {KILLED_AT}" in said
    stopped, through = (
        torch.load(checkpoint_path(folder, KILLED_AT), weights_only=True)
        for folder in (runs.folder / "stopped", runs(2, **PRECISE))
    )
    for kind in ("state_dict", "optimizer_states"):
        assert_same_checkpoint(through[kind], stopped[kind], 0)


@pytest.mark.slow
def test_processes_that_find_no_objects(runs: Runs) -> None:
    changes = {
        "objects__position_weight": 10.0,
        "runtime__checkpoint_every": 1,
        "data__scenes__count": 40,
        "optim__batch_size": 8,
        "losses__centring": "mean",
        "views__area": (0.01, 0.02),
        "runtime__precision": "64-true",
    }
    one, four = runs(1, **changes), runs(4, **changes)
    # (10, 4): objects that each of the four processes found.
    found = torch.stack([state.bank["counts"][-8:].view(4, 2).sum(dim=1) for state in states(four)])
    assert (found.sum(dim=1) == 0).any()
    assert ((found.sum(dim=1) > 0) & (found == 0).any(dim=1)).any()
    for a, b in zip(states(one), states(four), strict=True):
        for name, value in a.weights.items():
            torch.testing.assert_close(b.weights[name], value, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(a.bank["counts"], b.bank["counts"])
        assert torch.equal(a.bank["images"], b.bank["images"])


def test_a_loss_that_is_not_finite_on_one_process_stops_all(runs: Runs, tmp_path: Path) -> None:
    config = tmp_path / "poisoned.pickle"
    changes = {"runtime__checkpoint_every": 2, "losses__centring": "mean"}
    config.write_bytes(pickle.dumps(runs.config(2, **changes)))
    for code, said in runs.train(2, config, POISON):
        assert code == 1
        assert "NonFiniteLoss: a loss was not finite, seen at step 6" in said
    kept = sorted(path.name for path in (runs.folder / config.stem / "checkpoints").iterdir())
    assert kept == ["step=00000002.ckpt", "step=00000004.ckpt"]


def assert_done(started: Sequence[RunningCommand]) -> str:
    """Assert that all processes exit with 0; return their output."""
    codes = [each.wait(900) for each in started]
    said = "".join(each.output for each in started)
    assert codes == [0] * len(started), said[-5000:]
    return said


def assert_one_whole_run(out: Path, name: str) -> None:
    assert [path.name for path in out.iterdir()] == [name]
    left = {path.name for path in (out / name).iterdir()}
    assert {"config.yaml", "summary.json", "metrics.csv", "backbone.safetensors", "checkpoints"} <= left


@pytest.mark.slow
def test_processes_started_by_the_command(runs: Runs, commands: Commands, tmp_path: Path) -> None:
    one = runs(1, **PRECISE)
    out = tmp_path / "runs"
    pretrain = ("cribo", "pretrain", "--config", one / "config.yaml", "--out", out, "--name", "run")
    said = assert_done([commands.run(*pretrain, "--runtime.devices", "2")])
    assert said.count("to repeat it") == 1  # logged by rank 0 only
    assert_one_whole_run(out, "run")
    assert (out / "run" / "report" / "losses.png").is_file()
    assert_same(one, out / "run", "64-true")


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.endurance)])
def test_two_machines(torchrun: bool, runs: Runs, commands: Commands, tmp_path: Path) -> None:
    """Two launchers at different addresses form one run, or processes in the environment that these set."""
    one = runs(1, **PRECISE)
    out = tmp_path / "runs"
    # Without a name, each of two processes would create its own folder.
    pretrain = ("pretrain", "--config", one / "config.yaml", "--out", out)
    if torchrun:
        meeting = ("--rdzv-id", "cribo", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
        launcher = ("torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meeting)
        spread = ("--runtime.devices", "1", "--runtime.num_nodes", "2")
        started = [
            commands.run(*launcher, "--local-addr", f"127.0.0.{machine}", "-m", "cribo", *pretrain, *spread)
            for machine in (1, 2)
        ]
    else:
        started = commands.fork_all(2, *pretrain, machines=2, prelude=WITHOUT_PICTURES)
    assert_done(started)
    assert_one_whole_run(out, one.name)
    assert_same(one, out / one.name, "64-true")
