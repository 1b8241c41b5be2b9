"""Free memory of the host, within the limits of its control groups, and of GPUs."""

from pathlib import Path

import psutil
import torch

from cribo.control_groups import MOUNT, PROC, group_folders


def available_memory(device: torch.device | str) -> int:
    """Return the free memory of a device in bytes, on the CPU within the limits of control groups.

    Containers and SLURM set such limits.
    """
    device = torch.device(device)
    if device.type == "cuda":
        # Include memory that PyTorch has reserved but does not use.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return min((psutil.virtual_memory().available, *_free_in_groups()))


def _free_in_groups(proc: Path = PROC, mount: Path = MOUNT) -> list[int]:
    """Return the free bytes in each control group (v1 or v2) of this process; psutil ignores these limits."""
    free = []
    for folder, version in group_folders("memory", proc, mount):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
        try:
            limit, usage = (int((folder / name).read_text(encoding="ascii")) for name in names)
            statistics = (folder / "memory.stat").read_text(encoding="ascii").split()
        except (OSError, ValueError):  # not visible in this container, above the mount, or unlimited ("max")
            continue
        # The reclaimable page cache; in v1, total_inactive_file includes child groups.
        counts = dict(zip(statistics[::2], map(int, statistics[1::2]), strict=True))
        cached = max(counts.get("inactive_file", 0), counts.get("total_inactive_file", 0))
        free.append(max(0, limit - usage + cached))
    return free
