"""What can be trained on and evaluated on."""

from cribo.data.images import DataError, ImageFiles, ImageSource, MissingData, open_images
from cribo.data.reading import UnreadableImage, read_image
from cribo.data.segmentation import LabelledFolder, LabelledImages, open_labelled

__all__ = [
    "DataError",
    "ImageFiles",
    "ImageSource",
    "LabelledFolder",
    "LabelledImages",
    "MissingData",
    "UnreadableImage",
    "open_images",
    "open_labelled",
    "read_image",
]
