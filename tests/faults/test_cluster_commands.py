"""The commands on a Ray cluster leave complete results, each image once, whatever dies."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.commands import Commands, RunningCommand
from tests.features.spread.inputs import (
    assert_equal_databases,
    assert_equal_features,
    assert_equal_labels,
    write_inputs,
)
from tests.features.spread.toy import running_cluster

from cribo.apps.search import ObjectDatabase

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.endurance]

TRIALS = 10
IMAGES = 300
KINDS = ("embed", "index", "segment")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_cluster() as address:
        yield address


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"), IMAGES)


@pytest.fixture
def expected(inputs: Path, tmp_path: Path, commands: Commands) -> Path:
    """Return a folder with the results of each command in one process with one thread."""
    for kind in KINDS:
        done = commands.fork(*words(kind, inputs, tmp_path / "whole" / kind), environment={"OMP_NUM_THREADS": "1"})
        assert done.wait(300) == 0, done.output
    return tmp_path / "whole"


def words(kind: str, inputs: Path, out: Path, address: str = "") -> list[object]:
    """Return the command line."""
    images, backbone = inputs / "images", ("--backbone", inputs / "backbone", "--batch_size", "1")
    of_kind: dict[str, list[object]] = {
        "embed": ["embed", images, "--out", out, "--features", "patches", "--size", "32", "--resume"],
        "index": ["index", "--images", images, "--db", out, "--size", "32"],
        "segment": ["segment", "--images", images, "--examples", inputs / "examples", "--out", out, "--resume"],
    }
    ray = ["--engine", "ray", "--ray.address", address, "--ray.workers", 2, "--ray.cpus_per_worker", 1]
    return [*of_kind[kind], *backbone, *(ray if address else ())]


def assert_equal(kind: str, out: Path, expected: Path) -> None:
    """Assert that the result equals that of one process."""
    if kind == "embed":
        assert_equal_features(expected, out, parts=19)
    elif kind == "index":
        assert_equal_databases(ObjectDatabase.open(expected), ObjectDatabase.open(out))
    else:
        assert_equal_labels(expected, out, IMAGES)


def wait_for_work(command: RunningCommand, kind: str, out: Path) -> None:
    """Wait until the first results are written, and then for a random time."""
    place = {"embed": "features/*", "index": "objects.lance/data/*", "segment": "labels/*/*"}[kind]
    while not [*out.glob(place)]:
        assert command.wait(0.05) is None, command.output
    time.sleep(random.uniform(0, 2))


def test_killed_drivers(
    address: str, inputs: Path, expected: Path, tmp_path: Path, commands: Commands, figure: Callable[[str], None]
) -> None:
    unfinished = 0
    for trial in range(TRIALS):
        kind, out = KINDS[trial % len(KINDS)], tmp_path / str(trial)
        first = commands.fork(*words(kind, inputs, out, address))
        wait_for_work(first, kind, out)
        unfinished += first.wait(0) is None
        first.kill(all_of_it=False)
        second = commands.fork(*words(kind, inputs, out, address))
        assert second.wait(600) == 0, second.output
        assert_equal(kind, out, expected / kind)
    figure(
        f"{TRIALS} commands on Ray killed, {unfinished} of them before their end, and repeated: results of one process"
    )


def test_killed_workers(
    address: str, inputs: Path, expected: Path, tmp_path: Path, commands: Commands, figure: Callable[[str], None]
) -> None:
    killed = 0
    for trial in range(TRIALS):
        kind, out = KINDS[trial % len(KINDS)], tmp_path / str(trial)
        command = commands.fork(*words(kind, inputs, out, address))
        wait_for_work(command, kind, out)
        for worker in workers()[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
                killed += 1
        assert command.wait(600) == 0, command.output
        assert_equal(kind, out, expected / kind)
    figure(f"{TRIALS} commands on Ray, {killed} of their workers killed: results as in one process")


def workers() -> list[int]:
    """Return the worker processes of this machine in random order."""
    found: list[int] = []
    process: Any
    for process in psutil.process_iter(["cmdline"]):
        if "_Worker" in " ".join(process.info["cmdline"] or []):
            found.append(process.pid)
    return random.sample(found, len(found))
