"""Depth prediction from frozen features, by nearest patches and by a linear probe."""
