"""Features of a collection of images as files for other programs."""
