"""Measurement of interleaved calls, memory and FLOPs for the benchmarks."""

import copy
import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

from cribo.models import Backbone
from cribo.models.linear import linear

MIB = 2**20

# (M, K, N) of the products in `product_ceiling`: square matrices, and tokens times weights of a transformer.
SHAPES_CPU = ((512, 512, 512), (1024, 1024, 1024), (3136, 384, 1536), (2048, 2048, 2048))
SHAPES_DEVICE = ((4096, 4096, 4096), (25216, 768, 3072), (8192, 8192, 8192), (16384, 8192, 8192))


def timed(call: Callable[[], object], device: str) -> float:
    """Measure the seconds of one call."""
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
    """Measure two interleaved functions; return both median seconds and the median ratio."""
    ours()
    # Short calls are sensitive to other load, so repeat them within a round.
    repeats = 9 if timed(ours, device) < 0.2 else 1
    fast, slow = [], []
    for _ in range(rounds):
        fast.append(statistics.median(timed(ours, device) for _ in range(repeats)))
        slow.append(timed(plain, device))
    ratios = [long / short for long, short in zip(slow, fast, strict=True)]
    return statistics.median(fast), statistics.median(slow), statistics.median(ratios)


def resident(field: str) -> int:
    """Read a field of the process status in bytes: VmRSS (current) or VmHWM (peak since the last reset)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def peak_memory(call: Callable[[], object], device: str) -> int:
    """Measure the additional memory of a call in bytes; on the CPU, use a new process on Linux."""
    if device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    # Initialise libraries, and return freed pages, whose reuse would not be measured.
    small = torch.randn(4, 64, 64, requires_grad=True)
    (small @ small).softmax(dim=-1).sum().backward()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    call()
    return max(0, resident("VmHWM") - before)


def product_ceiling(device: str, dtype: torch.dtype) -> float:
    """Measure the peak rate of large matrix products in FLOP/s; a multiply-add counts as two operations."""
    best = 0.0
    for m, k, n in SHAPES_CPU if device == "cpu" else SHAPES_DEVICE:
        # Use random numbers, since zeros draw less power, which raises the clock rate.
        a, b = (torch.randn(rows, k, device=device).to(dtype) for rows in (m, n))
        product = {"linear": linear, "a": a, "b": b}
        timer = Timer("linear(a, b)", globals=product, num_threads=torch.get_num_threads())
        best = max(best, 2 * m * k * n / min(timer.blocked_autorange(min_run_time=0.2).times))
    return best


def model_flops(backbone: Backbone, image_size: int) -> float:
    """Count the operations of one image's forward pass: matrix products, convolutions and attention."""
    on_meta = copy.deepcopy(backbone).to("meta").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        on_meta.encode(torch.zeros(1, 3, image_size, image_size, device="meta"))
    return float(counter.get_total_flops())
