import platform
from pathlib import Path

import pytest

from cribo.base.devices import multiplies_bfloat16


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").is_file(),
    reason="Linux tells an x86 processor's features",
)
def test_bf16_support_matches_the_processors_flags() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert multiplies_bfloat16() == bool(flags & {"avx512_bf16", "amx_bf16"})
