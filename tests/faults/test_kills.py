"""A run that is killed again and again, and started again by the same command, ends as one that never was."""

import collections
import csv
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from PIL import Image

from cribo.pretraining import PretrainConfig
from cribo.pretraining.checkpoints import checkpoint_files, last_checkpoint
from cribo.pretraining.presets import dump_config

if TYPE_CHECKING:
    from tests.faults.conftest import Commands, Started

pytestmark = pytest.mark.slow

STEPS_PER_EPOCH = 5
CHANGES: dict[str, Any] = {
    "data.scenes.count": 8 * STEPS_PER_EPOCH,
    "data.workers": 2,
    "backbone.drop_path": 0.3,
    "objects.group_size": 2,
    "optim.micro_batches": 2,
    "score.root": "scenes",
    "score.images": (4, 2),
    "score.every_epochs": 2,
    "runtime.log_every": 2,
    "runtime.checkpoint_every": 3,
}
WITHOUT_PICTURES = "import cribo.pretraining.run as run; run.write_report = lambda *args, **kwargs: []"
CLOCK = ("seconds", "images_per_second")
SECONDS_TO_CLEAR = 60


@dataclass
class Kill:
    """Where a SIGKILL fell.

    Attributes:
        moment: starting, step, checkpoint or report.
        alone: the command was killed, and its loader's workers were left.
        step: the last one that metrics.csv told of.
        cleared: seconds until the last process was gone.
    """

    moment: str
    alone: bool
    step: int
    cleared: "Future[float]"


class Victim:
    """One run, started by the same words every time.

    Args:
        folder: of the run.
        steps: that it has.
        start: starts it.
        draw: where the moments come from.
    """

    def __init__(self, folder: Path, steps: int, start: "Callable[[], Started]", draw: random.Random) -> None:
        self.folder, self.steps, self.start, self.draw = folder, steps, start, draw
        self.kills: list[Kill] = []
        self._left: set[Path] = set()
        self._watchers = ThreadPoolExecutor(64)
        self._moments = {
            "starting": self._starting,
            "step": self._step,
            "checkpoint": self._checkpoint,
            "report": self._report,
        }

    def kill(self, moment: str, *, alone: bool) -> None:
        """Start the run, wait for the moment, and kill it."""
        before = self.step
        self._left = self._parts()
        started = self.start()
        for _ in self._moments[moment](started):
            assert started.wait(0) is None, f"ended before it was to be killed: {started.said[-5000:]}"
        started.kill(all_of_it=not alone)
        cleared = self._watchers.submit(started.seconds_to_the_end, SECONDS_TO_CLEAR)
        assert started.wait(60) == -signal.SIGKILL, started.said[-5000:]
        self.kills.append(Kill(self._fell(before), alone, self.step, cleared))

    @property
    def step(self) -> int:
        """The last that metrics.csv tells of; the end of the file may be half a row."""
        path = self.folder / "metrics.csv"
        rows = path.read_text().splitlines(keepends=True)[1:] if path.is_file() else []
        return max((int(row.partition(",")[0]) for row in rows if row.endswith("\n")), default=0)

    @property
    def half_written(self) -> bool:
        """Whether there is a checkpoint that is not whole, beside those that kills before have left."""
        return bool(self._parts() - self._left)

    @property
    def trained(self) -> bool:
        """Whether there is a checkpoint of the last step."""
        return (self.folder / "checkpoints" / f"step={self.steps:08d}.ckpt").is_file()

    def _parts(self) -> set[Path]:
        return set(self.folder.glob("checkpoints/.step=*.part"))

    def _fell(self, before: int) -> str:
        if self.half_written:
            return "checkpoint"
        if self.trained:
            return "report"
        return "step" if self.step > before else "starting"

    # Each of these waits for its moment and yields now and then, so that an early end is found.

    def _starting(self, started: "Started") -> Iterator[None]:
        yield from _pause(self.draw.uniform(0, 1.5))

    def _step(self, started: "Started") -> Iterator[None]:
        last = self.step + 2 * self.draw.randint(1, 4)
        while self.step < last:
            yield from _pause(0.002)
        yield from _pause(self.draw.uniform(0, 0.1))

    def _checkpoint(self, started: "Started") -> Iterator[None]:
        while True:
            while not self.half_written:
                yield from _pause(0.0005)
            yield from _pause(self.draw.uniform(0, 0.02))
            os.kill(started.pid, signal.SIGSTOP)  # so that what is seen is so when the kill comes
            if self.half_written:
                return
            os.kill(started.pid, signal.SIGCONT)

    def _report(self, started: "Started") -> Iterator[None]:
        while not self.trained:
            yield from _pause(0.002)
        yield from _pause(self.draw.uniform(0, 1.5))


