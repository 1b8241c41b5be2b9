"""Start, watch and kill commands as a user would, in processes that need not import the packages again."""

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

# A program, in a process with imported packages.
_PROGRAM = """
import multiprocessing, os, signal, sys
multiprocessing.set_start_method(None, force=True)  # a command's own, not that of the process it was forked from
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
os.setsid()
os.chdir(folder)
os.environ |= environment
log = os.open("log", os.O_WRONLY | os.O_CREAT)
os.dup2(log, 1)
os.dup2(log, 2)
sys.argv = ["program", *words]
exec(program)
"""

_COMMAND = """
from cribo import cli
{prelude}
sys.exit(cli.main(sys.argv[1:]))
"""


def free_port() -> str:
    """Return a port of this machine that no process listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def processes_in(folder: Path) -> list[int]:
    """Return the running processes with this working directory, which child processes inherit."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.append(int(process.name))
    return found


@dataclass
class RunningCommand:
    """A running command and its child processes.

    Attributes:
        pid: process id of the command.
        folder: working directory, used by no other command.
        wait: wait for some seconds, and return the exit status: negative for a signal, None if still running.
    """

    pid: int
    folder: Path
    wait: Callable[[float], int | None]

    @property
    def output(self) -> str:
        """Output of the command and its child processes so far."""
        log = self.folder / "log"
        return log.read_text(errors="replace") if log.exists() else ""

    def processes(self) -> list[int]:
        """Return the running processes of the command."""
        return processes_in(self.folder)

    def kill(self, *, all_of_it: bool) -> None:
        """Send SIGKILL to the command, alone or with its child processes."""
        for pid in {self.pid, *(self.processes() if all_of_it else ())}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def seconds_until_ended(of: Sequence[RunningCommand], limit: float) -> float:
    """Return the seconds until no process is left; infinite if longer than `limit`."""
    began = time.monotonic()
    while any(started.processes() for started in of):
        if time.monotonic() - began > limit:
            return float("inf")
        time.sleep(0.05)
    return time.monotonic() - began


class Commands:
    """Starts commands, each in its own working directory.

    Args:
        folder: parent of the working directories.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[RunningCommand] = []
        self._numbers = itertools.count()
        self._program = folder / "program.py"
        self._program.write_text(_PROGRAM)
        self._forks = multiprocessing.get_context("forkserver")
        self._forks.set_forkserver_preload(["cribo.pretraining.run", "torch._dynamo"])

    def fork(self, *words: object, environment: Mapping[str, str] | None = None, prelude: str = "") -> RunningCommand:
        """Start `cribo` with these words in a process with imported packages.

        Args:
            words: arguments of the command line.
            environment: variables added to the environment.
            prelude: Python code to run first.
        """
        return self.fork_program(_COMMAND.format(prelude=prelude), *words, environment=environment)

    def fork_program(
        self, program: str, *words: object, environment: Mapping[str, str] | None = None
    ) -> RunningCommand:
        """Start a Python program with these words as `sys.argv[1:]` in a process with imported packages."""
        folder = self._new_folder()
        given: dict[str, Any] = {
            "folder": str(folder),
            "environment": dict(environment or {}),
            "program": program,
            "words": [str(word) for word in words],
        }
        process = self._forks.Process(target=runpy.run_path, args=(str(self._program), given))
        process.start()
        assert process.pid is not None

        def wait(seconds: float) -> int | None:
            process.join(seconds)
            return process.exitcode

        return self._add(RunningCommand(process.pid, folder, wait))

    def run(self, *words: object, environment: Mapping[str, str] | None = None) -> RunningCommand:
        """Start `python -m` with these words."""
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

        return self._add(RunningCommand(process.pid, folder, wait))

    def fork_all(self, processes: int, *words: object, prelude: str = "", machines: int = 1) -> list[RunningCommand]:
        """Start `cribo` in several processes of one run, with the environment set by torchrun on each machine."""
        devices = processes // machines
        spread = ("--runtime.devices", devices, *(("--runtime.num_nodes", machines) if machines > 1 else ()))
        return self.fork_program_all(processes, _COMMAND.format(prelude=prelude), *words, *spread, machines=machines)

    def fork_program_all(self, processes: int, program: str, *words: object, machines: int = 1) -> list[RunningCommand]:
        """Start a Python program in several processes, with the environment set by torchrun on each machine."""
        devices = processes // machines
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "none"}
        shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(devices)}
        return [
            self.fork_program(
                program,
                *words,
                environment={
                    **shared,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank % devices),
                    "GROUP_RANK": str(rank // devices),
                },
            )
            for rank in range(processes)
        ]

    def end(self) -> None:
        """Kill all processes that are left after a test."""
        for started in self.started:
            left = set(started.processes())
            if started.wait(0) is None:
                left.add(started.pid)  # even if it has not reached its working directory
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            started.wait(60)

    def _new_folder(self) -> Path:
        folder = self.folder / f"command-{next(self._numbers)}"
        folder.mkdir()
        return folder

    def _add(self, started: RunningCommand) -> RunningCommand:
        self.started.append(started)
        return started
