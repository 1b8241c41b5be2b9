"""Checkpoints of other projects: a table of formats, and what reads, recognises and renames them."""
