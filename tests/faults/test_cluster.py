"""Work on a Ray cluster is complete, and nothing is done twice, whatever dies."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.commands import Commands, seconds_until_ended
from tests.features.spread.toy import (
    DRIVER,
    ENVIRONMENT,
    Part,
    ToyWork,
    assert_complete,
    attempts_of,
    running_cluster,
    workers_of,
)

from cribo.features.spread.config import RayOptions

if TYPE_CHECKING:
    from cribo.features.spread.work import Engine

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.endurance]

TRIALS = 10
PARTS = [Part(f"{number:03d}") for number in range(24)]
SECONDS = 0.25  # of each part
HOG_BYTES = 4 << 20
CLEARED_SECONDS = 60


@pytest.fixture(scope="module")
def engine() -> "Iterator[Engine]":
    from cribo.features.spread.ray_engine import open_ray

    with running_cluster() as address, open_ray(RayOptions(address=address, workers=2), writes_to=None) as engine:
        yield engine


def random_moments(trials: int) -> list[float]:
    """Return shares of the duration of the work."""
    draw = random.Random(0)
    return [draw.uniform(0.05, 0.9) for _ in range(trials)]


def run_and(act: Callable[[], Any], engine: "Engine", folder: Path, share: float) -> Counter[str]:
    """Do the work, and act when a share of the parts is done; return how often each part was accounted for."""
    accounts: Counter[str] = Counter()
    acted = threading.Timer(random.uniform(0, SECONDS), act)
    for account in engine.run(ToyWork(folder, seconds=SECONDS), PARTS):
        accounts[account.name] += 1
        if accounts.total() == 1 + int(share * len(PARTS)):
            acted.start()
    acted.join()
    return accounts


def kill_a_worker(folder: Path) -> None:
    running = {pid for part in PARTS for pid in workers_of(folder, part) if Path(f"/proc/{pid}").exists()}
    os.kill(random.choice(sorted(running)), signal.SIGKILL)


def test_killed_workers(engine: "Engine", tmp_path: Path, figure: Callable[[str], None]) -> None:
    repeated = 0
    for trial, share in enumerate(random_moments(TRIALS)):
        folder = tmp_path / str(trial)
        folder.mkdir()
        accounts = run_and(lambda folder=folder: kill_a_worker(folder), engine, folder, share)
        assert accounts == {part.name: 1 for part in PARTS}
        assert_complete(folder, PARTS)
        attempts = sum(attempts_of(folder, part) for part in PARTS)
        assert len(PARTS) <= attempts <= len(PARTS) + 1
        repeated += attempts - len(PARTS)
    figure(f"{TRIALS} runs of {len(PARTS)} parts, a worker killed in each: complete, {repeated} parts repeated")


def test_full_object_store(engine: "Engine", tmp_path: Path, figure: Callable[[str], None]) -> None:
    import numpy as np
    import ray

    class Hog:
        """Holds more than the object store: arrays that are in use cannot be spilled to disk."""

        def __init__(self) -> None:
            self._held: list[Any] = []

        def fill(self) -> int:
            capacity = int(ray.cluster_resources()["object_store_memory"])
            while sum(array.nbytes for array in self._held) < capacity:
                self._held.append(ray.get(ray.put(np.zeros(HOG_BYTES, np.uint8))))
            return len(self._held) * HOG_BYTES

    held = []
    for trial, share in enumerate(random_moments(TRIALS)):
        folder = tmp_path / str(trial)
        folder.mkdir()
        hog: Any = ray.remote(num_cpus=0)(Hog).remote()
        accounts = run_and(lambda hog=hog: held.append(ray.get(hog.fill.remote())), engine, folder, share)
        ray.kill(hog)
        assert accounts == {part.name: 1 for part in PARTS}
        assert_complete(folder, PARTS)
        assert {attempts_of(folder, part) for part in PARTS} == {1}
    figure(f"{TRIALS} runs of {len(PARTS)} parts, the object store of {min(held) >> 20} MiB filled in each: complete")


def test_killed_drivers(commands: Commands, tmp_path: Path, figure: Callable[[str], None]) -> None:
    again, cleared = 0, 0.0
    for trial, share in enumerate(random_moments(TRIALS)):
        folder = tmp_path / str(trial)
        folder.mkdir()

        def start(folder: Path = folder) -> Any:
            return commands.fork_program(DRIVER, folder, len(PARTS), SECONDS, environment=ENVIRONMENT)

        first = start()
        while len([*folder.glob("*.txt")]) < share * len(PARTS):
            assert first.wait(0.01) is None, first.output
        time.sleep(random.uniform(0, SECONDS))
        first.kill(all_of_it=False)
        second = start()  # at once, while processes of the first may be alive
        cleared = max(cleared, seconds_until_ended([first], CLEARED_SECONDS))
        assert second.wait(300) == 0, second.output
        assert seconds_until_ended([second], CLEARED_SECONDS) < CLEARED_SECONDS
        assert_complete(folder, PARTS)
        attempts = sum(attempts_of(folder, part) for part in PARTS)
        assert attempts <= len(PARTS) + 4  # two workers of the first, each within a part when it ended
        again += attempts - len(PARTS)
    assert cleared < CLEARED_SECONDS
    figure(
        f"{TRIALS} drivers killed and restarted at once: complete, {again} of {TRIALS * len(PARTS)} parts repeated; "
        f"the killed clusters were gone at most {cleared:.1f} s later"
    )