def _pause(seconds: float) -> Iterator[None]:
    time.sleep(seconds)
    yield


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if name not in CLOCK} for row in csv.DictReader(file)]


def files_of(run: Path) -> set[str]:
    """What a run has left, but for its pictures, and its logs for TensorBoard, of which each start has its own."""
    return {
        str(path.relative_to(run))
        for path in run.rglob("*")
        if path.is_file() and not path.name.startswith("events.") and path.suffix != ".png"
    }


def assert_identical(found: Any, expected: Any, where: str = "checkpoint") -> None:
    """The same bit for bit, in whatever dictionaries and lists."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_identical(found[name], value, f"{where}.{name}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for place, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_identical(a, b, f"{where}.{place}")
    else:
        assert found == expected, where


def assert_same_run(run: Path, whole: Path) -> None:
    assert rows_of(run) == rows_of(whole)
    assert files_of(run) == files_of(whole)
    assert (run / "backbone.safetensors").read_bytes() == (whole / "backbone.safetensors").read_bytes()
    for path, expected in zip(checkpoint_files(run), checkpoint_files(whole), strict=True):
        assert path.name == expected.name
        assert_identical(*(torch.load(each, weights_only=True) for each in (path, expected)))


def test_a_run_killed_at_random_moments_ends_as_one_that_was_not(
    tmp_path: Path,
    tiny: Callable[..., PretrainConfig],
    commands: "Commands",
    figure: Callable[[str], None],
    endurance: bool,
) -> None:
    if endurance:
        moments = ["starting"] * 4 + ["step"] * 9 + ["checkpoint"] * 5
        epochs, at_the_end = 30, 2
    else:
        moments = ["starting", "step", "checkpoint", "checkpoint"]
        epochs, at_the_end = 7, 1
    draw = random.Random(0)
    draw.shuffle(moments)
    moments += ["report"] * at_the_end
    config = tmp_path / "config.yaml"
    config.write_text(dump_config(tiny({**CHANGES, "optim.epochs": epochs})))
    words = ("pretrain", "--config", config, "--out", tmp_path, "--continue", "--name")
    whole = commands.fork(*words, "whole", prelude=WITHOUT_PICTURES)
    assert whole.wait(600) == 0, whole.said[-5000:]

    victim = Victim(tmp_path / "run", epochs * STEPS_PER_EPOCH, lambda: commands.fork(*words, "run"), draw)
    for turn, moment in enumerate(moments):
        victim.kill(moment, alone=turn % 2 == 0)
    last = victim.start()
    assert last.wait(600) == 0, last.said[-5000:]

    assert_same_run(victim.folder, tmp_path / "whole")
    assert all(Image.open(path).width > 100 for path in (victim.folder / "report").glob("*.png"))
    cleared = max(kill.cleared.result() for kill in victim.kills)
    assert cleared < SECONDS_TO_CLEAR
    fell = collections.defaultdict(list)
    for kill in victim.kills:
        fell[kill.moment].append(str(kill.step))
    assert len(fell["checkpoint"]) >= moments.count("checkpoint")
    assert len(fell["step"]) >= moments.count("step") // 2
    assert fell["report"]
    where = "; ".join(f"{len(steps)} in {moment} (after step {', '.join(steps)})" for moment, steps in fell.items())
    figure(
        f"{len(moments)} SIGKILLs in one run of {victim.steps} steps, with 2 loader workers and 2 micro-batches: {where}. "
        f"{sum(kill.alone for kill in victim.kills)} hit the command alone, its workers were gone at most "
        f"{cleared:.1f} s later. Weights, bank, centres, optimiser and metrics.csv: identical bit for bit"
    )
