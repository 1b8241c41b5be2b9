"""Settings of glibc's allocator: keep freed memory for reuse, or return it to the system."""

import ctypes
import sys
from contextlib import suppress

# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Make glibc allocate large arrays from its heap and keep freed memory.

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
