"""Segmentation with trained heads: a linear one on frozen features."""
