"""How the benchmarks measure: calls that take turns in one process, and the memory that a call needs."""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

MIB = 2**20


def timed(call: Callable[[], object], device: str) -> float:
    """Seconds of one call."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def times(
    ours: Callable[[], object], plain: Callable[[], object], device: str, rounds: int
) -> tuple[float, float, float]:
    """Median seconds of ours and of the plain version, and the median ratio, the two taking turns."""
    ours()
    # A call of milliseconds is at the mercy of whatever else runs: several of them make a round.
    repeats = 9 if timed(ours, device) < 0.2 else 1
    fast, slow = [], []
    for _ in range(rounds):
        fast.append(statistics.median(timed(ours, device) for _ in range(repeats)))
        slow.append(timed(plain, device))
    ratios = [long / short for long, short in zip(slow, fast, strict=True)]
    return statistics.median(fast), statistics.median(slow), statistics.median(ratios)


def resident(field: str) -> int:
    """Bytes of a field of the process's status: VmRSS now, VmHWM the most since it was last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def peak_memory(call: Callable[[], object], device: str) -> int:
    """Bytes that a call needs beyond what is there before it; on the CPU, for a fresh process on Linux."""
    if device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    # Libraries set themselves up at first use; freed pages go back, or the call would use them unseen.
    small = torch.randn(4, 64, 64, requires_grad=True)
    (small @ small).softmax(dim=-1).sum().backward()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    call()
    return max(0, resident("VmHWM") - before)
