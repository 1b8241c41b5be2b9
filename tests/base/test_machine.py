"""The rank of a process, its exit with its launcher, and the limits of its control groups."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from cribo.base.machine import (
    core_limit,
    free_memory_of_groups,
    is_first_process,
    keep_compiled_code,
    memory_limit,
)


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


@pytest.fixture(params=[1, 2])
def version(request: pytest.FixtureRequest) -> int:
    return request.param


def write(mount: Path, version: int, group: str, *, cores: float | None, memory: int | None) -> None:
    quota = None if cores is None else round(100_000 * cores)
    if version == 1:
        files = {
            "cpu/{}/cpu.cfs_quota_us": -1 if quota is None else quota,
            "cpu/{}/cpu.cfs_period_us": 100_000,
            "memory/{}/memory.limit_in_bytes": 2**63 - 4096 if memory is None else memory,
        }
    else:
        files = {
            "{}/cpu.max": f"{'max' if quota is None else quota} 100000",
            "{}/memory.max": "max" if memory is None else memory,
        }
    for name, value in files.items():
        path = mount / name.format(group)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


def test_the_lowest_limit_of_a_group_and_its_parents_applies(tmp_path: Path, version: int) -> None:
    groups = tmp_path / "groups"
    groups.write_text("0::/job/step\n" if version == 2 else "4:cpu,cpuacct:/job/step\n3:memory:/job/step\n")
    write(tmp_path, version, "job/step", cores=None, memory=None)
    write(tmp_path, version, "job", cores=None, memory=None)
    assert (core_limit(groups, tmp_path), memory_limit(groups, tmp_path)) == (None, None)
    write(tmp_path, version, "job/step", cores=4, memory=2**33)
    write(tmp_path, version, "job", cores=1.5, memory=2**34)
    assert (core_limit(groups, tmp_path), memory_limit(groups, tmp_path)) == (1.5, 2**33)


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert core_limit(tmp_path / "none", tmp_path) is None
    assert memory_limit(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_control_groups_are_respected(tmp_path: Path, version: int) -> None:
    """The parent group has less free memory; reclaimable page cache counts as free."""
    root = tmp_path if version == 2 else tmp_path / "memory"
    limit, usage = (
        ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    for folder, values in ((root / "outer" / "inner", (1000, 900, 50)), (root / "outer", (950, 930, 40))):
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in zip((limit, usage), values, strict=False):
            (folder / name).write_text(f"{value}\n")
        (folder / "memory.stat").write_text(f"anon 7\ninactive_file {values[2]}\n")
    groups = tmp_path / "groups"
    groups.write_text("0::/outer/inner\n" if version == 2 else "5:devices:/\n4:cpu,memory:/outer/inner\n")
    assert free_memory_of_groups(groups, tmp_path) == [150, 60]
    (root / "outer" / limit).write_text("max\n")
    assert free_memory_of_groups(groups, tmp_path) == [150]
    assert free_memory_of_groups(tmp_path / "none", tmp_path) == []


def test_compiled_code_is_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    keep_compiled_code()
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder == tmp_path / "cribo" / "compiled"
    assert folder.stat().st_mode & 0o777 == 0o700  # others can neither read nor add code
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compiled_code()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
