"""Errors that users can fix. Commands print them on one line; they print other errors with a traceback."""

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
