"""Video label propagation: objects of the first frame are followed by nearest features (DINO, DAVIS 2017)."""
