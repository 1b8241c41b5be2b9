"""Labelled images resized to squares with small label maps, as in Leopart's linear segmentation.

Source: Ziegler and Asano 2022; NeCo (Pariza et al. 2025) uses the same evaluation code.
"""

import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from cribo.data.crops import Crop, WholeImage, resize_labels
from cribo.data.randomness import keyed_generator
from cribo.data.segmentation import LabelledImages
from cribo.errors import InputError
from cribo.method.recipe import ViewRecipe
from cribo.method.views import sample_crops

_RECIPE = ViewRecipe(area=(0.8, 1.0), aspect=(3 / 4, 4 / 3), flip=0.5)
_CROP = 0x73717561  # key that separates these draws from others with the same seed


class SquareCrops(Dataset[Crop]):
    """Random resized crops of labelled images, indexed by (epoch, index); each key has its own crop.

    A crop covers 0.8 to 1 of the image's area at an aspect of 3/4 to 4/3, is resized to a square, and flipped
    horizontally with probability 0.5. Colours are not changed.

    Args:
        images: labelled images.
        size: side of the crops in pixels.
        mask_size: side of their label maps.
        seed: seed of all draws.

    Raises:
        ValueError: a size is below 1.
        UnreadableImage, DataError: an image or label map is invalid.

    Example:
        >>> from cribo.data.scenes import Scenes
        >>> crop = SquareCrops(Scenes(2), 64, 20, seed=0)[0, 1]
        >>> crop.pixels.shape, crop.labels.shape
        (torch.Size([3, 64, 64]), torch.Size([20, 20]))
    """

    def __init__(self, images: LabelledImages, size: int, mask_size: int, *, seed: int) -> None:
        _check(size, mask_size)
        self.images, self.size, self.mask_size, self.seed = images, size, mask_size, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> Crop:
        epoch, index = key
        image, labels = self.images.load(index), self.images.labels(index)
        generator = keyed_generator(_CROP, self.seed, epoch, index)
        crops = sample_crops(labels.shape[0], labels.shape[1], _RECIPE, generator=generator)
        top, left, height, width = crops.boxes[0].tolist()
        window = slice(top, top + height), slice(left, left + width)
        pixels = _square(image[:, *window], self.size)
        labels = _mask(labels[window], self.size, self.mask_size)
        if crops.flips[0]:
            pixels, labels = pixels.flip(2), labels.flip(1)
        return Crop(pixels, labels, torch.tensor((self.size, self.size)))


class SquareImages(Dataset[WholeImage]):
    """Labelled images for scoring; images and label maps are resized to squares, regardless of their aspect.

    Args:
        images: labelled images.
        size: side of the images in pixels.
        mask_size: side of their label maps.
    """

    def __init__(self, images: LabelledImages, size: int, mask_size: int) -> None:
        _check(size, mask_size)
        self.images, self.size, self.mask_size = images, size, mask_size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> WholeImage:
        pixels = _square(self.images.load(index), self.size)
        return WholeImage(pixels, _mask(self.images.labels(index), self.size, self.mask_size))


def _check(size: int, mask_size: int) -> None:
    for name, value in (("size", size), ("mask_size", mask_size)):
        if value < 1:
            raise InputError(f"{name} must be >= 1, got {value}")


def _square(image: UInt8[Tensor, "3 h w"], size: int) -> UInt8[Tensor, "3 size size"]:
    """Resize an image bilinearly with antialiasing, as PIL does."""
    return TF.resize(image, [size, size], interpolation=InterpolationMode.BILINEAR, antialias=True)


def _mask(labels: UInt8[Tensor, "h w"], size: int, mask_size: int) -> UInt8[Tensor, "mask mask"]:
    """Resize a label map by nearest pixels to the size of the image, then to that of the mask."""
    square = resize_labels(labels, (size, size))
    return F.interpolate(square[None, None], size=(mask_size, mask_size), mode="nearest")[0, 0]
