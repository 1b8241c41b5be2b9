"""The cores and the rank of a process, and its exit when its launcher has exited."""

import os
import threading
import time

from cribo.control_groups import core_limit

LAUNCHER = "CRIBO_LAUNCHER"
"""Environment variable with the process id of the launcher, set for the processes of further devices."""

_POLL_SECONDS = 1.0


def available_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and the limits of its control groups."""
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
