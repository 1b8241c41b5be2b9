"""Errors that a user can fix. Commands print them as one line, and all other errors with their traceback."""


class InputError(ValueError):
    """A value, file or folder that cannot be used; the message names it, the limit, and what to do instead."""


class MissingPackage(ImportError):
    """An optional package that is not installed; the message says how to install it."""


class Stopped(Exception):
    """Work had to stop after it had begun.

    Attributes:
        status: exit status of the command.
        everywhere: whether all ranks of a run stop for this reason, so that only rank 0 reports it.
    """

    status = 1
    everywhere = False


class DataError(InputError):
    """Data that cannot be used; the message says what was found and what to change."""


class MissingData(DataError, FileNotFoundError):
    """A folder or file that is not there; the message offers the nearest name that is."""
