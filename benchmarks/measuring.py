"""How the benchmarks measure: calls that take turns in one process, the memory that a call needs, and FLOPs."""

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

# (M, K, N) of the products that `product_ceiling` times: squares, and a transformer's tokens times its weights.
SHAPES_CPU = ((512, 512, 512), (1024, 1024, 1024), (3136, 384, 1536), (2048, 2048, 2048))
SHAPES_DEVICE = ((4096, 4096, 4096), (25216, 768, 3072), (8192, 8192, 8192), (16384, 8192, 8192))


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


def product_ceiling(device: str, dtype: torch.dtype) -> float:
    """The highest rate of large matrix products, in operations per second; multiplication and addition are two."""
    best = 0.0
    for m, k, n in SHAPES_CPU if device == "cpu" else SHAPES_DEVICE:
        # Random numbers: zeros draw less power, which raises the clock rate.
        a, b = (torch.randn(rows, k, device=device).to(dtype) for rows in (m, n))
        product = {"linear": linear, "a": a, "b": b}
        timer = Timer("linear(a, b)", globals=product, num_threads=torch.get_num_threads())
        best = max(best, 2 * m * k * n / min(timer.blocked_autorange(min_run_time=0.2).times))
    return best


def model_flops(backbone: Backbone, image_size: int) -> float:
    """Operations of one image's forward pass: matrix products, convolutions and attention."""
    on_meta = copy.deepcopy(backbone).to("meta").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        on_meta.encode(torch.zeros(1, 3, image_size, image_size, device="meta"))
    return float(counter.get_total_flops())
