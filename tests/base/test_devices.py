import platform
from pathlib import Path

import pytest

from cribo.base.devices import _free_in_groups, available_memory, multiplies_bfloat16


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").is_file(),
    reason="Linux tells an x86 processor's features",
)
def test_bf16_support_matches_the_processors_flags() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert multiplies_bfloat16() == bool(flags & {"avx512_bf16", "amx_bf16"})


def test_available_memory_is_positive_and_below_the_total() -> None:
    assert 2**20 < available_memory("cpu") < 2**50


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
    assert _free_in_groups(groups, tmp_path) == [150, 60]
    (root / "outer" / limit).write_text("max\n")
    assert _free_in_groups(groups, tmp_path) == [150]
    assert _free_in_groups(tmp_path / "none", tmp_path) == []
