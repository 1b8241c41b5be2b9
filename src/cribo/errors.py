"""Errors that users can fix. Commands print them on one line; they print other errors with a traceback."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Invalid value, file or folder. The message names it, the limit, and what to do instead."""


class MissingPackage(ImportError):
    """An optional package is not installed. The message says how to install it."""


class Stopped(Exception):
    """A command had to stop before it was complete.

    Attributes:
        status: exit status of the command.
        everywhere: whether all ranks stop for the same reason, so that only rank 0 reports it.
    """

    status = 1
    everywhere = False


class DataError(InputError):
    """Invalid data. The message says what was found and what to change."""


class MissingData(DataError, FileNotFoundError):
    """A folder or file does not exist. The message suggests the most similar existing name."""


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_MEMORY = ("DefaultCPUAllocator", "bad_alloc", "Cannot allocate memory", "failed to map segment", "out of memory")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors from which it was raised, or during whose handling."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, also of a library or of an import, is due to a lack of memory."""
    torch = sys.modules.get("torch")  # avoids importing torch
    for each in causes(error):
        if isinstance(each, MemoryError) or (torch is not None and isinstance(each, torch.OutOfMemoryError)):
            return True
        # Libraries in C++ raise plain errors, and the import of one that cannot be mapped to memory is an ImportError.
        if isinstance(each, OSError) and each.errno == errno.ENOMEM:
            return True
        if isinstance(each, RuntimeError | ImportError) and any(text in str(each) for text in _NO_MEMORY):
            return True
    return False


def full_disk(error: BaseException) -> OSError | None:
    """Return the system error of a full disk, an exhausted quota or a limit of file size; None for other errors.

    Libraries that do not write through Python raise errors of their own, with the system's text.
    """
    for each in causes(error):
        if isinstance(each, OSError) and each.errno in _FULL:
            return each
        for number in _FULL:
            if os.strerror(number) in str(each) or "file write failed" in str(each):  # the latter by PyTorch
                return OSError(number, os.strerror(number))
    return None


@contextmanager
def if_interrupted(advice: Callable[[], str]) -> Iterator[None]:
    """Give a KeyboardInterrupt a message, unless it has one: what is kept, and how to continue.

    Args:
        advice: returns the message; called only on Ctrl-C.

    Example:
        >>> try:
        ...     with if_interrupted(lambda: "3 of 5 images are done"):
        ...         raise KeyboardInterrupt
        ... except KeyboardInterrupt as error:
        ...     print(error)
        3 of 5 images are done
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(str(error) or advice()) from error
