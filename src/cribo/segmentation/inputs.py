"""Conversion of images and label maps from files, Pillow images, arrays or tensors."""

import os
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from cribo.data.images import DataError
from cribo.data.reading import decode, open_header, read_image
from cribo.data.segmentation import IGNORE_INDEX, Colour
from cribo.errors import InputError

ImageLike = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor
"""A file; a Pillow image; a uint8 array (H, W, 3); or a uint8 tensor (3, H, W)."""

LabelsLike = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor
"""A grey or palette PNG whose values are class indices; such a Pillow image; or integers (H, W)."""


class LabelMap(NamedTuple):
    """The class of each pixel of an image.

    Attributes:
        labels: class of each pixel; 255 for no class.
        palette: colours of a palette PNG; None for other sources.
    """

    labels: UInt8[Tensor, "h w"]
    palette: tuple[Colour, ...] | None = None


def open_image(image: ImageLike) -> UInt8[Tensor, "3 h w"]:
    """Return an image as an RGB tensor on the CPU.

    Raises:
        UnreadableImage: the file cannot be read as an image.
        ValueError: an array has the wrong shape or type, or a Pillow image has 32-bit pixels.
    """
    if isinstance(image, str | os.PathLike):
        return read_image(image)
    if isinstance(image, Image.Image):
        return decode(image)
    if isinstance(image, np.ndarray):
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            raise InputError(f"an image must be a uint8 array (H, W, 3), got {image.dtype} {image.shape}")
        return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)
    if image.ndim != 3 or image.shape[0] != 3 or image.dtype != torch.uint8:
        raise InputError(f"an image must be a uint8 tensor (3, H, W), got {image.dtype} {tuple(image.shape)}")
    return image.detach().cpu()


def open_labels(labels: LabelsLike) -> LabelMap:
    """Return a label map as a tensor on the CPU.

    Raises:
        UnreadableImage: the file cannot be read as an image.
        DataError: the image is not a grey or palette image of integers, or a value is not in 0-255.
        ValueError: an array has the wrong shape or type.
    """
    if isinstance(labels, str | os.PathLike):
        with open_header(labels) as image:
            image.load()
        return _labels_in(image, os.fspath(labels))
    if isinstance(labels, Image.Image):
        return _labels_in(labels, "labels")
    values = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else labels
    if values.ndim != 2 or values.dtype.kind not in "iub":
        raise InputError(f"labels must be integers (H, W), got {values.dtype} {values.shape}")
    return LabelMap(_as_bytes(values, "labels"))


def _labels_in(image: Image.Image, what: str) -> LabelMap:
    mode, values = image.mode, np.array(image)
    colours = image.getpalette("RGB") if mode == "P" else None
    if values.ndim != 2 or mode == "F":
        raise DataError(
            f"{what}: labels must be class indices in a grey or palette PNG, got colours (mode {mode}): "
            "replace each colour with the index of its class"
        )
    palette = None
    if colours is not None:
        palette = tuple((colours[c], colours[c + 1], colours[c + 2]) for c in range(0, len(colours) - 2, 3))
        used = 1 + int(values[values != IGNORE_INDEX].max(initial=0))
        while len(palette) > used and palette[-1] == (0, 0, 0):  # padding
            palette = palette[:-1]
    return LabelMap(_as_bytes(values, what), palette)


def _as_bytes(values: np.ndarray, what: str) -> UInt8[Tensor, "h w"]:
    if values.dtype != np.uint8:
        wrong = values[(values < 0) | (values > IGNORE_INDEX)]
        if wrong.size:
            raise DataError(
                f"{what}: labels must be classes 0 to {IGNORE_INDEX - 1}, or {IGNORE_INDEX} for no class, got "
                f"{int(wrong[0])} at {wrong.size} of {values.size} pixels"
            )
    return torch.from_numpy(np.array(values, dtype=np.uint8))
