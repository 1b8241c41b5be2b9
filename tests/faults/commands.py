"""Commands that are started as a user starts them, watched from outside, and killed."""

import contextlib
import itertools
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WITHOUT_PICTURES = "import cribo.pretraining.run as run; run.write_report = lambda *args, **kwargs: []"
"""A prelude for runs whose pictures nobody looks at: they take longer than the training."""

# The command `cribo`, in a process that has imported already what takes seconds.
_PROGRAM = """
import multiprocessing, os, sys
multiprocessing.set_start_method(None, force=True)  # a command's own, not that of the process it was forked from
os.setsid()
os.chdir(folder)
os.environ |= environment
log = os.open("log", os.O_WRONLY | os.O_CREAT)
os.dup2(log, 1)
os.dup2(log, 2)
from cribo import cli
exec(prelude)
sys.exit(cli.main(words))
"""


def working_in(folder: Path) -> list[int]:
    """The living processes whose working directory is a folder: a process hands its own on to all that it starts."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.append(int(process.name))
    return found


@dataclass
class Started:
    """A command that was started, and everything that it starts itself.

    Attributes:
        pid: of the command.
        folder: its working directory, and of nobody else.
        wait: waits for so many seconds, and returns the status: minus the signal that ended it, None if nothing did.
    """

    pid: int
    folder: Path
    wait: Callable[[float], int | None]

    @property
    def said(self) -> str:
        """All that the command and what it started have printed."""
        return (self.folder / "log").read_text(errors="replace")

    def living(self) -> list[int]:
        """Its processes."""
        return working_in(self.folder)

    def kill(self, *, all_of_it: bool) -> None:
        """SIGKILL to the command, alone or with everything that it has started."""
        for pid in {self.pid, *(self.living() if all_of_it else ())}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def seconds_to_the_end(of: Sequence[Started], limit: float) -> float:
    """How long it takes from now until no process of these is left; infinite if it is longer than `limit`."""
    began = time.monotonic()
    while any(started.living() for started in of):
        if time.monotonic() - began > limit:
            return float("inf")
        time.sleep(0.05)
    return time.monotonic() - began


class Commands:
    """Starts commands, each in a working directory of its own.

    Args:
        folder: of these.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Started] = []
        self._numbers = itertools.count()
        self._program = folder / "program.py"
        self._program.write_text(_PROGRAM)
        self._forks = multiprocessing.get_context("forkserver")
        self._forks.set_forkserver_preload(["cribo.pretraining.run", "torch._dynamo"])

    def fork(self, *words: object, environment: Mapping[str, str] | None = None, prelude: str = "") -> Started:
        """Start `cribo` with these words in a process that has imported already what takes seconds.

        Args:
            words: of the command line.
            environment: of it, added to this one.
            prelude: Python that it executes first.
        """
        folder = self._new_folder()
        given: dict[str, Any] = {
            "folder": str(folder),
            "environment": dict(environment or {}),
            "prelude": prelude,
            "words": [str(word) for word in words],
        }
        process = self._forks.Process(target=runpy.run_path, args=(str(self._program), given))
        process.start()
        assert process.pid is not None

        def wait(seconds: float) -> int | None:
            process.join(seconds)
            return process.exitcode

        return self._add(Started(process.pid, folder, wait))

    def run(self, *words: object, environment: Mapping[str, str] | None = None) -> Started:
        """Start `python -m` with these words, as a user does."""
        folder = self._new_folder()
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *(str(word) for word in words)],
                cwd=folder,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

        def wait(seconds: float) -> int | None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            return process.returncode

        return self._add(Started(process.pid, folder, wait))

    def fork_all(self, processes: int, *words: object, prelude: str = "") -> list[Started]:
        """Start `cribo` in so many processes of one run, with what torchrun would tell each."""
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = str(found.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}
        shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        words = (*words, "--runtime.devices", processes)
        return [
            self.fork(*words, prelude=prelude, environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(processes)
        ]

    def end(self) -> None:
        """Leave none behind, whatever has become of a test."""
        for started in self.started:
            for pid in started.living():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            started.wait(60)

    def _new_folder(self) -> Path:
        folder = self.folder / f"command-{next(self._numbers)}"
        folder.mkdir()
        return folder

    def _add(self, started: Started) -> Started:
        self.started.append(started)
        return started
