"""Peak memory of a process, or of the tensors on a GPU."""

import sys
from contextlib import suppress
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None


def peak_rss_bytes(*, workers: bool = True) -> int:
    """Return the peak resident memory of this process, plus that of its largest worker; 0 if unknown."""
    if resource is None:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if workers:
        peak += resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def reset_peak(device: torch.device) -> None:
    """Reset the peak of a GPU, or of this process if the system supports it (Linux)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Return the peak since the last `reset_peak`: of tensors on a GPU, of this process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_rss_bytes(workers=False)
