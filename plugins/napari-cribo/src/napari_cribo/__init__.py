"""Labels from strokes in napari, by the features of a self-supervised backbone."""
