"""Overclustering: unsupervised segmentation by k-means on patches."""
