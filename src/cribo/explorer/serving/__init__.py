"""The HTTP server of `cribo serve`: a segmentation memory for other programs."""
