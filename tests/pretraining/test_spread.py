"""A run is the same however it is spread over processes."""

import csv
import dataclasses
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cribo.pretraining import PretrainConfig
from cribo.pretraining.presets import dump_config

Tiny = Callable[..., PretrainConfig]

STEPS = 20
# All three losses from the first step, with everything on that could depend on the spread.
COMMON: dict[str, Any] = {
    "data.scenes.count": 80,
    "backbone.drop_path": 0.3,
    "objects.group_size": 2,
    "objects.bank_images": 40,  # full after a few steps
    "losses.cross_image_from_epoch": 0,
    "optim.batch_size": 16,
    "optim.epochs": 4,
    "optim.warmup_epochs": 0,
    "optim.freeze_last_layers_epochs": 0,
    "optim.clip": 0.3,
    "runtime.checkpoint_every": 1,
    "runtime.keep_checkpoints": STEPS,
    "runtime.log_every": 100,  # what was not read stays in the checkpoints, with all its digits
}
# What runs may differ by: losses, relatively; weights, centres and what is in the bank, absolutely.
TOLERANCES = {"64-true": (1e-9, 1e-9), "32-true": (1e-5, 1e-4)}

# One process of a run, with the environment that torchrun would give it.
PROGRAM = """
import os, sys
os.environ |= environment
file = os.open(log, os.O_WRONLY | os.O_CREAT)
os.dup2(file, 1)
os.dup2(file, 2)
import cribo.pretraining.run as run
run.write_report = lambda *args, **kwargs: []
run.pretrain(config, out=out, name=name)
"""


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@pytest.fixture(scope="module")
def forks() -> ForkServerContext:
    """Starts processes that have imported already what takes far longer than these runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cribo.pretraining.run", "torch._dynamo"])
    return context


class Runs:
    """Trains the same on one process or on several, once each."""

    def __init__(self, folder: Path, tiny: Tiny, forks: ForkServerContext) -> None:
        self.folder, self.tiny, self.forks = folder, tiny, forks
        self.program = folder / "program.py"
        self.program.write_text(PROGRAM)

    def config(self, processes: int, **changes: Any) -> PretrainConfig:
        own = {name.replace("__", "."): value for name, value in changes.items()}
        return self.tiny({**COMMON, **own, "runtime.devices": processes})

    def __call__(self, processes: int, **changes: Any) -> Path:
        """The run folder; changes of the configuration have two underscores for a dot."""
        name = "-".join(str(value) for value in (processes, *changes.values()))
        if not (self.folder / name).exists():
            config = self.folder / f"{name}.yaml"
            config.write_text(dump_config(self.config(processes, **changes)))
            self._train(processes, config)
        return self.folder / name

    def _train(self, processes: int, config: Path) -> None:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "none"}
        sizes = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": "0"}
        logs = [config.with_suffix(f".{rank}.log") for rank in range(processes)]
        started = []
        for rank, log in enumerate(logs):
            given = {
                "environment": {**address, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                "log": str(log),
                "config": str(config),
                "out": str(self.folder),
                "name": config.stem,
            }
            # A daemon, for a test that fails must not wait for it.
            process = self.forks.Process(target=runpy.run_path, args=(str(self.program), given), daemon=True)
            process.start()
            started.append(process)
        for process, log in zip(started, logs, strict=True):
            process.join(timeout=300)
            assert process.exitcode == 0, log.read_text()[-5000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, forks: ForkServerContext) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), tiny, forks)


@dataclasses.dataclass
class State:
    """What a checkpoint holds: sums of losses since the start, weights and centres, and the bank."""

    sums: Tensor | None
    weights: dict[str, Tensor]
    bank: dict[str, Tensor]


def states(folder: Path) -> list[State]:
    """After each step."""
    found = []
    for step in range(1, STEPS + 1):
        checkpoint = torch.load(folder / "checkpoints" / f"step={step:08d}.ckpt", weights_only=False)
        own = checkpoint["cribo"]
        bank = {name: torch.as_tensor(value) for name, value in own["bank"].items()}
        found.append(State(own["sums"], checkpoint["state_dict"], bank))
    return found


def losses(found: Sequence[State]) -> Tensor:
    """(STEPS - 1, 3) the three losses of each step; the sums of the last one are read before it is saved."""
    sums = torch.stack([state.sums[:3] for state in found if state.sums is not None])
    assert len(sums) == STEPS - 1
    return sums.diff(dim=0, prepend=torch.zeros_like(sums[:1]))


def assert_same(one: Path, spread: Path, precision: str) -> None:
    loss, weight = TOLERANCES[precision]
    alone, shared = states(one), states(spread)
    assert alone[-1].weights["teacher.head.mlp.0.weight"].dtype == getattr(torch, f"float{precision[:2]}")
    assert (losses(alone)[1:] > 0).all()  # the bank is empty in the first step
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
        (4, "64-true", "mean", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, "64-true", "mean", 1),
                (2, "64-true", "sinkhorn", 2),
                (4, "64-true", "sinkhorn", 2),
                (4, "64-true", "mean", 2),
                (2, "32-true", "mean", 2),
                (2, "32-true", "sinkhorn", 1),
                (4, "32-true", "mean", 2),
                (4, "32-true", "sinkhorn", 1),
            )
        ),
    ],
)
def test_a_run_does_not_depend_on_its_spread(
    runs: Runs, processes: int, precision: str, centring: str, micro_batches: int
) -> None:
    changes = {
        "runtime__precision": precision,
        "losses__centring": centring,
        "optim__micro_batches": micro_batches,
    }
    assert_same(runs(1, **changes), runs(processes, **changes), precision)


def command(config: Path, out: Path, *words: str) -> list[str]:
    return ["pretrain", "--config", str(config), "--out", str(out), "--name", "run", *words]


@pytest.mark.slow
def test_processes_that_the_command_starts_itself(runs: Runs, tmp_path: Path) -> None:
    changes = {"runtime__precision": "64-true", "losses__centring": "mean", "optim__micro_batches": 2}
    one = runs(1, **changes)
    words = command(one / "config.yaml", tmp_path / "runs", "--runtime.devices", "2")
    done = subprocess.run(
        [sys.executable, "-m", "cribo.cli", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert_same(one, tmp_path / "runs" / "run", "64-true")
