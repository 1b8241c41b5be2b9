"""Errors that users can fix. Commands print them on one line; they print other errors with a traceback."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cribo.base.wording import printable


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


class ConfigError(InputError):
    """Invalid configuration: an unknown name, or a value of the wrong type or out of range."""


class TooShort(ConfigError):
    """The time limit is too short for training."""


class FolderError(InputError):
    """A folder cannot be used for results. The message says what to do instead."""


class Damaged(InputError):
    """A file is damaged. The message gives the reason, without the file name."""


class Untrusted(InputError):
    """A file names code or an address that the user has not allowed. The message says how to allow it."""


class UntrustedFile(InputError):
    """Reading the file would execute code, which is not allowed or not supported."""


class MissingBlocks(InputError):
    """The backbone does not have these blocks."""


class ResultError(InputError):
    """The result of an evaluation cannot be read or used."""


class DatabaseError(DataError):
    """The database is missing, unreadable or incompatible; the message says what to do."""


class UnusableCheckpoint(InputError):
    """The checkpoint cannot be resumed from; nothing was loaded."""


class CannotListen(InputError):
    """The address is in use, invalid, or does not belong to this machine."""


class UnreadableImage(Stopped):
    """An image file cannot be read. Has the attributes `path` and `reason`, and can be pickled."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        # Pickle calls the class with `args` when a worker process sends the error.
        super().__init__(os.fspath(path), reason)
        self.path: str = printable(os.fspath(path))  # an error is recorded in files of UTF-8
        self.reason: str = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class TooManyPixels(UnreadableImage):
    """An image has more pixels than `max_pixels`; the file itself may be intact."""

    def __init__(self, path: str | os.PathLike[str], pixels: str, most: int) -> None:
        super().__init__(
            path, f"{pixels} are more than max_pixels = {most}: not decoded; raise --max_pixels to read it"
        )
        self.args = os.fspath(path), pixels, most


class TooManyUnreadable(Stopped):
    """During training, more images were unreadable than `data.max_unreadable` allows."""

    everywhere = True


class TooManySkipped(Stopped):
    """While writing shards, more images were unreadable than `max_unreadable` allows."""


class ShardError(Stopped):
    """A shard, or a file in object storage, of an opened collection cannot be read; the message names it."""


class WorkersFailed(Stopped):
    """Data loading workers died or hung too often."""


class WorkerLost(Stopped):
    """A worker process died repeatedly on the same part."""


class NonFiniteLoss(Stopped):
    """A loss or the weights became infinite or NaN.

    Attributes:
        what: the value that was not finite.
        step: the step at which it was detected.
    """

    everywhere = True

    def __init__(self, what: str, step: int, advice: str) -> None:
        were = "were" if what in ("the weights", "the predictions") else "was"
        super().__init__(f"{what} {were} not finite, seen at step {step}. No checkpoint contains such values: {advice}")
        self.what = what
        self.step = step


class Interrupted(Stopped):
    """Training was ended by SIGTERM or SIGUSR1, and can be resumed.

    Attributes:
        signal: the signal.
        status: exit status, 128 plus the signal's number, as in shells.
    """

    everywhere = True

    def __init__(self, received: signal.Signals, step: int | None, advice: str) -> None:
        place = "" if step is None else f" after step {step}"
        super().__init__(f"stopped by {received.name}{place}: {advice}")
        self.signal = received
        self.status = 128 + received


class DifferentFeatures(Stopped):
    """The features of the exported network differ from those of the backbone, or it cannot be loaded."""


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
    """Add a message to a KeyboardInterrupt that has none: what is kept, and how to continue.

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
