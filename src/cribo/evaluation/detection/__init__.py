"""Object detection with YOLOS (Fang et al. 2021): a vision transformer with detection tokens."""
