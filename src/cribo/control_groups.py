"""Limits that Linux control groups, as used by containers and SLURM, set on this process."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def group_folders(controller: str, proc: Path = PROC, mount: Path = MOUNT) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each control group that may limit this process, and its version: 1 or 2.

    Args:
        controller: the controller, such as `memory` or `cpu`.
        proc: file with the groups of this process; nothing is yielded if it does not exist.
        mount: folder where the groups are mounted.
    """
    for line in proc.read_text(encoding="utf-8").splitlines() if proc.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = (mount / controller if controllers else mount) / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, 1 if controllers else 2


def memory_limit(proc: Path = PROC, mount: Path = MOUNT) -> int | None:
    """Return the lowest limit of memory in bytes; None without a limit."""
    limits = []
    for folder, version in group_folders("memory", proc, mount):
        with suppress(OSError, ValueError):  # not visible in this container, above the mount, or unlimited ("max")
            limits.append(int((folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).read_text()))
    return min((limit for limit in limits if limit < 2**60), default=None)  # v1 writes almost 2^63 for no limit


def core_limit(proc: Path = PROC, mount: Path = MOUNT) -> float | None:
    """Return the lowest limit of processor time in cores; None without a limit."""
    limits = []
    for folder, version in group_folders("cpu", proc, mount):
        with suppress(OSError, ValueError):
            if version == 1:
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                quota, period = (int((folder / name).read_text()) for name in names)
            else:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            if quota > 0:  # v1 writes -1 for no limit
                limits.append(quota / period)
    return min(limits, default=None)
