"""Labelled images: standard data sets and formats of annotations."""
