"""Errors whose message is for the user; what a user can mend before any work is a ValueError or a FileNotFoundError."""


class Stopped(Exception):
    """Work that had begun had to stop."""
