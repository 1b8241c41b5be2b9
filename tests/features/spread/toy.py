"""A small work whose parts can fail, and clusters for it; workers of Ray import this module."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.commands import free_port

from cribo.base.errors import MissingData, Stopped
from cribo.base.files import write_text

REPOSITORY = Path(__file__).parents[3]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])}
"""Variables with which workers find this module."""

DRIVER = """
import sys
from pathlib import Path
from tests.features.spread.toy import Part, ToyWork
from cribo.features.spread.config import RayOptions
from cribo.features.spread.ray_engine import open_ray

folder = Path(sys.argv[1])
names = [f"{number:03d}" for number in range(int(sys.argv[2]))]
left = [Part(name) for name in names if not (folder / f"{name}.txt").exists()]
with open_ray(RayOptions(workers=int(*sys.argv[4:] or [2])), writes_to=folder) as engine:
    for account in engine.run(ToyWork(folder, seconds=float(sys.argv[3])), left):
        print(account.name, flush=True)
"""
"""A resumable command on a temporary cluster. Arguments: folder, number of parts, seconds of each, workers (2)."""


class Poisoned(Stopped):
    """An error that cannot be pickled, because its arguments are not its message."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


class Part(NamedTuple):
    """A name, and what happens to it."""

    name: str
    fault: str = ""


class Account(NamedTuple):
    """A completed part."""

    name: str
    pid: int


@dataclass
class ToyWork:
    """Writes a file for each part, with its name twice.

    Args:
        folder: output folder; `begun` in it has an empty file for each attempt.
        seconds: duration of each part.
    """

    folder: Path
    seconds: float = 0

    def __call__(self, parts: Iterable[Part]) -> Generator[Account, None, None]:
        for part in parts:
            attempt = self._begin(part)
            if part.fault == "kill" or (part.fault == "kill once" and attempt == 1):
                os.kill(os.getpid(), signal.SIGKILL)
            if part.fault == "wait":
                self._wait_for("release")
            if part.fault in ERRORS:
                raise ERRORS[part.fault]
            time.sleep(self.seconds)
            write_text(self.folder / f"{part.name}.txt", content_of(part))
            yield Account(part.name, os.getpid())

    def _begin(self, part: Part) -> int:
        begun = self.folder / "begun"
        begun.mkdir(exist_ok=True)
        (begun / f"{part.name}-{os.getpid()}-{time.time_ns()}").touch()
        return attempts_of(self.folder, part)

    def _wait_for(self, name: str) -> None:
        while not (self.folder / name).exists():
            time.sleep(0.02)


ERRORS: dict[str, Exception] = {
    "missing data": MissingData("photographs/ does not exist: did you mean photos/"),
    "full disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "features.lance"),
    "unpicklable": Poisoned("one", "two"),
}


def content_of(part: Part) -> str:
    return part.name * 2


def attempts_of(folder: Path, part: Part) -> int:
    return len([*(folder / "begun").glob(f"{part.name}-*")])


def workers_of(folder: Path, part: Part) -> list[int]:
    """Return the process of each attempt."""
    return [int(path.name.split("-")[1]) for path in (folder / "begun").glob(f"{part.name}-*")]


def assert_complete(folder: Path, parts: Sequence[Part]) -> None:
    """Assert that the folder has the whole result of each part, and no other files."""
    assert {path.name: path.read_text() for path in folder.iterdir() if path.is_file()} == {
        f"{part.name}.txt": content_of(part) for part in parts
    }


@contextlib.contextmanager
def running_cluster() -> Iterator[str]:
    """Start a cluster of one node with three logical CPUs and the smallest object store; yield its address."""
    folder = tempfile.mkdtemp(prefix="cribo-")  # pytest's folders are too long for Ray
    address = f"127.0.0.1:{free_port()}"
    head = subprocess.Popen(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--include-dashboard=false"),
            *("--num-cpus=3", "--num-gpus=0", f"--object-store-memory={80 << 20}", f"--port={address.split(':')[1]}"),
            f"--temp-dir={folder}",
        ],
        # With Ray's default niceness of 15, concurrent tests starve the workers.
        env={"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        | os.environ
        | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert head.stdout
    try:
        assert any("--block" in line for line in head.stdout), "ray start failed"
        yield address
    finally:
        head.kill()  # its reaper ends the other processes; SIGTERM would first drain the node for 30 seconds
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)
