"""What is refused unread; named apart so that a command line need not wait for torch."""

MAX_PIXELS = 2 * 89_478_485
"""Default limit of width x height: the size at which Pillow itself refuses to open an image."""
