"""The rank of a process, and its exit with its launcher."""

import os
import select
import subprocess
import sys

import pytest

from cribo.base.machine import is_first_process


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}, True),
        ({"RANK": "8", "LOCAL_RANK": "0", "GROUP_RANK": "1"}, False),  # torchrun, first rank of the second node
        ({"LOCAL_RANK": "1"}, False),  # Lightning's launcher
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, False),
        ({"NODE_RANK": "1"}, False),
        ({"SLURM_PROCID": "0"}, True),
        ({"SLURM_PROCID": "3"}, False),
    ],
)
def test_the_first_process_is_detected(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], first: bool
) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_first_process() == first


WAITS = """
import time
from cribo.base.machine import end_with_launcher
end_with_launcher()
print("waiting", flush=True)
time.sleep(300)
"""
LAUNCHES = """
import os, subprocess, sys
if sys.argv[1] == "CRIBO_LAUNCHER":
    os.environ["CRIBO_LAUNCHER"] = str(os.getpid())
elif sys.argv[1]:
    os.environ[sys.argv[1]] = "none"
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open, which Linux has")
@pytest.mark.parametrize("variable", ["CRIBO_LAUNCHER", "TORCHELASTIC_RUN_ID"])
def test_a_process_exits_with_its_launcher(variable: str) -> None:
    pipe = subprocess.PIPE
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHES, variable, WAITS], stdin=pipe, stdout=pipe, text=True)
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    os.kill(child, 0)
    ended = os.pidfd_open(child)
    launcher.kill()
    launcher.wait()
    # A process has exited when its descriptor is readable, regardless of its new parent.
    assert select.select([ended], [], [], 30)[0]
    os.close(ended)
