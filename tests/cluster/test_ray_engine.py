import logging
import os
import signal
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.cluster.toy import ERRORS, Account, Part, ToyWork, attempts_of, content_of, workers_of
from tests.commands import Commands, free_port, seconds_until_ended

from cribo.arguments import ConfigError
from cribo.cluster.config import RayOptions
from cribo.cluster.ray_engine import (
    MAX_DEATHS,
    Node,
    NodeState,
    WorkerLost,
    Workers,
    check_nodes,
    open_ray,
    plan_workers,
)
from cribo.errors import MissingPackage

if TYPE_CHECKING:
    from cribo.cluster.engines import Engine

REPOSITORY = Path(__file__).parents[2]
WORKERS_PATH = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])}
pytest.importorskip("ray")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Start a cluster of one node with three logical CPUs."""
    folder = tempfile.mkdtemp(prefix="cribo-")  # pytest's folders are too long for Ray
    address = f"127.0.0.1:{free_port()}"
    head = subprocess.Popen(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--include-dashboard=false"),
            *("--num-cpus=3", "--num-gpus=0", f"--object-store-memory={80 << 20}", f"--port={address.split(':')[1]}"),
            f"--temp-dir={folder}",
        ],
        env={"RAY_AUTH_MODE": "disabled"} | os.environ | WORKERS_PATH,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert head.stdout
    assert any("--block" in line for line in head.stdout), "ray start failed"
    yield address
    head.terminate()
    head.wait(60)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def engine(address: str, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Engine]":
    with open_ray(RayOptions(address=address, workers=2), writes_to=tmp_path_factory.mktemp("out") / "new") as engine:
        yield engine


def parts_with(**faults: str) -> list[Part]:
    """Return eight parts, of which some have faults."""
    return [Part(name, faults.get(name, "")) for name in "abcdefgh"]


def assert_complete(folder: Path, parts: Sequence[Part], accounts: Sequence[Account]) -> None:
    assert sorted(account.name for account in accounts) == [part.name for part in parts]
    assert {path.name: path.read_text() for path in folder.glob("*.txt")} == {
        f"{part.name}.txt": content_of(part) for part in parts
    }


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_each_part_has_one_result_though_a_worker_is_killed(engine: "Engine", tmp_path: Path) -> None:
    parts = parts_with(c="kill once")
    accounts = [*engine.run(ToyWork(tmp_path, seconds=0.2), parts)]

    assert_complete(tmp_path, parts, accounts)
    assert {part.name: attempts_of(tmp_path, part) for part in parts} == {part.name: 1 for part in parts} | {"c": 2}
    assert len({account.pid for account in accounts} | {*workers_of(tmp_path, parts[2])}) == 3


@pytest.mark.slow
def test_results_come_in_the_order_of_completion(engine: "Engine", tmp_path: Path) -> None:
    parts = parts_with(a="wait")
    names = []
    for account in engine.run(ToyWork(tmp_path), parts):
        names.append(account.name)
        if len(names) == len(parts) - 1:
            (tmp_path / "release").touch()
    assert names[-1] == "a"
    assert len(names) == len(parts)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["missing data", "full disk"])
def test_errors_of_the_work_are_raised_as_they_are(engine: "Engine", tmp_path: Path, fault: str) -> None:
    expected = ERRORS[fault]
    with pytest.raises(type(expected)) as raised:
        [*engine.run(ToyWork(tmp_path), [Part("a", "wait"), Part("b", fault)])]
    assert type(raised.value) is type(expected)
    assert str(raised.value) == str(expected)
    assert vars(raised.value).keys() == {"__notes__"}
    assert "ToyWork" not in str(raised.value)
    assert "toy.py" in raised.value.__notes__[0]  # of the worker
    if isinstance(expected, OSError):
        assert (raised.value.errno, raised.value.filename) == (expected.errno, expected.filename)
