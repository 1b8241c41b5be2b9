"""Semantic correspondence: keypoints of an image are matched in another image by nearest features."""
