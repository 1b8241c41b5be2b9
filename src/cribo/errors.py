"""Errors with messages for the user. Invalid input raises ValueError or FileNotFoundError before any work begins."""


class Stopped(Exception):
    """Work had to stop after it had begun.

    Attributes:
        status: exit status of the command.
        everywhere: whether all ranks of a run stop for this reason, so that only rank 0 reports it.
    """

    status = 1
    everywhere = False
