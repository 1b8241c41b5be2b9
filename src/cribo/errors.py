"""Errors whose message is for the user; what a user can mend before any work is a ValueError or a FileNotFoundError."""


class Stopped(Exception):
    """Work that had begun had to stop.

    Attributes:
        status: with which the command ends.
        everywhere: whether all processes of a run stop for it, so that the first one speaks for all.
    """

    status = 1
    everywhere = False


class DataError(ValueError):
    """Data that cannot be used as asked; the message says what was found and what to change."""


class MissingData(DataError, FileNotFoundError):
    """A folder or file that is not there; the message offers the nearest name that is."""
