"""Memory on CPUs: keep what was freed, instead of asking the system again at every step or image."""

import ctypes
import sys
from contextlib import suppress

# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Tell glibc to serve large arrays from its own heap and not to give memory back between steps.

    A training step allocates the same large arrays again and again; by default each is a fresh mapping whose
    pages the kernel has to clear. That is a tenth of a step of a small network, a third of a larger one's, and up to
    half of the time that the objects or the labels of an image take.

    Returns:
        whether it was done; there is nothing to do where the C library is another one.
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
    """Tell glibc to return to the system what the process does not use now; nothing happens with other libraries."""
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
