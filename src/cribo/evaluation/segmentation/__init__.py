"""Segmentation with trained heads: a linear one on frozen features, and Segmenter, which finetunes the backbone."""
