"""Image-level nearest-neighbour classification with global tokens."""
