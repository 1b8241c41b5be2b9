import platform
from pathlib import Path

import pytest

from cribo.base.devices import available_memory, multiplies_bfloat16


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").is_file(),
    reason="Linux tells an x86 processor's features",
)
def test_bf16_support_matches_the_processors_flags() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert multiplies_bfloat16() == bool(flags & {"avx512_bf16", "amx_bf16"})


def test_available_memory_is_positive_and_below_the_total() -> None:
    assert 2**20 < available_memory("cpu") < 2**50
