"""Semantic correspondence: keypoints of one image found in another by nearest features."""
