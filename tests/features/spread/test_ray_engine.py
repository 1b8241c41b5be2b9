import errno
import logging
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.commands import Commands, free_port, seconds_until_ended
from tests.features.spread.toy import (
    DRIVER,
    ENVIRONMENT,
    ERRORS,
    Part,
    ToyWork,
    assert_complete,
    attempts_of,
    workers_of,
)

from cribo.base.errors import ConfigError, MissingPackage, Stopped, WorkerLost
from cribo.base.job import Job, read_record
from cribo.base.packages import install_command
from cribo.features.spread.config import RayOptions
from cribo.features.spread.ray_engine import (
    MAX_DEATHS,
    Node,
    NodeState,
    Workers,
    _portable,
    _require_answer,
    check_nodes,
    open_ray,
    plan_workers,
)

if TYPE_CHECKING:
    from cribo.features.spread.work import Engine

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def engine(address: str, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Engine]":
    with open_ray(RayOptions(address=address, workers=2), writes_to=tmp_path_factory.mktemp("out") / "new") as engine:
        yield engine


def parts_with(**faults: str) -> list[Part]:
    """Return eight parts, of which some have faults."""
    return [Part(name, faults.get(name, "")) for name in "abcdefgh"]


@pytest.mark.slow
def test_each_part_has_one_result_though_a_worker_is_killed(
    engine: "Engine", tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = parts_with(c="kill once")
    with caplog.at_level(logging.WARNING):
        accounts = [*engine.run(ToyWork(tmp_path, seconds=0.2), parts)]

    assert sorted(account.name for account in accounts) == [part.name for part in parts]
    assert_complete(tmp_path, parts)
    assert "a worker process ended during Part(name='c'" in caplog.text
    assert {part.name: attempts_of(tmp_path, part) for part in parts} == {part.name: 1 for part in parts} | {"c": 2}
    assert len({account.pid for account in accounts} | {*workers_of(tmp_path, parts[2])}) == 3


@pytest.mark.slow
def test_a_job_continues_on_a_cluster_after_an_interruption_and_killed_workers(
    engine: "Engine", tmp_path: Path
) -> None:
    parts = {part.name: part for part in parts_with(b="kill once", g="kill once")}
    (tmp_path / "written").mkdir()

    def work(job: Job, last: int) -> None:
        with job.open({}):
            missing = [parts[name] for name in job.missing([*parts])]
            for number, account in enumerate(engine.run(ToyWork(tmp_path / "written", seconds=0.1), missing), start=1):
                job.done(account.name)
                if number == last:
                    raise KeyboardInterrupt
            job.finish()

    with pytest.raises(KeyboardInterrupt, match="3 of 8 parts are done"):
        work(Job(tmp_path / "out", "toy"), 3)
    resumed = Job(tmp_path / "out", "toy", resume=True)
    assert len(resumed.accounts) == 3
    work(resumed, 8 + 1)
    assert sorted(resumed.accounts) == sorted(parts)
    assert read_record(tmp_path / "out", "toy").finished
    assert_complete(tmp_path / "written", [*parts.values()])


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
def test_an_error_of_the_work_is_raised_as_it_is_and_ends_the_other_workers(engine: "Engine", tmp_path: Path) -> None:
    waiting, expected = Part("a", "wait"), ERRORS["full disk"]
    with pytest.raises(OSError, match=r"No space left on device: 'features\.lance'") as raised:
        list(engine.run(ToyWork(tmp_path), [waiting, Part("b", "full disk")]))
    assert type(raised.value) is type(expected)
    assert (str(raised.value), raised.value.errno) == (str(expected), errno.ENOSPC)
    assert raised.value.__cause__ is None
    assert "toy.py" in raised.value.__notes__[0]  # the traceback of the worker
    for _ in range(600):
        if not any(Path(f"/proc/{pid}").exists() for pid in workers_of(tmp_path, waiting)):
            break
        time.sleep(0.05)
    else:
        pytest.fail("a worker is left")


@pytest.mark.slow
def test_a_part_that_ends_its_worker_again_and_again_is_named(engine: "Engine", tmp_path: Path) -> None:
    parts = [Part("photograph-17", "kill")]
    with pytest.raises(WorkerLost, match=rf"ended {MAX_DEATHS} times during .*photograph-17.*--engine local"):
        list(engine.run(ToyWork(tmp_path), parts))
    assert attempts_of(tmp_path, parts[0]) == MAX_DEATHS


@pytest.mark.parametrize("fault", sorted(ERRORS))
def test_errors_keep_type_and_message(fault: str) -> None:
    found = pickle.loads(pickle.dumps(_portable(ERRORS[fault])))
    assert str(found) == str(ERRORS[fault])
    assert type(found) is (Stopped if fault == "unpicklable" else type(ERRORS[fault]))


@pytest.mark.slow
def test_workers_must_fit_on_the_cluster(engine: "Engine") -> None:
    with (
        pytest.raises(ConfigError, match=r"1 workers of at least 1 CPUs and 1 GPUs .* 3 CPUs, 0 GPUs\)"),
        open_ray(RayOptions(workers=1, gpus_per_worker=1), writes_to=None),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("received", "status"),
    [(signal.SIGINT, 1), pytest.param(signal.SIGTERM, 128 + signal.SIGTERM, marks=pytest.mark.endurance)],
)
def test_a_signal_ends_all_processes(commands: Commands, tmp_path: Path, received: signal.Signals, status: int) -> None:
    driver = commands.fork_program(DRIVER, tmp_path, 1000, 0.1, environment=ENVIRONMENT)
    while not driver.output:
        assert driver.wait(0.05) is None
    os.kill(driver.pid, received)
    assert driver.wait(60) == status, driver.output
    assert seconds_until_ended([driver], 60) < 60
    printed = driver.output.partition("Process ")[0].split()  # before the traceback
    assert all(name.isdecimal() for name in printed), driver.output  # nothing of Ray


@pytest.mark.slow
def test_a_local_cluster_is_private_and_ends_with_its_killed_driver() -> None:
    program, environment = [sys.executable, "-c", _IDLE], {**os.environ, **ENVIRONMENT}
    with subprocess.Popen(program, stdout=subprocess.PIPE, env=environment, text=True) as driver:
        assert driver.stdout is not None
        try:
            place = Path(driver.stdout.readline().strip()).parent
            assert place.is_dir()
            assert place.stat().st_mode & 0o077 == 0
            started = psutil.Process(driver.pid).children(recursive=True)
            # Ray's default niceness of 15 would starve the workers on a busy machine.
            assert {process.nice() for process in started} == {os.getpriority(os.PRIO_PROCESS, 0)}
            listening = [
                connection.laddr.ip
                for process in started
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            ]
            assert listening
            assert all(ip.removeprefix("::ffff:") in ("127.0.0.1", "::1") for ip in listening)
        finally:
            driver.kill()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    deadline = time.monotonic() + 60
    while place.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")
def test_workers_have_the_environment_of_a_driver_under_uv(tmp_path: Path) -> None:
    """By default, Ray starts them by `uv run` in a copy of the working folder, here without any packages."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.11"\n')
    (tmp_path / "out").mkdir()
    command = ["uv", "run", "--no-sync", sys.executable, "-c", DRIVER, str(tmp_path / "out"), "2", "0", "1"]
    environment = {**os.environ, **ENVIRONMENT, "UV_OFFLINE": "1"}
    environment.pop("RAY_ENABLE_UV_RUN_RUNTIME_ENV")  # set for the tests
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert sorted(ran.stdout.split()) == ["000", "001"], ran.stderr


_IDLE = """
import time
from cribo.features.spread.config import RayOptions
from cribo.features.spread.ray_engine import open_ray
with open_ray(RayOptions(workers=1, cpus_per_worker=1), writes_to=None):
    import ray._private.worker
    print(ray._private.worker._global_node.get_temp_dir_path(), flush=True)
    time.sleep(1000)
"""
"""A driver with a temporary cluster, which prints its folder."""

NODES = [Node("a", cpus=16, gpus=2), Node("b", cpus=8, gpus=1)]


@pytest.mark.parametrize(
    ("options", "nodes", "expected"),
    [
        (RayOptions(), NODES, Workers(3, cpus=8, gpus=1)),
        (RayOptions(gpus_per_worker=0.5), NODES, Workers(6, cpus=4, gpus=0.5)),
        (RayOptions(gpus_per_worker=0), NODES, Workers(6, cpus=4, gpus=0)),
        (RayOptions(workers=2, cpus_per_worker=3), NODES, Workers(2, cpus=3, gpus=1)),
        (RayOptions(), [Node("a", cpus=2, gpus=0)], Workers(1, cpus=2, gpus=0)),
        (RayOptions(workers=3), [Node("a", cpus=4, gpus=0), Node("b", cpus=3, gpus=0)], Workers(3, cpus=2, gpus=0)),
    ],
)
def test_workers_share_the_nodes(options: RayOptions, nodes: list[Node], expected: Workers) -> None:
    assert plan_workers(options, nodes) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RayOptions(workers=4), r"4 workers .* 1 GPUs do not fit .*\(a: 16 CPUs, 2 GPUs; b: .*\): use --ray.workers 3"),
        (RayOptions(workers=25, gpus_per_worker=0), "use --ray.workers 24"),
        (RayOptions(gpus_per_worker=4), "4 GPUs do not fit .*lower --ray.cpus_per_worker or --ray.gpus_per_worker"),
        (RayOptions(gpus_per_worker=1.5), r"whole number or less than 1, got 1\.5"),
    ],
)
def test_too_many_workers(options: RayOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_workers(options, NODES)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (NodeState("b", {"cribo": "0.1.0", "torch": "2.10.0"}, True), "node b has torch 2.10.0, this process has 2.11"),
        (NodeState("b", {"torch": "2.11.0"}, True), "node b has cribo not installed"),
        (NodeState("b", {"cribo": "0.1.0", "torch": "2.11.0"}, False), r"out is not shared .*\(node b lacks it\)"),
    ],
)
def test_nodes_must_be_alike(state: NodeState, message: str) -> None:
    versions = {"cribo": "0.1.0", "torch": "2.11.0"}
    with pytest.raises(ConfigError, match=message):
        check_nodes([NodeState("a", versions, True), state], versions, Path("out"))


@pytest.mark.parametrize(
    ("address", "kind", "message"),
    [
        ("ray://10.0.0.1:10001", ConfigError, "--ray.address auto, or as ray job submit"),
        ("10.0.0.1", ConfigError, "must be host:port"),
        ("127.0.0.1:{free}", ConnectionError, "does not answer .*refused.*ray start --head"),
        ("no-such-host.invalid:6379", ConnectionError, "does not answer"),
    ],
)
def test_addresses_without_a_cluster(address: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        _require_answer(address.format(free=free_port()))


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with (
        pytest.raises(MissingPackage, match=re.escape(f"{install_command('cluster')}, or use --engine local")),
        open_ray(RayOptions(), writes_to=None),
    ):
        pass


def test_only_the_ray_engine_imports_ray() -> None:
    program = "import cribo.features.spread.engines, cribo.features.spread.config, sys; print('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
