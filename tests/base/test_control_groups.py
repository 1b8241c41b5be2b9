from pathlib import Path

import pytest

from cribo.base.machine import core_limit, memory_limit


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
