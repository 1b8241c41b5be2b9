"""A long run uses no more memory, files, threads or processes than a short one."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import theilslopes
from tests.commands import Commands, RunningCommand

from cribo.pretraining import PretrainConfig
from cribo.pretraining.loading import dump_config

pytestmark = pytest.mark.slow

# Steps of a few milliseconds, with all periodic work on.
SMALL: dict[str, Any] = {
    "data.scenes.count": 400,
    "data.scenes.size": 24,
    "views.size": 16,
    "backbone.args": {"patch_size": 8, "depth": 1, "embed_dim": 16, "num_heads": 2},
    "objects.num_objects": 3,
    "objects.group_size": 2,
    "objects.bank_images": 40,
    "head.hidden_dim": 16,
    "head.bottleneck_dim": 8,
    "head.prototypes": 16,
    "optim.batch_size": 4,
    "score.root": "scenes",
    "score.images": (4, 2),
    "score.neighbours": 5,
    "runtime.log_every": 10,
}
STEPS_PER_EPOCH = 100


@dataclass
class Usage:
    """Resources used by all processes of a run, at a step.

    Attributes:
        kib: resident memory in KiB; shared pages count for each process.
    """

    step: int
    kib: int
    files: int
    threads: int
    processes: int


def usage(started: RunningCommand, metrics: Path) -> Usage | None:
    """Return the current usage; None if no step is recorded yet, or a process ended meanwhile."""
    with contextlib.suppress(OSError, LookupError, ValueError):
        step = int(metrics.read_text().splitlines()[-1].partition(",")[0])
        found = Usage(step, 0, 0, 0, 0)
        for pid in started.processes():
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            found.kib += int(fields["VmRSS"].split()[0])
            found.threads += int(fields["Threads"])
            found.files += sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
            found.processes += 1
        return found
    return None


def watch(started: RunningCommand, metrics: Path, pause: float) -> list[Usage]:
    """Measure until the run ends."""
    seen: list[Usage] = []
    while started.wait(pause) is None:
        now = usage(started, metrics)
        if now is not None:
            seen.append(now)
    assert started.wait(0) == 0, started.output[-5000:]
    return seen


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.endurance), 2])
def test_nothing_grows(
    workers: int,
    tmp_path: Path,
    tiny: Callable[..., PretrainConfig],
    commands: Commands,
    figure: Callable[[str], None],
    endurance: bool,
) -> None:
    steps, warm_up, kib_a_step = (10_000, 2_000, 1.0) if endurance else (300, 100, 64.0)
    changes = {
        "data.workers": workers,
        "optim.epochs": steps // STEPS_PER_EPOCH,
        "score.every_epochs": 1,
        "runtime.checkpoint_every": STEPS_PER_EPOCH // 2,
    }
    (tmp_path / "config.yaml").write_text(dump_config(tiny({**SMALL, **changes})))
    began = time.monotonic()
    started = commands.fork("pretrain", "--config", tmp_path / "config.yaml", "--out", tmp_path, "--name", "run")
    seen = watch(started, tmp_path / "run" / "metrics.csv", steps / 30_000)
    seconds = time.monotonic() - began
    # At the end, a run draws figures, which needs memory.
    seen = [each for each in seen if warm_up <= each.step < steps]
    assert len(seen) > 30
    of_step = np.array([each.step for each in seen])
    mib = np.array([each.kib / 1024 for each in seen])
    slope, _, low, high = np.array(theilslopes(mib, of_step))
    third = len(seen) // 3
    counts = {
        name: [min(getattr(each, name) for each in part) for part in (seen[:third], seen[-third:])]
        for name in ("files", "threads", "processes")
    }
    figure(
        f"{steps:,} steps with {workers} loader workers in {seconds:.0f} s: memory grows by {1000 * slope:.3f} MiB per "
        f"1,000 steps (95 %: {1000 * low:.3f} to {1000 * high:.3f}) from {mib[0]:.0f} to {mib[-1]:.0f} MiB, "
        + ", ".join(f"{name} {first} -> {last}" for name, (first, last) in counts.items())
    )
    assert 1024 * slope < kib_a_step
    if workers and not endurance:
        del counts["files"]  # queued batches are in files, whose number varies in a short run
    for name, (first, last) in counts.items():
        assert last <= first, name
