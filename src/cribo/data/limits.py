"""Limits that the command line needs without importing torch."""

MAX_PIXELS = 2 * 89_478_485
"""Default limit of width x height: the size at which Pillow refuses to open an image."""
