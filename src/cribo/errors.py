"""Errors with messages for the user. Invalid input raises ValueError or FileNotFoundError before any work begins."""


class Stopped(Exception):
    """Work had to stop after it had begun.

    Attributes:
        status: exit status of the command.
        everywhere: whether all ranks of a run stop for this reason, so that only rank 0 reports it.
    """

    status = 1
    everywhere = False


class DataError(ValueError):
    """Data that cannot be used as asked; the message says what was found and what to change."""


class MissingData(DataError, FileNotFoundError):
    """A folder or file that is not there; the message offers the nearest name that is."""
