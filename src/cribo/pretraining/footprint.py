"""Memory: what a process and its device hold, at most and of what."""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

try:
    import resource
except ImportError:  # Windows
    resource = None


def peak_rss_bytes() -> int:
    """The most memory that this process held plus the most that one of its workers did, in bytes; 0 if unknown."""
    if resource is None:
        return 0
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * (own + children)


def reset_peak(device: torch.device) -> None:
    """Forget the device's highest mark, or on a CPU the process's, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # no Linux, or not allowed: the mark is then that of the whole life of the process
        return


def peak_bytes(device: torch.device) -> int:
    """The most that was held since the last `reset_peak`: by tensors on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return peak_rss_bytes()
    marks = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")]
    return marks[0] if marks else peak_rss_bytes()


def held_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind some tensors, each storage once.

    Example:
        >>> rows = torch.zeros(10, 4)
        >>> held_bytes([rows, rows[2:5], None])
        160
    """
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
