"""Object detection with YOLOS (Fang et al. 2021): boxes from a vision transformer, as little changed as can be."""
