"""A run that is killed and restarted repeatedly has the results of an uninterrupted one."""

import collections
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.commands import WITHOUT_PICTURES, Commands, RunningCommand, seconds_until_ended
from tests.faults.runs import assert_same_run, last_row

from cribo.pretraining import PretrainConfig
from cribo.pretraining.loading import dump_config

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
SECONDS_TO_CLEAR = 60
WRITTEN_AT_THE_END = ("checkpoints", "backbone.safetensors", "report/losses.png", "report/bootstrapping_ratio.png")


@dataclass
class Kill:
    """Record of a SIGKILL.

    Attributes:
        moment: starting, step, checkpoint or report.
        alone: whether only the command was killed, not its loader's workers.
        step: last step in metrics.csv.
        cleared: seconds until the last process was gone.
    """

    moment: str
    alone: bool
    step: int
    cleared: "Future[float]"


class KilledRun:
    """A run that is started by the same command every time.

    Args:
        folder: folder of the run.
        steps: number of steps.
        start: function that starts the run.
        draw: source of the random moments.
    """

    def __init__(self, folder: Path, steps: int, start: Callable[[], RunningCommand], draw: random.Random) -> None:
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
        before = last_row(self.folder)
        self._left = self._parts()
        started = self.start()
        for _ in self._moments[moment](started):
            assert started.wait(0) is None, f"ended before the kill: {started.output[-5000:]}"
        started.kill(all_of_it=not alone)
        cleared = self._watchers.submit(seconds_until_ended, [started], SECONDS_TO_CLEAR)
        assert started.wait(60) == -signal.SIGKILL, started.output[-5000:]
        self.kills.append(Kill(self._fell(before), alone, last_row(self.folder), cleared))

    @property
    def half_written(self) -> bool:
        """Whether there is a partial checkpoint, in addition to those left by earlier kills."""
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
        return "step" if last_row(self.folder) > before else "starting"

    # Each of these waits for its moment and yields regularly, so that an early end is detected.

    def _starting(self, started: RunningCommand) -> Iterator[None]:
        yield from _pause(self.draw.uniform(0, 1.5))

    def _step(self, started: RunningCommand) -> Iterator[None]:
        last = last_row(self.folder) + 2 * self.draw.randint(1, 4)
        while last_row(self.folder) < last:
            yield from _pause(0.002)
        yield from _pause(self.draw.uniform(0, 0.1))

    def _checkpoint(self, started: RunningCommand) -> Iterator[None]:
        while True:
            while not self.half_written:
                yield from _pause(0.0005)
            yield from _pause(self.draw.uniform(0, 0.02))
            os.kill(started.pid, signal.SIGSTOP)  # so that the state does not change before the kill
            if self.half_written:
                return
            os.kill(started.pid, signal.SIGCONT)

    def _report(self, started: RunningCommand) -> Iterator[None]:
        reached = self.folder / self.draw.choice(WRITTEN_AT_THE_END)
        while not (self.trained and reached.exists()):
            yield from _pause(0.002)


def _pause(seconds: float) -> Iterator[None]:
    time.sleep(seconds)
    yield


def test_a_run_killed_at_random_moments_has_identical_results(
    tmp_path: Path,
    tiny: Callable[..., PretrainConfig],
    commands: Commands,
    figure: Callable[[str], None],
    endurance: bool,
) -> None:
    if endurance:
        moments = ["starting"] * 4 + ["step"] * 9 + ["checkpoint"] * 5
        epochs, at_the_end = 30, 2
    else:
        moments = ["step", "checkpoint"]
        epochs, at_the_end = 4, 1
    draw = random.Random(0)
    draw.shuffle(moments)
    moments += ["report"] * at_the_end
    config = tmp_path / "config.yaml"
    config.write_text(dump_config(tiny({**CHANGES, "optim.epochs": epochs})))
    words = ("pretrain", "--config", config, "--out", tmp_path, "--continue", "--name")
    whole = commands.fork(*words, "whole", prelude=WITHOUT_PICTURES)
    assert whole.wait(600) == 0, whole.output[-5000:]

    victim = KilledRun(tmp_path / "run", epochs * STEPS_PER_EPOCH, lambda: commands.fork(*words, "run"), draw)
    for turn, moment in enumerate(moments):
        victim.kill(moment, alone=turn % 2 == 0)
    last = victim.start()
    assert last.wait(600) == 0, last.output[-5000:]

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
        f"{len(moments)} SIGKILLs in one run of {victim.steps} steps, with 2 loader workers and 2 micro-batches: "
        f"{where}. {sum(kill.alone for kill in victim.kills)} hit the command alone, its workers were gone at most "
        f"{cleared:.1f} s later. Weights, bank, centres, optimiser and metrics.csv: identical bit for bit"
    )
