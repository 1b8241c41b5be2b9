"""Video label propagation: objects of the first frame are tracked by nearest features (DINO, DAVIS 2017)."""
