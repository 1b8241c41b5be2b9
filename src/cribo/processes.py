"""Which of several processes of one command this is, and whether there still is who started it."""

import os
import threading
import time

LAUNCHER = "CRIBO_LAUNCHER"
"""The environment variable that names the process which has started this one for a further device."""

_SECONDS_BETWEEN_LOOKS = 1.0


def is_first_process() -> bool:
    """Whether this is the only process of a command, or the first of all nodes, by what its launcher tells it."""
    # A local rank, or none, counts on its own node only.
    for names in (("RANK",), ("LOCAL_RANK", "NODE_RANK"), ("SLURM_PROCID",), ("NODE_RANK",)):
        if names[0] in os.environ:
            return all(int(os.environ.get(name, 0)) == 0 for name in names)
    return True


def end_with_launcher() -> None:
    """Have this process end when the one that has started it for a device of its own is gone.

    Otherwise it would wait for its peers, and keep its device, for as long as their library has patience.
    """
    if os.name != "posix":  # elsewhere a process does not see that its parent has gone
        return
    if LAUNCHER in os.environ:
        launcher = int(os.environ[LAUNCHER])
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = os.getppid()
    else:
        return
    if not any(thread.name == LAUNCHER for thread in threading.enumerate()):
        threading.Thread(target=_outlive_no, args=(launcher,), name=LAUNCHER, daemon=True).start()


def _outlive_no(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os.write(2, b"the process that started this one has ended, and so does this one\n")
    os._exit(1)  # whatever it is waiting for
