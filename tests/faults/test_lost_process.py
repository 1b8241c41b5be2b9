"""If one of several processes is killed, the others end soon, and the same command resumes the run."""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.commands import WITHOUT_PICTURES, Commands, RunningCommand, seconds_until_ended
from tests.faults.runs import assert_same_run, last_row

from cribo.pretraining import PretrainConfig
from cribo.pretraining.loading import dump_config

pytestmark = pytest.mark.slow

LIMIT = 60  # seconds until all processes are gone
CHANGES: dict[str, Any] = {
    "data.workers": 1,
    "objects.group_size": 2,
    "optim.epochs": 8,
    "runtime.checkpoint_every": 3,
}
NOBODY, LIGHTNING, TORCHRUN = "nobody", "Lightning's launcher", "torchrun"


def begin(launcher: str, commands: Commands, *words: object) -> list[RunningCommand]:
    """Start two processes of one run."""
    if launcher == NOBODY:
        return commands.fork_all(2, *words, prelude=WITHOUT_PICTURES)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    launched = torchrun if launcher == TORCHRUN else ()
    return [commands.run(*launched, "cribo", *words, "--runtime.devices", "2")]


def process_of(rank: int, begun: Sequence[RunningCommand]) -> int:
    """Return the process that trains on a device."""
    if len(begun) > 1:
        return begun[rank].pid
    ranks = {pid: _environment(pid).get("LOCAL_RANK") for pid in begun[0].processes()}
    # A loader's worker has its parent's environment. With Lightning's launcher, the command itself is rank 0.
    found = [pid for pid, own in ranks.items() if own == str(rank) and ranks.get(_parent(pid)) != own]
    (pid,) = found or [begun[0].pid]
    return pid


def _environment(pid: int) -> dict[str, str]:
    parts = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(part.split("=", 1) for part in parts if "=" in part)


def _parent(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("PPid:")))


@pytest.mark.parametrize(
    ("launcher", "rank"),
    [
        (NOBODY, 1),  # the others start Python several times
        *(
            pytest.param(*case, marks=pytest.mark.endurance)
            for case in ((LIGHTNING, 0), (LIGHTNING, 1), (TORCHRUN, 0), (TORCHRUN, 1), (NOBODY, 0))
        ),
    ],
)
def test_the_others_end_and_the_run_resumes(
    launcher: str,
    rank: int,
    tmp_path: Path,
    tiny: Callable[..., PretrainConfig],
    commands: Commands,
    figure: Callable[[str], None],
    endurance: bool,
) -> None:
    draw = random.Random(f"{launcher} {rank}")
    config, run = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(dump_config(tiny(CHANGES)))
    words = ("pretrain", "--config", config, "--out", tmp_path, "--continue", "--name")
    begun = begin(launcher, commands, *words, "run")
    last = draw.randint(4, 15)
    while last_row(run) < last:
        assert all(each.wait(0.002) is None for each in begun), "".join(each.output[-5000:] for each in begun)
    time.sleep(draw.uniform(0, 0.1))
    os.kill(process_of(rank, begun), signal.SIGKILL)
    step = last_row(run)
    seconds = seconds_until_ended(begun, LIMIT)
    figure(
        f"SIGKILL to process {rank} of 2, started by {launcher}, after step {step}: all are gone {seconds:.1f} s later"
    )
    assert seconds < LIMIT
    assert all(each.wait(10) not in (0, None) for each in begun)
    said = "".join(each.output for each in begun)
    causes = {
        NOBODY: ("by peer",),
        LIGHTNING: ("terminated with code -9", "by peer"),  # depends on which is detected first
        TORCHRUN: ("Signal 9 (SIGKILL) received",),
    }
    if (launcher, rank) != (LIGHTNING, 0):  # the process that would log it was killed
        assert any(cause in said for cause in causes[launcher]), said[-5000:]

    again = begin(launcher if endurance else NOBODY, commands, *words, "run")
    whole = begin(NOBODY, commands, *words, "whole")
    for process in (*again, *whole):
        assert process.wait(600) == 0, process.output[-5000:]
    assert_same_run(run, tmp_path / "whole")
