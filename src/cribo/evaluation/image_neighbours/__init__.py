"""Image-level nearest neighbours: what global tokens know of whole images."""
