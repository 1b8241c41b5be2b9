"""Conversion of images and label maps from files, Pillow images, arrays or tensors."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from PIL import Image
from torch import Tensor

from cribo.base.errors import DataError, InputError
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.labelled.label_maps import IGNORE_INDEX, LabelledBox, LabelMap, class_indices
from cribo.data.readers.pillow import upright_rgb
from cribo.data.reading import ImageContent, read_image, read_valid, read_values

ImageLike = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor
"""A file; a Pillow image; a uint8 array (H, W, C); or a uint8 tensor (C, H, W), with C = 3 for RGB."""

LabelsLike = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor | LabelMap | Sequence[LabelledBox]
"""A grey or palette PNG whose values are class indices; such a Pillow image; integers (H, W); a label map; or boxes."""


def open_image(
    image: ImageLike, reading: Reading = DEFAULT_READING, in_chans: int | None = None
) -> UInt8[Tensor, "c h w"]:
    """Return an image as a tensor on the CPU.

    Args:
        image: the image.
        reading: how files and Pillow images are read.
        in_chans: C of arrays and tensors. [that of `reading`]

    Raises:
        UnreadableImage: the file cannot be read as an image.
        ValueError: an array has the wrong shape or type, or the range of the values of a Pillow image is unknown.
    """
    if isinstance(image, str | os.PathLike):
        return read_image(image, reading=reading)
    if isinstance(image, Image.Image):
        return torch.from_numpy(upright_rgb(image, reading)).permute(2, 0, 1)
    channels = reading.in_chans if in_chans is None else in_chans
    if isinstance(image, np.ndarray):
        if image.ndim != 3 or image.shape[2] != channels or image.dtype != np.uint8:
            raise InputError(f"an image must be a uint8 array (H, W, {channels}), got {image.dtype} {image.shape}")
        return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)
    if image.ndim != 3 or image.shape[0] != channels or image.dtype != torch.uint8:
        raise InputError(f"an image must be a uint8 tensor ({channels}, H, W), got {image.dtype} {tuple(image.shape)}")
    return image.detach().cpu()


class DecodedImage(NamedTuple):
    """An image with the pixels that have data.

    Attributes:
        pixels: the image.
        valid: which pixels have data (`read_valid`); None for all.
    """

    pixels: UInt8[Tensor, "c h w"]
    valid: Bool[Tensor, "h w"] | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.pixels.nbytes + (0 if self.valid is None else self.valid.nbytes)


class Example(NamedTuple):
    """An image with the class of each pixel.

    Attributes:
        image: input for `decode_image`.
        labels: input for `open_labels`; 255 for no class.
        name: name of the example in messages and in the memory file.
    """

    image: ImageLike | DecodedImage
    labels: LabelsLike
    name: str | None = None


def decode_image(
    image: ImageLike | DecodedImage, reading: Reading = DEFAULT_READING, in_chans: int | None = None
) -> DecodedImage:
    """Return an image with the pixels that have data; arguments and errors as in `open_image`."""
    if isinstance(image, DecodedImage):
        return image
    return DecodedImage(open_image(image, reading, in_chans), open_valid(image, reading))


def open_valid(image: ImageLike | ImageContent, reading: Reading = DEFAULT_READING) -> Bool[Tensor, "h w"] | None:
    """Return which pixels of an image file have data (`read_valid`); None for all, and for images in memory.

    Raises:
        UnreadableImage: the file cannot be read as an image.
    """
    if isinstance(image, Image.Image | np.ndarray | Tensor):
        return None
    valid = read_valid(image, reading=reading)
    return None if valid is None else torch.from_numpy(valid)


def open_labels(labels: LabelsLike, size: tuple[int, int] | None = None) -> LabelMap:
    """Return a label map as a tensor on the CPU.

    Args:
        labels: the labels.
        size: height and width of the image, which boxes need.

    Raises:
        UnreadableImage: the file cannot be read as an image.
        DataError: the image has colours or fractions, or a value is not in 0-255.
        ValueError: an array has the wrong shape or type.
    """
    if isinstance(labels, LabelMap):
        return labels
    if isinstance(labels, str | os.PathLike):
        return class_indices(IGNORE_INDEX).read(read_values(labels), os.fspath(labels))
    if isinstance(labels, Image.Image):
        return class_indices(IGNORE_INDEX).read(labels, "labels")
    if isinstance(labels, Sequence):
        if size is None or not all(isinstance(box, LabelledBox) for box in labels):
            raise InputError(f"labels in a list must be boxes (LabelledBox) in an image, got {labels!r:.60}")
        return LabelMap(torch.full(size, IGNORE_INDEX, dtype=torch.uint8), boxes=tuple(labels))
    values = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else labels
    if values.ndim != 2 or values.dtype.kind not in "iub":
        raise InputError(f"labels must be integers (H, W), got {values.dtype} {values.shape}")
    if values.dtype != np.uint8 and (wrong := values[(values < 0) | (values > IGNORE_INDEX)]).size:
        raise DataError(
            f"labels must be classes 0 to {IGNORE_INDEX - 1}, or {IGNORE_INDEX} for no class, got {int(wrong[0])} at "
            f"{wrong.size} of {values.size} pixels"
        )
    return LabelMap(torch.from_numpy(np.array(values, dtype=np.uint8)))
