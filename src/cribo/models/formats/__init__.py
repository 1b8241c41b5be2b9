"""Checkpoints of other projects: a table of formats, and functions that read, recognise and rename them."""
