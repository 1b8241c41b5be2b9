"""What a process knows and sets of its machine: cores, limits of memory, rank, allocator, cache of compiled code."""

import ctypes
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LAUNCHER = "CRIBO_LAUNCHER"
"""Environment variable with the process id of the launcher, set for the processes of other ranks."""

PROC, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""File that lists the control groups of this process, and folder where they are mounted."""

_POLL_SECONDS = 1.0
# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def available_cores() -> int:
    """Return the number of cores available to this process, within its CPU affinity and control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = core_limit()
    return cores if limit is None else max(1, min(cores, int(limit)))


def is_first_process() -> bool:
    """Whether this process is rank 0 of all nodes, according to the launcher's environment variables."""
    # LOCAL_RANK is the rank within a node.
    for names in (("RANK",), ("LOCAL_RANK", "NODE_RANK"), ("SLURM_PROCID",), ("NODE_RANK",)):
        if names[0] in os.environ:
            return all(int(os.environ.get(name, 0)) == 0 for name in names)
    return True


def end_with_launcher() -> None:
    """Start a thread that exits this process when its launcher has exited.

    Otherwise the process would occupy its device, waiting for other ranks until the communication library's timeout.
    """
    if os.name != "posix":  # elsewhere the parent's id does not change when it exits
        return
    if LAUNCHER in os.environ:
        launcher = int(os.environ[LAUNCHER])
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = os.getppid()
    else:
        return
    if not any(thread.name == LAUNCHER for thread in threading.enumerate()):
        threading.Thread(target=_exit_with_parent, args=(launcher,), name=LAUNCHER, daemon=True).start()


def _exit_with_parent(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_SECONDS)
    os.write(2, b"the launcher has exited; exiting\n")
    os._exit(1)  # also while the main thread is blocked


def group_folders(controller: str, proc: Path = PROC, mount: Path = MOUNT) -> Iterator[tuple[Path, int]]:
    """Yield the folder and the version (1 or 2) of each control group that applies to this process.

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
    """Return the lowest memory limit in bytes, or None if there is no limit."""
    limits = []
    for folder, version in group_folders("memory", proc, mount):
        with suppress(OSError, ValueError):  # not visible in this container, above the mount, or unlimited ("max")
            limits.append(int((folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).read_text()))
    return min((limit for limit in limits if limit < 2**60), default=None)  # v1 writes almost 2^63 for no limit


def free_memory_of_groups(proc: Path = PROC, mount: Path = MOUNT) -> list[int]:
    """Return the free bytes in each control group of this process; psutil ignores these limits."""
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


def core_limit(proc: Path = PROC, mount: Path = MOUNT) -> float | None:
    """Return the lowest CPU limit in cores, or None if there is no limit."""
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


def keep_freed_memory() -> bool:
    """Make glibc allocate large arrays on its heap and keep freed memory for reuse.

    A training step allocates the same large arrays repeatedly. By default, glibc maps new memory for each, whose pages
    the kernel clears. This takes a tenth of a training step for a small network, a third for a larger one, and up to
    half of the time needed to find the objects or the labels of an image.

    Returns:
        whether all settings were applied; False with other C libraries.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 * 2**20))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


def give_freed_memory_back() -> None:
    """Make glibc return unused memory to the system; no-op with other C libraries."""
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def keep_compiled_code() -> None:
    """Let torch.compile keep its code in the user's cache folder, `cribo/compiled`, for the next run.

    PyTorch's default is the temporary folder, which may be emptied, and to which other users can write. No-op if
    TORCHINDUCTOR_CACHE_DIR names another folder, or if the cache folder cannot be created.
    """
    default = Path(tempfile.gettempdir()) / "torchinductor_"  # with the user's name, set when torch loads its compiler
    if not os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(default)).startswith(str(default)):
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / "cribo" / "compiled"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
